"""Jobs that held the devices which a blocked job of an elastic stream needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schema.elastic import ElasticRecord

__all__ = ["Holders", "find_holders", "least_time_s"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Share of a job's work that rounding may take.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Holders:
    """Jobs without whose devices a blocked job could have met its deadline.

    Attributes:
        job: The blocked job.
        by: The jobs, those that held more first. Without any one of them gone, the
            others' devices do not suffice. Empty if free devices had sufficed.
        enough: False if the devices of all jobs would not have sufficed.
    """

    job: int
    by: tuple[int, ...]
    enough: bool


def least_time_s(record: ElasticRecord) -> Floats:
    """Least time that each job takes on the cluster, alone. Shape [jobs]."""
    most = np.array([counts for _, counts in record.devices]).max(axis=0)
    fits = np.array(record.degrees)[None, :] <= most[:, None]
    best = np.array(
        [(np.array(model.rates) * fits).max(initial=0.0) for model in record.models]
    )
    jobs = record.jobs
    with np.errstate(divide="ignore"):
        found: Floats = np.array(jobs.iterations) / best[np.array(jobs.model, int)]
    return found


class _Room:
    """Free devices over time, and the pieces of each job."""

    def __init__(self, record: ElasticRecord) -> None:
        self.record, pieces = record, record.pieces
        self.job: Index = np.array(pieces.job, dtype=np.int64)
        self.kind: Index = np.array(pieces.kind, dtype=np.int64)
        self.degree: Index = np.array(pieces.degree, dtype=np.int64)
        starts, ends = np.array(pieces.start_s), np.array(pieces.end_s)
        changes = np.array([time for time, _ in record.devices])
        edges = (starts, ends, changes, record.jobs.submit_s, record.jobs.deadline_s)
        #: Times between which nothing changes. Shape [times].
        self.time_s: Floats = np.unique(np.concatenate(edges))
        self.first: Index = np.searchsorted(self.time_s, starts)
        self.last: Index = np.searchsorted(self.time_s, ends)
        alive = np.array([counts for _, counts in record.devices], dtype=np.int64)
        at = np.searchsorted(changes, self.time_s, side="right") - 1
        steps = np.zeros((len(self.time_s), alive.shape[1]), dtype=np.int64)
        np.add.at(steps, (self.first, self.kind), self.degree)
        np.add.at(steps, (self.last, self.kind), -self.degree)
        #: Shape [times, kinds].
        self.free: Index = alive[np.maximum(at, 0)] - np.cumsum(steps, axis=0)
        self.best = [_best_rates(record, at, alive) for at in range(len(record.models))]
        self.of_job = [
            np.flatnonzero(self.job == job) for job in range(len(record.jobs))
        ]
        self.promised = np.array([a == "promised" for a in record.jobs.answer], bool)

    def holders(self, job: int) -> Holders:
        """Return the jobs that held what a job needed between submission and deadline.

        Jobs with promises are taken first, and of these the ones with the most
        device-seconds, until the job fits; then those that are not needed are dropped.
        """
        jobs = self.record.jobs
        low = int(np.searchsorted(self.time_s, jobs.submit_s[job]))
        high = int(np.searchsorted(self.time_s, jobs.deadline_s[job]))
        span_s = np.diff(self.time_s[low : high + 1])
        base = self.free[low:high].copy()
        self._add(base, [job], low, high, 1)
        best = self.best[jobs.model[job]]
        needed = jobs.iterations[job] * (1.0 - _ROUNDING)

        def fits(free: Index) -> bool:
            held = np.clip(free, 0, best.shape[1] - 1)
            rate = best[np.arange(len(best))[None, :], held].max(axis=1)
            return bool((rate * span_s).sum() >= needed)

        if fits(base):
            return Holders(job=job, by=(), enough=True)
        order = self._by_device_seconds(job, low, high)
        few, many = 0, len(order)
        if not fits(self._with(base, order, low, high)):
            return Holders(job=job, by=(), enough=False)
        while many - few > 1:
            middle = (few + many) // 2
            if fits(self._with(base, order[:middle], low, high)):
                many = middle
            else:
                few = middle
        chosen = order[:many]
        free = self._with(base, chosen, low, high)
        for other in reversed(chosen):
            self._add(free, [other], low, high, -1)
            if fits(free):
                chosen = [one for one in chosen if one != other]
            else:
                self._add(free, [other], low, high, 1)
        return Holders(job=job, by=tuple(chosen), enough=True)

    def _by_device_seconds(self, job: int, low: int, high: int) -> list[int]:
        inside = (self.first < high) & (self.last > low) & (self.job != job)
        first, last = np.maximum(self.first, low), np.minimum(self.last, high)
        held_s = (self.time_s[last] - self.time_s[first]) * self.degree
        sums = np.bincount(
            self.job[inside], held_s[inside], minlength=len(self.promised)
        )
        there = np.flatnonzero(sums > 0.0)
        order = np.lexsort((there, -sums[there], ~self.promised[there]))
        found: list[int] = there[order].tolist()
        return found

    def _with(self, free: Index, jobs: list[int], low: int, high: int) -> Index:
        found = free.copy()
        self._add(found, jobs, low, high, 1)
        return found

    def _add(
        self, free: Index, jobs: list[int], low: int, high: int, sign: int
    ) -> None:
        """Add the devices of jobs to those that are free, or take them away."""
        for job in jobs:
            for piece in self.of_job[job].tolist():
                first = max(int(self.first[piece]) - low, 0)
                last = min(int(self.last[piece]), high) - low
                if first < last:
                    free[first:last, self.kind[piece]] += sign * self.degree[piece]


def _best_rates(record: ElasticRecord, model: int, alive: Index) -> Floats:
    """Best rate on at most so many devices. Shape [kinds, devices + 1]."""
    found = np.zeros((len(record.kinds), int(alive.max(initial=0)) + 1))
    for kind, row in enumerate(record.models[model].rates):
        for degree, rate in zip(record.degrees, row, strict=True):
            if degree < found.shape[1]:
                found[kind, degree] = max(found[kind, degree], rate)
    best: Floats = np.maximum.accumulate(found, axis=1)
    return best


def find_holders(record: ElasticRecord, jobs: list[int]) -> tuple[Holders, ...]:
    """Return for blocked jobs whose devices they would have needed.

    A job could have met its deadline if, on the devices that were free and those of the
    holders, it had done its iterations between submission and deadline, at each time
    on the number and type on which it is fastest, and without the cost of resizes.

    Args:
        record: The record.
        jobs: Indices of the blocked jobs.
    """
    room = _Room(record)
    return tuple(room.holders(job) for job in jobs)
