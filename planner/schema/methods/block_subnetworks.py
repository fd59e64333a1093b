"""Copies that each train some of the residual blocks, dealt out anew in each round."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import (
    Feature,
    Method,
    Synchronisation,
    copies_of_one_device,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METHODS", "BlockSubnetworks"]


class BlockSubnetworks(Synchronisation):
    """Copies each train some of the residual blocks, dealt out anew in each round.

    Blocks are the longest run of equal units of the model, such as the layers of a
    transformer or the equal blocks of a stage of a ResNet. In a round each copy trains
    a shallower model on its own samples, by itself, and passes the residual stream by
    all blocks that are not its own. Then weights of a block are averaged over the
    copies that had it and go to those that have it next, and all other weights are
    averaged over all copies. Each round begins with a new optimizer.

    Attributes:
        period: Steps of a round.
        min_blocks: Blocks of a copy at least; where dealing gives it fewer it has some
            of other copies', too.
        seed: Of the permutations by which blocks are dealt out.
    """

    apart: ClassVar[bool] = True
    of_blocks: ClassVar[bool] = True

    kind: Literal["block_subnetworks"] = "block_subnetworks"
    period: Annotated[int, Field(ge=1, le=10**6)] = 50
    min_blocks: Annotated[int, Field(ge=1, le=1024)] = 1
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    def depth(self, copies: Any, blocks: int) -> Any:
        """Blocks that each copy has: an equal share, rounded up, or ``min_blocks``."""
        share = -(-blocks // copies)
        more = (self.min_blocks - share) * (self.min_blocks > share)
        return share + more * (copies > 1)

    def passed(self, copies: Any, blocks: int) -> Any:
        """Blocks that a copy passes on at the end of a round; a mean over copies.

        Each block goes from one holder to one that has it next. What further holders
        have trained goes to that holder before, and to further ones behind.
        """
        share = blocks / copies
        return (share + 2 * (self.depth(copies, blocks) - share)) * (copies > 1)

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps without an exchange, and the last ones of a round."""
        share = 1 / self.period
        exchange = {"exchange": share}
        return exchange if share == 1 else {"plain": 1 - share} | exchange

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """Blocks change hands once a round; all other weights are averaged."""
        return {
            "all_reduce": (weights - divided) / self.period,
            "all_to_all": divided / self.period,
        }


METHODS = (
    Method(
        kind="block_subnetworks",
        slot="synchronisation",
        document=BlockSubnetworks,
        words="copies train shares of the blocks, dealt out every {period} steps",
        inexact="each copy trains some of the residual blocks alone",
        limits=(
            partial(copies_of_one_device, why="copies of one device each skip blocks"),
        ),
        feature=Feature(
            name="block subnetworks",
            mesh={"dp_replicate": 2},
            fields={
                "synchronisation": BlockSubnetworks(period=1),
                "semantics": "approximate",
            },
            kind="synchronisation",
            # A copy's loss and gradients are those of a shallower model.
            tolerance=(2e-1, float("inf"), float("inf")),
        ),
        # Dun et al. 2022, section 5: 50 local iterations a round.
        presets={"resist": BlockSubnetworks(period=50)},
        prices="planner.cost.replicas.block_subnetworks:BlockSubnetworksPricing",
        runs="executors.replicas.block_subnetworks:BlockSubnetworksReplicas",
        page="methods/block-subnetworks.md",
        test="tests/distributed/test_block_subnetworks.py",
        source="Dun et al. 2022, arXiv 2107.00961",
    ),
)
