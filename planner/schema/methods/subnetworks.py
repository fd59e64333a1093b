"""Copies that each train some of the neurons, dealt out anew every few steps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import (
    Feature,
    Method,
    Synchronisation,
    copies_of_one_device,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["METHODS", "Subnetworks"]


class Subnetworks(Synchronisation):
    """Copies each train some of the neurons, dealt out anew every few steps.

    Neurons are the features between colwise layers and the rowwise one behind them,
    and heads of attention. In a round each of n copies has 1/n of the neurons of every
    such group of layers, and trains the narrower model on its own samples, by itself.
    Then weights of neurons go to the copy that has them next, and all other weights are
    averaged. Each round begins with a new optimizer.

    In chains of layers, such as a plain perceptron or a graph convolutional network, a
    layer between two hidden ones takes neurons of the one and makes those of the other:
    a copy trains 1/n^2 of its weights in a round. Copies keep 1/n of such a layer each,
    from which they take what they train and to which it returns.

    Attributes:
        local_steps: Steps of a round.
        layers: Layers between which neurons lie: ``pairs`` that tp would divide, or
            ``chains`` of layers that follow each other.
        seed: Of the permutations by which neurons are dealt out.
    """

    apart: ClassVar[bool] = True
    splits: ClassVar[bool] = True
    of_neurons: ClassVar[bool] = True

    kind: Literal["subnetworks"] = "subnetworks"
    local_steps: Annotated[int, Field(ge=1, le=10**6)] = 80
    layers: Literal["pairs", "chains"] = "pairs"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0

    @property
    def chains(self) -> bool:
        """True if features are divided between all layers that follow each other."""
        return self.layers == "chains"

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps without an exchange, and the last ones of a round."""
        share = 1 / self.local_steps
        exchange = {"exchange": share}
        return exchange if share == 1 else {"plain": 1 - share} | exchange

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """Weights of neurons change hands once a round; others are averaged."""
        return {
            "all_reduce": (weights - divided) / self.local_steps,
            "all_to_all": divided / self.local_steps,
        }


_ALONE = "copies of one device each have parts of the layers"

METHODS = (
    Method(
        kind="subnetworks",
        slot="synchronisation",
        document=Subnetworks,
        words="copies train shares of the neurons, dealt out every {local_steps} steps",
        inexact="each copy trains some of the neurons alone",
        limits=(partial(copies_of_one_device, why=_ALONE),),
        feature=Feature(
            name="subnetworks",
            mesh={"dp_replicate": 2},
            fields={
                "synchronisation": Subnetworks(local_steps=1),
                "semantics": "approximate",
            },
            kind="synchronisation",
            # A copy's loss and gradients are those of a narrower model.
            tolerance=(1e-1, float("inf"), float("inf")),
        ),
        # Yuan et al. 2022, section 5: local iterations of the repository's runs.
        # Wolfe et al. 2021 (GIST, arXiv 2102.10424): 500 local iterations on Reddit.
        presets={
            "ist": Subnetworks(local_steps=80),
            "gist": Subnetworks(local_steps=500, layers="chains"),
        },
        prices="planner.cost.replicas.subnetworks:SubnetworksPricing",
        runs="executors.replicas.subnetworks:SubnetworksReplicas",
        page="methods/subnetworks.md",
        test="tests/distributed/test_subnetworks.py",
        source="Yuan et al. 2022, arXiv 1910.02120",
    ),
)
