"""A record of a job stream as arrays: its sums, and what changes with time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.schema.stream import OUTCOMES, Outcome, StreamRecord

__all__ = [
    "Blocking",
    "Steps",
    "StreamData",
    "Windows",
    "blocking",
    "devices_in_use",
    "stream_sums",
    "windows",
]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

#: Points of a line that a page keeps.
_MOST_POINTS = 1200
#: Windows of a stream, and jobs that one should have.
_MOST_WINDOWS, _FEWEST_JOBS = 40, 12


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamData:
    """One record. n jobs; times that are not there are NaN.

    Attributes:
        record: The record itself.
        name: Name of its policy.
    """

    record: StreamRecord
    name: str

    def __len__(self) -> int:
        return len(self.record.jobs)

    @cached_property
    def arrival_s(self) -> Array:
        """Shape [n]."""
        return np.array(self.record.jobs.arrival_s, dtype=np.float64)

    @cached_property
    def decided_s(self) -> Array:
        """Shape [n]."""
        return np.array(self.record.jobs.decided_s, dtype=np.float64)

    @cached_property
    def start_s(self) -> Array:
        """Shape [n]."""
        return np.array(self.record.jobs.start_s, dtype=np.float64)

    @cached_property
    def end_s(self) -> Array:
        """Shape [n]."""
        return np.array(self.record.jobs.end_s, dtype=np.float64)

    @cached_property
    def model(self) -> Index:
        """Index of each job's model. Shape [n]."""
        return np.array(self.record.jobs.model, dtype=np.int64)

    @cached_property
    def outcome(self) -> Index:
        """Number of each outcome in OUTCOMES. Shape [n]."""
        numbers = {name: number for number, name in enumerate(OUTCOMES)}
        return np.array([numbers[o] for o in self.record.jobs.outcome], dtype=np.int64)

    @cached_property
    def ran(self) -> Flags:
        """True for jobs that started. Shape [n]."""
        return ~np.isnan(self.start_s)

    @cached_property
    def ended(self) -> Flags:
        """True for jobs that ran to their end. Shape [n]."""
        return ~np.isnan(self.end_s)

    @cached_property
    def until_s(self) -> Array:
        """When devices were given back, at the horizon at the latest. Shape [n]."""
        horizon = self.record.horizon_s
        return np.where(self.ended, np.minimum(self.end_s, horizon), horizon)

    @cached_property
    def blocked(self) -> Flags:
        """True for jobs that count as blocked. Shape [n]."""
        numbers = [OUTCOMES.index(outcome) for outcome in self.record.blocked]
        return np.isin(self.outcome, numbers)

    @cached_property
    def work_s(self) -> Array:
        """Work of each job, in seconds of one reference device. Shape [n]."""
        each = np.array([model.sequential_s for model in self.record.models])
        size = np.array(self.record.jobs.size, dtype=np.float64)
        work_s: Array = size * each[self.model]
        return work_s

    @cached_property
    def due_s(self) -> Array:
        """When each must have ended. Shape [n]."""
        beta = np.array(self.record.jobs.beta, dtype=np.float64)
        due_s: Array = self.arrival_s + beta * self.work_s
        return due_s

    @cached_property
    def held(self) -> Index:
        """Devices that each job held, 0 for none. Shape [n]."""
        sizes = [
            sum(last - first + 1 for first, last in runs)
            for runs in self.record.device_sets
        ]
        # The last entry is that of index -1.
        return np.array([*sizes, 0], dtype=np.int64)[
            np.array(self.record.jobs.devices, dtype=np.int64)
        ]

    @cached_property
    def host_size(self) -> Index:
        """Devices of each host. Shape [hosts]."""
        sizes = [size for many, size in self.record.cluster.hosts for _ in range(many)]
        return np.array(sizes, dtype=np.int64)

    @cached_property
    def host_of_device(self) -> Index:
        """Shape [devices]."""
        return np.repeat(np.arange(len(self.host_size)), self.host_size)

    @cached_property
    def usable(self) -> Index:
        """Devices of each host that jobs may have. Shape [hosts]."""
        free = np.ones(self.record.cluster.num_devices, dtype=np.int64)
        for first, last in self.record.cluster.occupied:
            free[first : last + 1] = 0
        return np.bincount(self.host_of_device, free, len(self.host_size)).astype(
            np.int64
        )

    def count(self, outcome: Outcome) -> int:
        """Jobs of an outcome."""
        return int((self.outcome == OUTCOMES.index(outcome)).sum())

    @property
    def num_blocked(self) -> int:
        """Jobs that count as blocked."""
        return int(self.blocked.sum())

    @property
    def blocking_rate(self) -> float:
        """Blocked over arrived; 0 where nothing arrived."""
        return self.num_blocked / len(self) if len(self) else 0.0


