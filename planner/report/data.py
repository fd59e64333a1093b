"""Contents of a report, before it is drawn: the one source of HTML, figures and text.

Everything is in SI units; whoever draws decides how numbers are written. Sections that
cannot be made are None, and :attr:`ReportData.missing` says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.report.measured import Row
from planner.report.timeline import StageFacts, TimelineData
from planner.schema import Plan, StageMemory
from planner.schema.describe import PART_NAMES

__all__ = [
    "MEMORY_CATEGORIES",
    "BreakdownPart",
    "DeviceGrid",
    "MeasuredData",
    "ParetoPoint",
    "ReportData",
    "filled_share",
    "memory_parts",
]

#: Parts of a device's memory, as fields of StageMemory without ``_bytes``.
MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "buffers",
    "reserve",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrid:
    """Every device of the cluster, in the order of their ids.

    Attributes:
        degrees: Axis to degree, outermost first; ranks are row-major in them.
        ep: Devices that share experts, the innermost of dp_shard x cp x tp.
        rank: Rank of each device; -1 for unused devices. Shape [devices].
        host: Number of each device's host. Shape [devices].
        device_type: Name of each device's type, as index into ``device_types``; -1
            where it is not known, on unused devices of a cluster that could not be
            read. Shape [devices].
    """

    degrees: Mapping[str, int]
    ep: int
    rank: NDArray[np.int64]
    host: NDArray[np.int64]
    device_type: NDArray[np.int64]
    device_types: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownPart:
    """A part of the step on its critical path.

    Attributes:
        part: Key in ``prediction.breakdown_s``.
        name: For people.
        share: Share of the step, in [0, 1].
    """

    part: str
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A strategy in the plane of step time and memory.

    Attributes:
        devices: It uses.
        origin: ``chosen``, ``runner-up``, or ``closed form`` for the ones that the
            report itself priced, cut evenly.
        on_front: No other point is at once as fast, as small and on as few devices.
    """

    label: str
    step_time_s: float
    peak_memory_bytes: float
    devices: int
    origin: Literal["chosen", "runner-up", "closed form"]
    on_front: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredData:
    """A run laid beside the prediction.

    Attributes:
        rows: Step time, peak memory, payload of collectives.
        step_times_s: Time of every step, warm-up included.
        warm_up_steps: Number of first steps that the median leaves out.
        environment: Where it ran.
        caveat: Why the run is not quite this plan's; empty if it is.
    """

    rows: tuple[Row, ...]
    step_times_s: tuple[float, ...]
    warm_up_steps: int
    environment: Mapping[str, str]
    caveat: str = ""


def memory_parts(entry: StageMemory) -> dict[str, float]:
    """Bytes by category, in the order of :data:`MEMORY_CATEGORIES`."""
    return {part: getattr(entry, f"{part}_bytes") for part in MEMORY_CATEGORIES}


def filled_share(entry: StageMemory) -> float:
    """Share of its limit that a device's peak memory fills."""
    return entry.total_bytes / entry.limit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All sections of the report of one plan.

    Attributes:
        plan: The plan of the report.
        grid: Every device of the cluster.
        stages: In order of execution; without seconds if there is no timeline.
        timeline: None if it cannot be made.
        pareto: The chosen one, runners-up, and what closed forms find if model and
            cluster can be read.
        measured: None without a measurement.
        missing: Name of a section (``timeline``, ``pareto``, ``measured``) to a
            sentence that says why it is not there, or not complete.
    """

    plan: Plan
    grid: DeviceGrid
    stages: tuple[StageFacts, ...]
    timeline: TimelineData | None
    pareto: tuple[ParetoPoint, ...]
    measured: MeasuredData | None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Peak memory of each device of a pp rank, an entry a pp rank."""
        return self.plan.prediction.memory

    @property
    def devices_alike(self) -> int:
        """Devices of one pp rank."""
        return self.plan.strategy.mesh.stride("pp")

    @property
    def breakdown(self) -> tuple[BreakdownPart, ...]:
        """Parts of the step on its critical path, largest first."""
        total = self.plan.prediction.step_time_s or 1.0
        spent = self.plan.prediction.breakdown_s.items()
        return tuple(
            BreakdownPart(
                part=part,
                name=PART_NAMES.get(part, part),
                seconds=seconds,
                share=seconds / total,
            )
            for part, seconds in sorted(spent, key=lambda item: -item[1])
            if seconds > 0
        )
