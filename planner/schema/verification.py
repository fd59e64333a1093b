"""Findings of a dry run of a plan, to be laid beside its prediction."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.base import Document
from planner.schema.measurement import Mean, Share
from planner.schema.plan import Plan

__all__ = [
    "NEGLIGIBLE_BYTES",
    "Deviation",
    "GroupTraffic",
    "RankVerification",
    "Verification",
    "VerifiedPhase",
]

Count = Annotated[int, Field(ge=0)]

#: Kinds of collective that a prediction counts under another name, or not at all:
#: what is received was sent by a neighbour.
_UNPREDICTED = frozenset({"recv"})

#: Bytes below which a difference between predicted and found is none.
NEGLIGIBLE_BYTES = 65_536

_BALANCED = "balanced routing: every expert is sent equally many tokens"


class GroupTraffic(Document):
    """Calls of one kind of collective in one step of one rank.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
            ``send``, ``recv`` …
        group_size: Ranks that take part.
        count: Number of calls.
        bytes: Sum of their payloads, each counted at its larger side.
    """

    kind: str
    group_size: Annotated[int, Field(ge=1)]
    count: Mean
    bytes: Mean


class VerifiedPhase(Document):
    """Steps of one kind, of which one was run dry.

    Attributes:
        name: ``plain`` or ``exchange`` of copies that exchange every few steps.
        share: Share of all steps.
        memory_bytes: Tensor bytes at the peak, by category.
        collectives: Of such a step.
    """

    name: str
    share: Share
    memory_bytes: dict[str, Count]
    collectives: tuple[GroupTraffic, ...]


class RankVerification(Document):
    """One rank's step.

    Attributes:
        pp_rank: Its coordinate along pp.
        memory_bytes: Tensor bytes at the peak, by category: parameters, gradients,
            optimizer, activations, buffers; the highest peak of all phases.
        collectives: Of one step; of a mean step where there are several phases.
        phases: Kinds of step, if there are several, each run once.
        flops: Of this rank's matrix products, convolutions and attention.
        microbatches: In the step.
        microbatches_run: Number of them that were run; the others did the same, seen
            in two that were, and were counted.
        failure: Error and module at which the step would fail; None if it would not.
    """

    rank: Count
    pp_rank: Count
    memory_bytes: dict[str, Count] = Field(default_factory=dict)
    collectives: tuple[GroupTraffic, ...] = ()
    phases: tuple[VerifiedPhase, ...] = ()
    flops: Count = 0
    microbatches: Count = 0
    microbatches_run: Count = 0
    failure: str | None = None

    @property
    def peak_bytes(self) -> int:
        """Most tensor bytes alive at once."""
        return sum(self.memory_bytes.values())

    def bytes_of(self, kind: str) -> float:
        """Payload of one kind of collective over groups of all sizes."""
        return sum(entry.bytes for entry in self.collectives if entry.kind == kind)


class Deviation(Document):
    """One predicted quantity beside what the dry run found.

    Attributes:
        name: ``peak memory, pp rank 0``, ``all_reduce, busiest rank``.
        predicted: By the plan, in bytes.
        found: In bytes.
    """

    name: str
    predicted: Annotated[float, Field(ge=0)]
    found: Annotated[float, Field(ge=0)]

    @property
    def ratio(self) -> float | None:
        """Predicted over found; None where nothing was found."""
        return self.predicted / self.found if self.found else None

    @property
    def negligible(self) -> bool:
        """True if neither side reaches :data:`NEGLIGIBLE_BYTES`."""
        return max(self.predicted, self.found) < NEGLIGIBLE_BYTES

    def beyond(self, share: float) -> bool:
        """True if the prediction is off by more than a share of what was found.

        A difference below :data:`NEGLIGIBLE_BYTES` is none: a step sums up its loss,
        and tells other ranks how many tokens come.
        """
        off = abs(self.predicted - self.found)
        return off >= NEGLIGIBLE_BYTES and off > share * self.found


class Verification(Document):
    """A dry run of some ranks of a plan.

    Attributes:
        plan_label: Of the strategy, ``pp2 dp_shard2 zero3 1F1B mb1x4``.
        world_size: Ranks of the plan.
        ranks: Ranks that were run.
        deviations: Predicted quantities beside those found.
        assumptions: Conditions taken for granted, because they depend on values.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "verification"

    schema_version: Literal[1] = 1
    plan_label: str
    world_size: Annotated[int, Field(ge=1)]
    ranks: Annotated[tuple[RankVerification, ...], Field(min_length=1)]
    deviations: tuple[Deviation, ...]
    assumptions: tuple[str, ...] = ()

    @classmethod
    def of(cls, plan: Plan, ranks: tuple[RankVerification, ...]) -> Verification:
        """Lay what was found beside the plan's prediction.

        Peaks are compared for each pp rank. Bytes of a kind of collective are
        compared for the busiest of the ranks that were run, as the prediction is of
        the busiest of all; only where the first, middle and last stage were run.
        """
        done = tuple(rank for rank in ranks if rank.failure is None)
        return cls(
            plan_label=plan.strategy.label(),
            world_size=plan.strategy.mesh.num_devices,
            ranks=ranks,
            deviations=(*_memory(plan, done), *_collectives(plan, done)),
            assumptions=(_BALANCED,) if plan.strategy.mesh.ep > 1 else (),
        )


def _memory(plan: Plan, ranks: tuple[RankVerification, ...]) -> list[Deviation]:
    predicted = {entry.rank: entry for entry in plan.prediction.memory}
    found: dict[int, int] = {}
    for rank in ranks:
        found[rank.pp_rank] = max(rank.peak_bytes, found.get(rank.pp_rank, 0))
    return [
        Deviation(
            name=f"peak memory, pp rank {index}",
            # What the context and the allocator take holds no tensors.
            predicted=predicted[index].total_bytes - predicted[index].reserve_bytes,
            found=peak,
        )
        for index, peak in sorted(found.items())
    ]


def _collectives(plan: Plan, ranks: tuple[RankVerification, ...]) -> list[Deviation]:
    last = plan.strategy.mesh.pp - 1
    if not {0, (last + 1) // 2, last} <= {rank.pp_rank for rank in ranks}:
        return []
    predicted = plan.prediction.collective_bytes
    kinds = {entry.kind for rank in ranks for entry in rank.collectives}
    return [
        Deviation(
            name=f"{kind.replace('_', '-')}, busiest rank",
            predicted=predicted.get(kind, 0.0),
            found=max(rank.bytes_of(kind) for rank in ranks),
        )
        for kind in sorted((kinds | set(predicted)) - _UNPREDICTED)
    ]