def stream_sums(data: StreamData) -> dict[str, float]:
    """Sum up a record under the names of the world's own summary.

    Means are over jobs that ran to their end, NaN if there are none; ``utilisation``
    and ``fragmentation`` are shares as
    :class:`envs.stream.state.StreamSummary` has them.

    Args:
        data: One record.
    """
    record, ended = data.record, data.ended
    plans = np.array([[plan.degree, plan.alone_s] for plan in record.plans] or [[0, 0]])
    of_plan = plans[np.array(record.jobs.plan, dtype=np.int64)]
    jct_s = data.end_s - data.arrival_s
    alone_s = of_plan[:, 1] * np.array(record.jobs.size)
    done = np.array(record.jobs.done, dtype=np.float64)
    held_s, free_s, broken_s = _device_seconds(data)

    def mean(values: Array) -> float:
        return float(values[ended].mean()) if ended.any() else float("nan")

    found: dict[str, float] = {name: data.count(name) for name in OUTCOMES}
    found |= {
        "arrived": len(data),
        "blocked": data.num_blocked,
        "blocking_rate": data.blocking_rate,
        "slowed": int((ended & (data.outcome == OUTCOMES.index("late"))).sum()),
        "mean_jct_s": mean(jct_s),
        "mean_speedup": mean(data.work_s / np.where(ended, jct_s, 1.0)),
        "mean_wait_s": mean(data.start_s - data.arrival_s),
        "mean_degree": mean(of_plan[:, 0]),
        "mean_workers": mean(data.held.astype(np.float64)),
        "mean_slowdown": mean(
            (data.end_s - data.start_s) / np.where(ended, alone_s, 1.0)
        ),
        "throughput": float((data.work_s * done).sum() / record.horizon_s),
        "utilisation": held_s / (record.horizon_s * record.cluster.num_usable),
        "fragmentation": broken_s / free_s if free_s else 0.0,
    }
    demands = [model.demand_bytes for model in record.models]
    if None not in demands:
        size = np.array(record.jobs.size)
        demand = np.array(demands, dtype=np.float64)[data.model] * size
        found["throughput_bytes_per_s"] = float((demand * done).sum()) / (
            record.horizon_s
        )
    return found


def _device_seconds(data: StreamData) -> tuple[float, float, float]:
    """Device-seconds held, free, and free in hosts that are partly held."""
    horizon_s = data.record.horizon_s
    job, host, many = _shares(data)
    time = np.concatenate([data.start_s[job], data.until_s[job]])
    change = np.concatenate([many, -many])
    both = np.concatenate([host, host])
    held_s = float((many * (data.until_s[job] - data.start_s[job])).sum())
    free_s = broken_s = 0.0
    for number, size in enumerate(data.usable.tolist()):
        here = both == number
        order = np.argsort(time[here], kind="stable")
        edges = np.concatenate([[0.0], time[here][order], [horizon_s]])
        free = size - np.concatenate([[0], np.cumsum(change[here][order])])
        spans = np.diff(edges) * free
        free_s += float(spans.sum())
        broken_s += float(spans[free < size].sum())
    return held_s, free_s, broken_s


