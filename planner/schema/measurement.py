"""Measurements of a run of a plan, to be laid beside its prediction."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from planner.schema.base import AnyFloat, Document

__all__ = [
    "Mean",
    "MeasuredPhase",
    "Measurement",
    "Share",
    "Traffic",
    "mean_traffic",
]

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
#: A count, or the mean of counts of unlike steps.
Mean = Count | Annotated[float, Field(ge=0)]
#: Share of all steps.
Share = Annotated[float, Field(gt=0, le=1)]


Key = TypeVar("Key", bound=Hashable)


class Traffic(Document):
    """Calls of one kind of collective in one step of one rank.

    Attributes:
        count: Number of calls.
        bytes: Sum of their payloads, each counted at its larger side: what an
            all-gather returns, what a reduce-scatter or an all-reduce is given.
    """

    count: Mean
    bytes: Mean


def mean_traffic(
    phases: Iterable[tuple[float, Mapping[Key, Traffic]]],
) -> dict[Key, Traffic]:
    """Traffic of a mean step.

    Args:
        phases: For each kind of step its share of all steps, and its traffic by key.
    """
    listed = [(share, traffic) for share, traffic in phases]
    if len(listed) == 1:
        return dict(listed[0][1])
    found: dict[Key, Traffic] = {}
    for share, traffic in listed:
        for key, entry in traffic.items():
            before = found.get(key, Traffic(count=0, bytes=0))
            found[key] = Traffic(
                count=before.count + share * entry.count,
                bytes=before.bytes + share * entry.bytes,
            )
    return found


class MeasuredPhase(Document):
    """Steps of one kind, of which one was counted.

    Attributes:
        name: ``plain`` or ``exchange`` of copies that exchange every few steps.
        share: Share of all steps.
        peak_memory_bytes: Most tensor bytes alive at once in such a step, by rank.
        collectives: By rank: kind to what such a step sends.
    """

    name: str
    share: Share
    peak_memory_bytes: tuple[Count, ...]
    collectives: tuple[dict[str, Traffic], ...]


class Measurement(Document):
    """A measured run.

    Attributes:
        plan_label: Of the strategy, ``pp2 dp_shard2 zero3 1F1B mb1x4``.
        step_times_s: Wall-clock time of every step on rank 0, warm-up included.
        warm_up_steps: Number of first steps that the median leaves out.
        median_step_time_s: Median of the others; where there are several phases, the
            mean by share of each phase's.
        peak_memory_bytes: Most tensor bytes alive at once in a step, by rank.
        collectives: By rank: kind (``all_reduce``, ``all_gather``,
            ``reduce_scatter``, ``send`` …) to what one step sends, a mean step where
            there are several phases.
        phases: Kinds of step, if there are several, each counted in one step.
        losses: Mean loss of each step; NaN or infinite where training diverged.
        environment: Where: backend, device, host, versions.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "measurement"

    schema_version: Literal[1] = 1
    plan_label: str
    model_name: str
    model_fingerprint: str
    step_times_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    warm_up_steps: Count
    median_step_time_s: Seconds
    peak_memory_bytes: tuple[Count, ...]
    collectives: tuple[dict[str, Traffic], ...]
    phases: tuple[MeasuredPhase, ...] = ()
    losses: tuple[AnyFloat, ...]
    environment: dict[str, str] = Field(default_factory=dict)

    def total_traffic(self) -> dict[str, Traffic]:
        """Traffic of all ranks together, by kind."""
        totals: dict[str, Traffic] = {}
        for rank in self.collectives:
            for kind, traffic in rank.items():
                before = totals.get(kind, Traffic(count=0, bytes=0))
                totals[kind] = Traffic(
                    count=before.count + traffic.count,
                    bytes=before.bytes + traffic.bytes,
                )
        return totals
