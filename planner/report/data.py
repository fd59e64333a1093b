"""What a report shows, before it is drawn: the one source of HTML, figures and text.

Everything is in SI units; whoever draws decides how numbers are written. Sections that
cannot be made are None, and :attr:`ReportData.missing` says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.report.measured import Row
from planner.report.timeline import StageFacts, TimelineData
from planner.schema import Plan

__all__ = [
    "MEMORY_CATEGORIES",
    "BreakdownPart",
    "DeviceGrid",
    "GridDevice",
    "Header",
    "MeasuredData",
    "MemoryRow",
    "ParetoPoint",
    "ReportData",
    "RunnerUp",
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
class Header:
    """What was planned, in a few figures.

    Attributes:
        label: Of the strategy, ``pp4 dp_shard8 tp8 zero3 1F1B mb1x16``.
        paragraph: What was chosen and why, in sentences.
        facts: Names and texts of :func:`planner.schema.describe.facts`.
        fullest_share: Of its limit that the fullest device uses.
        not_runnable: Why Meshwright's executors cannot run it.
    """

    model: str
    cluster: str
    label: str
    paragraph: str
    facts: Mapping[str, str]
    parameters: int
    devices_used: int
    devices_there: int
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float | None
    model_flops_utilization: float | None
    peak_memory_bytes: float
    fullest_share: float
    fidelity: str
    assumptions: tuple[str, ...]
    not_runnable: tuple[str, ...]
    version: str


class GridDevice(NamedTuple):
    """One device: its rank (None if the plan leaves it out), place and coordinates."""

    device: int
    host: int
    rank: int | None
    coordinates: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrid:
    """Every device of the cluster, in the order of their ids.

    Attributes:
        degrees: Axis to degree, outermost first; ranks are row-major in them.
        ep: Devices that share experts, the innermost of dp_shard x cp.
        rank: Of each device; -1 for devices that are not used. Shape [devices].
        host: Of each device; host names are not known. Shape [devices].
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

    def devices(self) -> Iterator[GridDevice]:
        """One by one."""
        for device, (rank, host) in enumerate(
            zip(self.rank.tolist(), self.host.tolist(), strict=True)
        ):
            used = rank >= 0
            place = self.coordinates(rank) if used else {}
            yield GridDevice(device, host, rank if used else None, place)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of a rank along every axis."""
        place = {}
        for axis, degree in reversed(tuple(self.degrees.items())):
            rank, place[axis] = divmod(rank, degree)
        return {axis: place[axis] for axis in self.degrees}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Peak memory of each device of one pp rank.

    Attributes:
        devices: How many devices are alike.
        parts_bytes: By category, in the order of :data:`MEMORY_CATEGORIES`.
    """

    rank: int
    devices: int
    device_type: str
    parts_bytes: Mapping[str, float]
    limit_bytes: float

    @property
    def total_bytes(self) -> float:
        """Sum of all categories."""
        return sum(self.parts_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakdownPart:
    """A part of the step on its critical path.

    Attributes:
        part: Key in ``prediction.breakdown_s``.
        name: For people.
        share: Of the step, in [0, 1].
    """

    part: str
    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """Another strategy that was priced.

    Attributes:
        ratio: Its step time over the chosen one's.
        reason: Why it was not chosen.
    """

    label: str
    step_time_s: float
    peak_memory_bytes: float
    ratio: float
    reason: str


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
        step_times_s: Of every step, warm-up included.
        warm_up_steps: How many of them the median leaves out.
        environment: Where it ran.
        caveat: Why the run is not quite this plan's; empty if it is.
    """

    rows: tuple[Row, ...]
    step_times_s: tuple[float, ...]
    warm_up_steps: int
    environment: Mapping[str, str]
    caveat: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """All sections of the report of one plan.

    Attributes:
        plan: What is reported on.
        stages: In order of execution; without seconds if there is no timeline.
        timeline: None if it cannot be made.
        runners_up: Of the plan's own search, best first.
        pareto: The chosen one, runners-up, and what closed forms find if model and
            cluster can be read.
        measured: None without a measurement.
        missing: Name of a section (``timeline``, ``pareto``, ``measured``) to a
            sentence that says why it is not there, or not complete.
    """

    plan: Plan
    header: Header
    grid: DeviceGrid
    memory: tuple[MemoryRow, ...]
    stages: tuple[StageFacts, ...]
    timeline: TimelineData | None
    breakdown: tuple[BreakdownPart, ...]
    runners_up: tuple[RunnerUp, ...]
    pareto: tuple[ParetoPoint, ...]
    measured: MeasuredData | None
    missing: Mapping[str, str] = field(default_factory=dict)
