"""Measurements of a run of a plan, to be laid beside its prediction."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.base import AnyFloat, Document

__all__ = ["Measurement", "Traffic"]

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Traffic(Document):
    """Calls of one kind of collective in one step of one rank.

    Attributes:
        count: How many.
        bytes: Sum of their payloads, each counted at its larger side: what an
            all-gather returns, what a reduce-scatter or an all-reduce is given.
    """

    count: Count
    bytes: Count


class Measurement(Document):
    """A measured run.

    Attributes:
        plan_label: Of the strategy, ``pp2 dp_shard2 zero3 1F1B mb1x4``.
        step_times_s: Wall-clock time of every step on rank 0, warm-up included.
        warm_up_steps: How many first steps the median leaves out.
        median_step_time_s: Of the others.
        peak_memory_bytes: Most tensor bytes alive at once in a step, by rank.
        collectives: By rank: kind (``all_reduce``, ``all_gather``,
            ``reduce_scatter``, ``send`` …) to what one step sends.
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
