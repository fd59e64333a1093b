"""Time that a change of a job's devices costs, and the rate at which devices die."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError

__all__ = [
    "EXECUTOR_RESIZE",
    "Change",
    "FailureLaw",
    "FreeResize",
    "MeasuredOverheads",
    "ReshardCost",
    "ResizeCost",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class Change(NamedTuple):
    """Running jobs after a decision.

    Attributes:
        model: Names of their models. Shape [n].
        degree: Their devices. Shape [n].
        changed: Whether they are others than before the decision. Shape [n].
        decision: Number of the decision, from 0.
        capacity: Devices of the cluster that are alive.
    """

    model: tuple[str, ...]
    degree: Index
    changed: NDArray[np.bool_]
    decision: int
    capacity: int


class ResizeCost(Protocol):
    """Seconds during which a job makes no progress after a decision."""

    def stall_s(self, change: Change) -> Floats:
        """Seconds for each running job. Shape [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardCost:
    """A restart, and the bytes of the checkpoint over the links that carry them.

    Attributes:
        restart_s: Time from the end of the old processes to the first new step.
        checkpoint_bytes: Bytes of a model's checkpoint, by the model's name.
        default_bytes: Bytes of other models.
        bytes_per_s: Rate at which each device reads its part, for a cluster of GPUs
            that of its link to the storage.
        source: Where the figures are from.
    """

    restart_s: float = 30.0
    checkpoint_bytes: Mapping[str, float] = field(default_factory=dict)
    default_bytes: float = 4e9
    bytes_per_s: float = 2e9
    source: str = "assumptions: a restart, and a link of 16 Gb/s a device"

    def __post_init__(self) -> None:
        costs = (self.restart_s, self.default_bytes, *self.checkpoint_bytes.values())
        if not all(0.0 <= each < np.inf for each in costs) or not self.bytes_per_s > 0:
            raise StrategyError(
                f"restart_s={self.restart_s}, default_bytes={self.default_bytes}, "
                f"checkpoint_bytes={dict(self.checkpoint_bytes)}, "
                f"bytes_per_s={self.bytes_per_s}; give finite times and sizes of at "
                "least 0 and a positive rate"
            )

    def stall_s(self, change: Change) -> Floats:
        """Seconds for each running job that changed. Shape [n]."""
        size = np.array(
            [
                self.checkpoint_bytes.get(name, self.default_bytes)
                for name in change.model
            ]
        )
        stall = self.restart_s + size / (self.bytes_per_s * change.degree)
        return np.where(change.changed, stall, 0.0)


#: A resize of processes of one machine by our own executors. GPUs of a cluster read
#: over links of their own: give the rate of those.
EXECUTOR_RESIZE = ReshardCost(
    restart_s=52.8,
    default_bytes=1.5e9,
    bytes_per_s=8.07e7,
    source="benchmarks/elastic_resize.py, GPT-2 from 4 gloo processes to 2 and back, "
    "2 cores of an AMD EPYC that other work used as well, 2026-11-27",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOverheads:
    """Overheads that ElasticFlow's authors measured, and charge in their simulation.

    A job whose devices change stands still for ``base_s`` + ``group_s`` (log2 degree +
    1), in which it forms its process group; at every ``restart_every``-th decision such
    a job is started anew, too. Their simulation charges its schedulers differently
    (``unchanged``).

    Source: estimate_overhead of pkusys/ElasticFlow, commit 04a0109: 2 s, or 7 s from
    256 devices on; 2 s a doubling; 27 s, or 47 s from 256 devices on, at every 60th.

    Attributes:
        unchanged: Charge at every decision for a running job that keeps its devices:
            nothing, the base, or all.
    """

    unchanged: Literal["nothing", "base", "all"] = "base"
    base_s: tuple[float, float] = (2.0, 7.0)
    group_s: float = 2.0
    restart_s: tuple[float, float] = (27.0, 47.0)
    restart_every: int = 60

    def stall_s(self, change: Change) -> Floats:
        """Seconds for each running job. Shape [n]."""
        large = int(change.capacity >= 256)
        anew = self.group_s * (np.log2(np.maximum(change.degree, 1)) + 1.0)
        if change.decision > 0 and change.decision % self.restart_every == 0:
            anew = anew + self.restart_s[large]
        kept = {"nothing": 0.0, "base": self.base_s[large]}.get(
            self.unchanged, self.base_s[large] + anew
        )
        return np.where(change.changed, self.base_s[large] + anew, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeResize:
    """Changes that cost nothing."""

    def stall_s(self, change: Change) -> Floats:
        """Return 0 for each running job. Shape [n]."""
        return np.zeros(len(change.degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLaw:
    """Devices die one by one and come back; both times are exponential.

    Attributes:
        mean_s: Mean time until a device that works dies; infinity for never.
        repair_s: Mean time until it comes back.
        checkpoint_s: Running time between two checkpoints of a job. A job whose device
            dies goes on from the last.
    """

    mean_s: float = np.inf
    repair_s: float = 3600.0
    checkpoint_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("mean_s", "repair_s", "checkpoint_s"):
            if not getattr(self, name) > 0.0:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of failures; give a positive time"
                )
