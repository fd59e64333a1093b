"""Published schedulers of elastic jobs on one device type, in our words."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.elastic.session import Allocation, ElasticSession, Fate
from planner.errors import StrategyError
from policies.elastic.expansion import expand_shares
from policies.elastic.profile import Profile
from policies.elastic.reservations import (
    BREAKPOINTS,
    Jobs,
    Plans,
    earliest_deadline_plans,
    minimum_shares,
    taken_in_turn,
)

__all__ = [
    "EarliestDeadline",
    "ElasticFlow",
    "Gandiva",
    "Levels",
    "Tiresias",
    "one_kind",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


def one_kind(session: ElasticSession, name: str) -> int:
    """Return the capacity of a cluster of one type.

    Raises:
        StrategyError: If there are several.
    """
    if len(session.capacity) > 1:
        raise StrategyError(
            f"{name} on {len(session.capacity)} device types; it knows one, use a "
            "scheduler for mixed types, or throughputs of one type"
        )
    return int(session.capacity[0])


class Levels:
    """Degrees that each model can use, of one device type."""

    def __init__(
        self, session: ElasticSession, capacity: int, peak: bool, kind: int = 0
    ) -> None:
        rates = session.rates[:, kind, :, 0]
        able = (rates > 0.0) & (session.degrees <= capacity)
        # A batch is not divided below one sample a device.
        batch = np.array([key.batch for key in session.config.source.models])
        able &= session.degrees <= batch[:, None]
        top = len(session.degrees) - np.argmax(able[:, ::-1], axis=1)
        if peak:
            top = np.where(able, rates, -1.0).argmax(axis=1) + 1
        self.rates = np.ascontiguousarray(rates)
        self.top: Index = np.where(able.any(axis=1), top, 0)


class EarliestDeadline:
    """Give jobs all devices they can use, the earliest deadline first.

    Source: EDF as in Gu et al. 2023, section 6.1.

    Args:
        admit: Whether to promise a job its deadline, if all promises can then be kept,
            and to turn it away otherwise.
    """

    def __init__(self, admit: bool = False) -> None:
        self._admit = admit
        self._levels: Levels | None = None

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        capacity = one_kind(session, "EDF")
        if self._levels is None:
            self._levels = Levels(session, capacity, peak=False)
        new = session.new if self._admit else session.alive[:0]
        old = np.setdiff1d(session.alive, new, assume_unique=True)
        given = self._plan(session, old, capacity)[0]
        taken, declined = [], []
        for job in new.tolist():
            trial = np.append(old, job)
            trial_given, trial_met = self._plan(session, trial, capacity)
            if trial_met:
                old, given = trial, trial_given
                taken.append(job)
            else:
                declined.append(job)
        return Allocation(
            jobs=old,
            degree=given,
            promised=np.array(taken, dtype=np.int64),
            declined=np.array(declined, dtype=np.int64),
        )

    def _plan(
        self, session: ElasticSession, jobs: Index, capacity: int
    ) -> tuple[Index, bool]:
        """Plan jobs; return their devices now, and whether all end in time."""
        assert self._levels is not None
        trace = session.config.trace
        due = trace.deadline_s[jobs]
        order = np.argsort(due, kind="stable")
        model = trace.model[jobs[order]]
        size = 2 * len(jobs) + 8
        given = np.zeros(len(jobs), dtype=np.int64)
        met = earliest_deadline_plans(
            session.now_s,
            capacity,
            session.config.slot_s,
            session.left[jobs[order]],
            due[order],
            session.degrees,
            self._levels.rates[model],
            self._levels.top[model],
            given,
            np.zeros(size),
            np.zeros(size, dtype=np.int64),
        )
        back = np.empty_like(given)
        back[order] = given
        return back, bool(met)


class ElasticFlow:
    """Promise what minimum satisfactory shares allow; expand by diminishing returns.

    Each job, the earliest deadline first, reserves the smallest share of devices with
    which it meets its deadline. A new job is promised its deadline if all jobs then
    meet theirs. Devices that are free now go to the job whose planned device-seconds
    grow least for each further device.

    Source: Gu et al. 2023 (ElasticFlow), algorithms 1 and 2.

    Args:
        greedy: ``"most"`` expands the job whose device-seconds grow most first, as the
            published code does.
        together: Whether jobs that come in one slot are all promised, or all turned
            away, as the published code does; else one after the other.
    """

    def __init__(
        self, greedy: Literal["least", "most"] = "least", together: bool = False
    ) -> None:
        self._sign = 1.0 if greedy == "least" else -1.0
        self._together = together
        self._levels: Levels | None = None

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        capacity = one_kind(session, "ElasticFlow")
        if self._levels is None:
            self._levels = Levels(session, capacity, peak=True)
        new = session.new
        jobs = np.setdiff1d(session.alive, new, assume_unique=True)
        taken, declined = new[:0], new[:0]
        if len(new):
            trial = _Reservations(session, np.append(jobs, new), capacity, self._levels)
            if trial.met:
                taken = new
            elif len(new) == 1 or self._together:
                declined = new
            else:
                taken, declined = self._one_by_one(session, jobs, new, capacity)
        jobs = np.append(jobs, taken)
        plans = _Reservations(session, jobs, capacity, self._levels)
        return plans.expanded(taken, declined, self._sign)

    def _one_by_one(
        self, session: ElasticSession, jobs: Index, new: Index, capacity: int
    ) -> tuple[Index, Index]:
        assert self._levels is not None
        every, needs = _by_deadline(session, np.append(jobs, new), self._levels)
        order = np.argsort(every)[np.searchsorted(np.sort(every), new)]
        what = (session.now_s, capacity, session.config.slot_s, needs, order)
        taken = taken_in_turn(*what)
        return new[taken], new[~taken]


def _by_deadline(
    session: ElasticSession, jobs: Index, levels: Levels
) -> tuple[Index, Jobs]:
    """Return jobs, the earliest deadline first, and what they need."""
    trace = session.config.trace
    jobs = jobs[np.argsort(trace.deadline_s[jobs], kind="stable")]
    model = trace.model[jobs]
    return jobs, Jobs(
        left=session.left[jobs],
        due=trace.deadline_s[jobs],
        degrees=session.degrees,
        rates=levels.rates[model],
        levels=levels.top[model],
    )


class _Reservations:
    """Minimum satisfactory shares of jobs, the earliest deadline first."""

    def __init__(
        self, session: ElasticSession, jobs: Index, capacity: int, levels: Levels
    ) -> None:
        self._session, self._capacity = session, capacity
        self._jobs, self._needs = _by_deadline(session, jobs, levels)
        number = len(jobs)
        size = BREAKPOINTS[0] * number + BREAKPOINTS[1]
        self._profile = Profile(np.zeros(size), np.zeros(size, dtype=np.int64))
        # Most of these is never written: memory that is not touched costs no time.
        self._plans = Plans(
            np.empty((number, size)),
            np.empty((number, size), dtype=np.int64),
            np.zeros(number, dtype=np.int64),
        )
        what = (self._needs, self._plans, self._profile)
        self._count, self.met = minimum_shares(
            session.now_s, capacity, session.config.slot_s, *what
        )

    def expanded(self, taken: Index, declined: Index, sign: float) -> Allocation:
        """Return the decision, after the devices that are free now are given."""
        now_s = self._session.now_s
        starts, devices, runs = self._plans
        if len(self._jobs):
            expand_shares(
                self._session.config.slot_s,
                self._capacity,
                self._needs,
                self._plans,
                self._profile,
                self._count,
                sign,
            )
        next_s = np.inf
        if len(self._jobs) and runs.max() > 2:
            # Plans leave restarts out: while a job stands still, the time at which it
            # frees its devices moves on as fast as the clock.
            ready_s = now_s + float(self._session.stall_s[self._jobs].max())
            next_s = max(float(starts[runs > 2, 1].min()), ready_s)
        held = np.where((starts[:, 0] <= now_s) & (runs > 1), devices[:, 0], 0)
        return Allocation(
            jobs=self._jobs,
            degree=held,
            promised=taken,
            declined=declined,
            wake_s=next_s,
        )


class Tiresias:
    """Run the jobs that have had the least service first, in two queues.

    A job starts in the first queue, and goes to the second when it has had ``limit_s``
    device-seconds. Each queue is first come, first served; a job that does not fit is
    passed over. Jobs have the devices that their users asked for.

    Source: Gu et al. 2019 (Tiresias), discretised two-dimensional LAS.

    Args:
        limits_s: Device-seconds at which a job goes to the next queue.
    """

    def __init__(self, limits_s: tuple[float, ...] = (3250.0,)) -> None:
        self._limits_s = np.array(limits_s)

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        free = one_kind(session, "Tiresias")
        jobs, trace = session.alive, session.config.trace
        queue = np.searchsorted(
            self._limits_s, session.served_s[jobs] + 1e-6, side="right"
        )
        running = session.degree[jobs] > 0
        order = np.lexsort((jobs, ~running, queue))
        degree = np.zeros(len(jobs), dtype=np.int64)
        wake_s = np.inf
        for at in order.tolist():
            wanted = int(trace.gpus[jobs[at]])
            if wanted > free:
                continue
            free -= wanted
            degree[at] = wanted
            if queue[at] < len(self._limits_s):
                rest = self._limits_s[queue[at]] - session.served_s[jobs[at]]
                wake_s = min(wake_s, session.now_s + rest / wanted)
        return Allocation(jobs=jobs, degree=degree, wake_s=wake_s)


class _Group:
    """Hosts that time-slice jobs of one degree, and the jobs, the next to run first."""

    def __init__(self, hosts: int, slots: int) -> None:
        self.hosts = hosts
        self.slots = slots
        self.jobs: list[int] = []


class Gandiva:
    """Pack jobs of one degree on groups of hosts, and slice time where they are full.

    A group takes jobs while a slot stays free. Without a free group and free hosts a
    job joins the least loaded group of its degree, whose jobs take turns. At every
    submission each degree's groups grow or shrink towards its share of the demand.
    Jobs have the devices that their users asked for.

    Source: Xiao et al. 2018 (Gandiva), as ElasticFlow's authors simulated it: degrees
    are given whole hosts, and nothing is decided between submissions while any are to
    come.

    Args:
        slice_s: Time after which waiting jobs of a group take their turn.
    """

    def __init__(self, slice_s: float = 60.0) -> None:
        self._slice_s = slice_s
        self._groups: dict[int, list[_Group]] = {}
        self._waiting: list[int] = []
        self._seen = 0
        self._turned_s = 0.0

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        free = one_kind(session, "Gandiva")
        # Groups are of hosts; what is dead of one is noticed when jobs are run.
        capacity = int(session.room.size.sum())
        coming = bool((session.fate == Fate.AHEAD).any())
        new = list(range(self._seen, int(np.sum(session.fate != Fate.AHEAD))))
        if coming and not new:
            return Allocation()
        self._seen += len(new)
        alive = set(session.alive.tolist())
        size = int(session.room.size[0])
        self._adjust(capacity, size)
        freed = self._leave(alive)
        gpus = session.config.trace.gpus
        if freed:
            self._waiting = [
                job
                for job in self._waiting
                if not self._join(job, gpus, capacity, size)
            ]
        for job in new:
            if not self._join(job, gpus, capacity, size):
                self._waiting.append(job)
        turn = session.now_s - self._turned_s >= self._slice_s
        if turn:
            self._turned_s = session.now_s
        running: set[int] = set()
        for group in self._all():
            if turn and len(group.jobs) > group.slots:
                group.jobs = group.jobs[group.slots :] + group.jobs[: group.slots]
            for job in group.jobs[: group.slots]:
                if gpus[job] <= free:
                    running.add(job)
                    free -= int(gpus[job])
        jobs = session.alive
        degree = np.where([job in running for job in jobs.tolist()], gpus[jobs], 0)
        return Allocation(
            jobs=jobs,
            degree=degree,
            # Where nothing runs, turns let nothing run either.
            wake_s=np.inf if coming or not running else session.now_s + 60.0,
        )

    def _all(self) -> list[_Group]:
        return [group for groups in self._groups.values() for group in groups]

    def _leave(self, alive: set[int]) -> bool:
        """Take ended jobs out of their groups; whether that freed hosts."""
        freed = False
        for groups in self._groups.values():
            for group in groups:
                group.jobs = [job for job in group.jobs if job in alive]
            kept = [group for group in groups if group.jobs]
            freed |= len(kept) < len(groups)
            groups[:] = kept
        return freed

    def _open(self, degree: int, capacity: int, size: int) -> _Group | None:
        hosts = -(-degree // size)
        if sum(group.hosts for group in self._all()) + hosts > capacity // size:
            return None
        group = _Group(hosts, hosts * size // degree)
        self._groups.setdefault(degree, []).append(group)
        return group

    def _join(self, job: int, gpus: Index, capacity: int, size: int) -> bool:
        degree = int(gpus[job])
        groups = self._groups.setdefault(degree, [])
        least = min(groups, key=lambda group: len(group.jobs), default=None)
        if least is None or len(least.jobs) + 1 >= least.slots:
            least = self._open(degree, capacity, size) or least
        if least is None:
            return False
        least.jobs.append(job)
        return True

    def _adjust(self, capacity: int, size: int) -> None:
        """Move each degree's hosts towards its share of the demand."""
        demand = {
            degree: degree * sum(len(group.jobs) for group in groups)
            for degree, groups in self._groups.items()
        }
        total = sum(demand.values())
        for degree, groups in self._groups.items():
            if not demand[degree]:
                continue
            share = min(demand[degree], demand[degree] * capacity // total)
            lack = share - sum(group.hosts for group in groups) * size
            for _ in range(-(-lack // degree) if lack > 0 else 0):
                if self._open(degree, capacity, size) is None:
                    break
            if lack < 0:
                fewer = min(-(lack // degree), len(groups) - 1)
                groups.sort(key=lambda group: len(group.jobs))
                moved = [job for group in groups[:fewer] for job in group.jobs]
                del groups[:fewer]
            elif lack > 0:
                moved = [job for group in groups for job in group.jobs]
                for group in groups:
                    group.jobs = []
            else:
                continue
            for job in moved:
                min(groups, key=lambda group: len(group.jobs)).jobs.append(job)
