"""Copies that average their weights with a few others in each step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import (
    Feature,
    Method,
    Synchronisation,
    copies_apart,
)

if TYPE_CHECKING:
    from planner.schema.violations import Case

__all__ = ["METHODS", "Gossip", "Round", "copies_per_host", "rounds_of"]

#: Groups of copies that average with each other in a step; a copy is in one of them.
Round = tuple[tuple[int, ...], ...]

Topology = Literal["complete", "ring", "exponential", "exponential_ring"]


class Gossip(Synchronisation):
    """Copies average their weights with a few others in each step.

    A step sends the weights that it begins with, while it computes its gradient at
    them. Then it mixes them with those of its group, and the optimizer goes on from
    the mix: x ← w x + (1 - w)/(G - 1) Σ_j x_j - update. What the optimizer keeps of a
    parameter stays the copy's own.

    Attributes:
        topology: Groups that copies average in, see :func:`rounds_of`.
        self_weight: w, the share of its own weights that a copy keeps.
        commit_every: Steps of Adam between two updates of its moments, which then
            take the mean gradient of these steps.
    """

    apart: ClassVar[bool] = True
    #: Steps from one loss that all copies share to the next.
    LOSS_EVERY: ClassVar[int] = 10

    kind: Literal["gossip"] = "gossip"
    topology: Topology = "exponential_ring"
    self_weight: Annotated[float, Field(gt=0, lt=1)] = 0.5
    commit_every: Annotated[int, Field(ge=1, le=10**6)] = 1

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """All trained weights, in every step, whatever the group."""
        return {"all_reduce": weights}


def rounds_of(topology: Topology, copies: int, per_host: int = 1) -> tuple[Round, ...]:
    """Groups of each step of a topology's cycle.

    - ``complete``: all copies.
    - ``ring``: pairs of neighbours, to the left and to the right in turn.
    - ``exponential``: pairs at distances 1, 2, 4, ...: copies i and i XOR 2^t.
    - ``exponential_ring``: the copies of each host, then those of two hosts, at
      distances as above, in turn.

    A copy without a partner in a round is in a group of its own.

    Args:
        topology: One of these.
        copies: Number of copies.
        per_host: Neighbouring copies that share a host; only the last takes note.

    Source: Wang et al. 2025, arXiv 2410.11998; Ying et al. 2021, 2110.13363, for pairs
    at exponential distances.
    """
    if topology == "complete":
        return (_blocks(copies, copies),)
    if topology == "ring":
        return tuple(dict.fromkeys(_neighbours(copies, first) for first in (0, 1)))
    if topology == "exponential":
        return _distances(copies, 1) or (_blocks(copies, 1),)
    inside, rounds = _blocks(copies, per_host), _distances(copies, per_host)
    if per_host == 1:
        return rounds or (inside,)
    return tuple(one for pair in rounds for one in (inside, pair)) or (inside,)


def _blocks(copies: int, size: int) -> Round:
    return tuple(
        tuple(range(first, min(first + size, copies)))
        for first in range(0, copies, size)
    )


def _neighbours(copies: int, first: int) -> Round:
    """Pairs of neighbours round the ring, from a first copy on."""
    order = [(first + index) % copies for index in range(copies)]
    pairs = (tuple(sorted(order[i : i + 2])) for i in range(0, copies, 2))
    return tuple(sorted(pairs))


def _distances(copies: int, size: int) -> tuple[Round, ...]:
    """Blocks that are joined with those at distances 1, 2, 4 and so on."""
    blocks, found = _blocks(copies, size), []
    for power in range(max(len(blocks) - 1, 0).bit_length()):
        joined = []
        for index, block in enumerate(blocks):
            other = index ^ 1 << power
            if other >= len(blocks):
                joined.append(block)
            elif index < other:
                joined.append(block + blocks[other])
        found.append(tuple(joined))
    return tuple(found)


def copies_per_host(hosts: Sequence[Hashable]) -> int:
    """Neighbouring copies that share a host, wherever one starts to count.

    It is the greatest common divisor of the lengths of runs of copies on one host.

    Args:
        hosts: Host of each copy, in order.
    """
    return gcd(*(len(list(run)) for _, run in groupby(hosts)))


def _partners(case: Case) -> str | None:
    value, copies = case.strategy.synchronisation, case.strategy.mesh.dp_replicate
    assert isinstance(value, Gossip)
    if value.topology == "ring" and copies % 2:
        return (
            f"synchronisation={value} with dp_replicate={copies}; pairs of neighbours "
            f"need an even number of copies, use dp_replicate={copies + 1} or "
            f"topology=complete"
        )
    if value.topology == "exponential" and copies & (copies - 1):
        power = 1 << copies.bit_length()
        return (
            f"synchronisation={value} with dp_replicate={copies}; pairs at distances "
            f"1, 2, 4 and so on need a power of two, use dp_replicate={power // 2} or "
            f"{power}, or topology=ring or complete"
        )
    return None


def _adam_commits(case: Case) -> str | None:
    value, name = case.strategy.synchronisation, case.strategy.optimizer.name
    assert isinstance(value, Gossip)
    if value.commit_every > 1 and name == "SGD":
        return (
            f"synchronisation={value} with optimizer {name}; commit_every is of Adam's "
            f"moments, use optimizer Adam or AdamW, or commit_every=1"
        )
    return None


METHODS = (
    Method(
        kind="gossip",
        slot="synchronisation",
        document=Gossip,
        words="copies average their weights with a few others in each step",
        inexact="each copy averages with some of the others alone",
        limits=(copies_apart, _partners, _adam_commits),
        feature=Feature(
            name="gossip",
            mesh={"dp_replicate": 2},
            fields={
                "synchronisation": Gossip(topology="complete"),
                "semantics": "approximate",
            },
            kind="synchronisation",
            # Gradients and losses are of a copy's own samples.
            tolerance=(5e-2, float("inf"), float("inf")),
        ),
        presets={
            "gossip-complete": Gossip(topology="complete"),
            "gossip-ring": Gossip(topology="ring"),
            "gossip-exp": Gossip(topology="exponential"),
            "gossip-aer": Gossip(topology="exponential_ring"),
            # Wang et al. 2025: four steps for images and translation.
            "accum-adam": Gossip(topology="exponential_ring", commit_every=4),
        },
        prices="planner.cost.replicas.gossip:GossipPricing",
        runs="executors.replicas.gossip:GossipReplicas",
        page="methods/gossip.md",
        test="tests/distributed/test_gossip.py",
        source="Wang et al. 2025, arXiv 2410.11998; Lian et al. 2017, 1705.09056",
    ),
)