def _shares(data: StreamData) -> tuple[Index, Index, Index]:
    """Job, host and number of devices, of each job on each of its hosts."""
    of_set: list[tuple[Index, Index]] = []
    for runs in data.record.device_sets:
        devices = np.concatenate([np.arange(a, b + 1) for a, b in runs])
        of_set.append(np.unique(data.host_of_device[devices], return_counts=True))
    jobs = np.flatnonzero(data.ran)
    sets = np.array(data.record.jobs.devices, dtype=np.int64)[jobs].tolist()
    if not sets:
        none = np.zeros(0, dtype=np.int64)
        return none, none, none
    job = np.repeat(jobs, [len(of_set[number][0]) for number in sets])
    host = np.concatenate([of_set[number][0] for number in sets])
    many = np.concatenate([of_set[number][1] for number in sets])
    return job, host, many.astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocking:
    """Blocked over arrived so far.

    Attributes:
        time_s: Times of arrivals. Shape [p].
        rate: Up to each, it included. Shape [p].
    """

    time_s: Array
    rate: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """Jobs by the window in which they arrived. w windows of equal length.

    Attributes:
        length_s: Length of a window.
        arrived: Shape [w].
        causes: Outcomes that count as blocked.
        blocked: Blocked jobs of each cause and window. Shape [causes, w].
    """

    length_s: float
    arrived: Index
    causes: tuple[Outcome, ...]
    blocked: Index


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """A number that changes at times and stays in between.

    Attributes:
        time_s: Times of changes, from 0 on. Shape [p].
        value: From each on. Shape [p].
        mean: Over the whole time, of all changes, also those left out.
    """

    time_s: Array
    value: Array
    mean: float


def blocking(data: StreamData, most: int = _MOST_POINTS) -> Blocking:
    """Rate after each arrival; of many arrivals evenly chosen ones, the last included.

    Args:
        data: One record.
        most: Points.
    """
    rate = np.cumsum(data.blocked) / np.arange(1, len(data) + 1)
    kept = np.unique(np.linspace(0, len(data) - 1, min(most, len(data))).astype(int))
    return Blocking(time_s=data.arrival_s[kept], rate=rate[kept])


def windows(data: StreamData) -> Windows:
    """Count jobs by window of time: at most 40 windows, a dozen jobs in each.

    Args:
        data: One record.
    """
    count = int(np.clip(len(data) // _FEWEST_JOBS, 1, _MOST_WINDOWS))
    length_s = data.record.horizon_s / count
    window = np.minimum((data.arrival_s / length_s).astype(np.int64), count - 1)
    causes = tuple(dict.fromkeys(data.record.blocked))
    blocked = [
        np.bincount(window[data.outcome == OUTCOMES.index(cause)], minlength=count)
        for cause in causes
    ]
    return Windows(
        length_s=length_s,
        arrived=np.bincount(window, minlength=count).astype(np.int64),
        causes=causes,
        blocked=np.array(blocked, dtype=np.int64).reshape(len(causes), count),
    )


def devices_in_use(data: StreamData, most: int = _MOST_POINTS) -> Steps:
    """Devices held from each start or end on.

    Where there are more changes than points, a point is the mean up to the next one.

    Args:
        data: One record.
        most: Points.
    """
    horizon_s, held = data.record.horizon_s, data.held[data.ran]
    time = np.concatenate([[0.0], data.start_s[data.ran], data.until_s[data.ran]])
    change = np.concatenate([[0], held, -held])
    order = np.argsort(time, kind="stable")
    time, value = time[order], np.cumsum(change[order])
    # Of changes at one time the last tells.
    last = np.flatnonzero(np.diff(time, append=np.inf) > 0)
    time, value = time[last], value[last].astype(np.float64)
    spans = np.diff(np.append(time, horizon_s))
    mean = float((value * spans).sum() / horizon_s)
    if len(time) <= most:
        return Steps(time_s=time, value=value, mean=mean)
    edges = np.linspace(0.0, horizon_s, most + 1)
    area = np.concatenate([[0.0], np.cumsum(value * spans)])
    whole = np.interp(edges, np.append(time, horizon_s), area)
    return Steps(time_s=edges[:-1], value=np.diff(whole) / np.diff(edges), mean=mean)
