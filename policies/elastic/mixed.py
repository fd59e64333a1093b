"""Published schedulers of elastic jobs on several device types, in our words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import (
    LinearConstraint,
    milp,
)
from scipy.sparse import csr_array

from envs.elastic.session import Allocation, ElasticSession
from planner.search.quiet_stdout import quiet_stdout

__all__ = ["ArenaLike", "Assignment"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


class _Options:
    """Types and degrees that jobs can have, one row each.

    Attributes:
        job: Place of the job among those considered. Shape [options].
        kind: Device type. Shape [options].
        degree: Number of devices. Shape [options].
        rate: Iterations per second. Shape [options].
    """

    def __init__(self, session: ElasticSession, jobs: Index, elastic: bool) -> None:
        trace, capacity = session.config.trace, session.capacity
        rates = session.rates.max(axis=3)[trace.model[jobs]]
        able = (rates > 0.0) & (session.degrees <= capacity[:, None])
        if not elastic:
            # The degree that was asked for; the next that runs where it does not.
            place = np.searchsorted(session.degrees, trace.gpus[jobs])
            far = np.abs(np.arange(len(session.degrees)) - place[:, None])[:, None, :]
            far = np.where(able, far, len(session.degrees) + 1)
            able &= far == far.min(axis=2, keepdims=True)
        self.job, self.kind, at = np.nonzero(able)
        self.degree = session.degrees[at]
        self.rate = rates[self.job, self.kind, at]


class Assignment:
    """Assign types and degrees to jobs by an integer program, at every decision.

    It maximises the sum over jobs of their throughput over the least that they can
    have, weighted so that jobs that had little service come first; devices of each type
    are not exceeded, and a job has one type and degree. ``elastic`` jobs may have any
    degree, and their gain grows with the root of their throughput, so that more jobs
    run; a job that changes loses what a restart costs.

    Source: Narayanan et al. 2020 (Gavel) for jobs of fixed degree, Jayaram Subramanya
    et al. 2023 (Sia) for elastic ones, both here without their estimators.

    Args:
        elastic: Whether degrees are chosen, too.
        most: Most jobs in one program; the rest wait, the last submitted first.
        kept: Factor on the gain of a job that would change its devices.
    """

    def __init__(self, elastic: bool, most: int = 120, kept: float = 0.9) -> None:
        self._elastic = elastic
        self._most = most
        self._kept = kept

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        jobs = session.alive
        seen = jobs[: self._most]
        if not len(seen):
            return Allocation()
        options = _Options(session, seen, self._elastic)
        least = np.full(len(seen), np.inf)
        np.minimum.at(least, options.job, options.rate)
        gain = options.rate / least[options.job]
        if self._elastic:
            gain = np.sqrt(gain)
        same = (session.kind[seen[options.job]] == options.kind) & (
            session.degree[seen[options.job]] == options.degree
        )
        running = session.degree[seen[options.job]] > 0
        gain = np.where(running & ~same, self._kept * gain, gain)
        age_s = session.now_s - session.config.trace.submit_s[seen] + 1.0
        served = session.served_s[seen] / (age_s * session.config.trace.gpus[seen])
        gain *= (1.0 / (0.1 + served))[options.job]
        chosen = _solve(options, gain, len(seen), session.capacity)
        degree = np.zeros(len(jobs), dtype=np.int64)
        kind = np.zeros(len(jobs), dtype=np.int64)
        degree[options.job[chosen]] = options.degree[chosen]
        kind[options.job[chosen]] = options.kind[chosen]
        return Allocation(jobs=jobs, degree=degree, kind=kind)


def _solve(options: _Options, gain: Floats, jobs: int, capacity: Index) -> Index:
    """Return the options of greatest gain, one a job, within the capacity of types."""
    count = len(gain)
    column = np.arange(count)
    one = csr_array((np.ones(count), (options.job, column)), shape=(jobs, count))
    room = csr_array(
        (options.degree.astype(float), (options.kind, column)),
        shape=(len(capacity), count),
    )
    with quiet_stdout():
        found = milp(
            -gain,
            constraints=[
                LinearConstraint(one, ub=np.ones(jobs)),
                LinearConstraint(room, ub=capacity.astype(float)),
            ],
            integrality=np.ones(count),
            bounds=(0.0, 1.0),
            # A limit of time would make decisions depend on the machine.
            options={"mip_rel_gap": 0.01, "node_limit": 1000},
        )
    if found.x is None:
        return np.zeros(0, dtype=np.int64)
    return np.flatnonzero(found.x > 0.5)


class ArenaLike:
    """Give each job the type and degree with the best throughput, and share by halves.

    Jobs are taken by submission. Each gets, of the free devices, the type and degree of
    best throughput, at most twice the degree that its user asked for. If there are
    none, the running job whose throughput a step down in degree reduces least, in
    proportion, makes room, as long as that is less than the new job gains.

    Source: the rule of Arena (EuroSys 2026) as its artifact's description gives it:
    adaptive degrees and types by throughputs of the best parallel plan. Its own search
    of plans is not here; the table has what it found.
    """

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        jobs, trace = session.alive, session.config.trace
        rates = session.rates.max(axis=3)[trace.model[jobs]]
        degree, kind = session.degree[jobs].copy(), session.kind[jobs].copy()
        free = session.capacity - np.bincount(
            kind, degree, minlength=len(session.capacity)
        ).astype(np.int64)
        limit = 2 * trace.gpus[jobs]
        # A job that no degree up to the limit can run gets the least that can.
        able = rates.max(axis=1) > 0.0
        least = session.degrees[able.argmax(axis=1)]
        limit = np.maximum(limit, least)
        for at in np.flatnonzero(degree == 0).tolist():
            found = _best(session, rates[at], free, int(limit[at]))
            if found is None:
                self._make_room(session, rates, degree, kind, free, at)
                found = _best(session, rates[at], free, int(limit[at]))
            if found is not None:
                kind[at], degree[at] = found
                free[kind[at]] -= degree[at]
        return Allocation(jobs=jobs, degree=degree, kind=kind)

    def _make_room(
        self,
        session: ElasticSession,
        rates: Floats,
        degree: Index,
        kind: Index,
        free: Index,
        new: int,
    ) -> None:
        """Take one step of degree from the job that loses least by it, if any does."""
        places = np.searchsorted(session.degrees, degree)
        best, best_loss, best_step = -1, 1.0, 0
        for job in np.flatnonzero(degree > 0).tolist():
            now = rates[job, kind[job], places[job]]
            lower = np.flatnonzero(rates[job, kind[job], : places[job]] > 0.0)
            if not len(lower) or now <= 0.0:
                continue
            loss = 1.0 - rates[job, kind[job], lower[-1]] / now
            enough = free[kind[job]] + degree[job] - session.degrees[lower[-1]]
            runs = (rates[new, kind[job]] > 0.0) & (session.degrees <= enough)
            if runs.any() and loss < best_loss:
                best, best_loss, best_step = job, loss, int(lower[-1])
        if best >= 0:
            free[kind[best]] += degree[best] - session.degrees[best_step]
            degree[best] = session.degrees[best_step]


def _best(
    session: ElasticSession, rates: Floats, free: Index, limit: int
) -> tuple[int, int] | None:
    """Return the type and degree of best throughput among the free devices."""
    fits = (session.degrees <= np.minimum(free, limit)[:, None]) & (rates > 0.0)
    if not fits.any():
        return None
    kind, at = np.unravel_index(np.where(fits, rates, -1.0).argmax(), rates.shape)
    return int(kind), int(session.degrees[at])
