"""Sessions of elastic jobs: time, progress, promises, and what a decision changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.elastic.costs import Change, FailureLaw, ReshardCost, ResizeCost
from envs.elastic.pools import Pools, Room, pools_of
from envs.elastic.throughput import ThroughputSource
from envs.elastic.traces import JobTrace
from planner.cluster import Cluster
from planner.errors import StrategyError

__all__ = [
    "Allocation",
    "ElasticConfig",
    "ElasticSession",
    "ElasticSummary",
    "Fate",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Work that is left over by rounding.
_LEFT = 1e-6
_NONE: Index = np.zeros(0, dtype=np.int64)
_NONE.setflags(write=False)


class Fate(IntEnum):
    """State of a job."""

    #: Not submitted yet.
    AHEAD = 0
    #: Submitted, and nothing promised.
    WAITING = 1
    #: Promised to meet its deadline.
    PROMISED = 2
    #: Turned away.
    DECLINED = 3
    #: Ended.
    DONE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Configuration of a stream of elastic jobs.

    Attributes:
        trace: The jobs.
        source: Throughputs of the jobs.
        cluster: Hosts by type, or a Cluster.
        slot_s: Least time between two decisions; what happens sooner is decided
            together.
        cost: Cost of a change of a job's devices.
        failures: Law by which devices die and come back.
        late: Whether a job that has missed its deadline runs on, or is dropped.
    """

    trace: JobTrace
    source: ThroughputSource
    cluster: Pools | Cluster
    slot_s: float = 0.0
    cost: ResizeCost = field(default_factory=ReshardCost)
    failures: FailureLaw = field(default_factory=FailureLaw)
    late: Literal["run", "drop"] = "run"

    def __post_init__(self) -> None:
        if not 0.0 <= self.slot_s < np.inf:
            raise StrategyError(
                f"slot_s={self.slot_s}; give the least time between two decisions, 0 "
                "or more seconds"
            )
        if self.late not in ("run", "drop"):
            raise StrategyError(f"late={self.late!r}; give 'run' or 'drop'")
        if self.trace.models != self.source.models:
            raise StrategyError(
                f"trace {self.trace.name} was read with other models than "
                f"{self.source.name} has; read it with this source of throughputs"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """A decision: devices of jobs, and what new ones are told.

    Attributes:
        jobs: Jobs whose devices are decided; the others keep theirs. Shape [n].
        degree: Their numbers of devices; 0 pauses a job. Shape [n].
        kind: Their device types, as numbers of the source's; 0 by default. Shape [n].
        promised: Jobs that are promised to meet their deadlines.
        declined: Jobs that are turned away.
        wake_s: Time at which the policy wants to decide again, whatever happens.
    """

    jobs: Index = field(default_factory=lambda: _NONE)
    degree: Index = field(default_factory=lambda: _NONE)
    kind: Index | None = None
    promised: Index = field(default_factory=lambda: _NONE)
    declined: Index = field(default_factory=lambda: _NONE)
    wake_s: float = np.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticSummary:
    """Figures of an episode.

    Attributes:
        jobs: Jobs that were submitted.
        met: Jobs that ended by their deadlines.
        declined: Jobs that were turned away.
        late: Jobs that missed their deadlines, or can no longer meet them.
        broken: Names of promised jobs among the late.
        blocked: Share of the jobs that were declined or late.
        mean_jct_s: Mean time from submission to end, of the jobs that ended.
        utilisation: Share of all device-seconds that jobs held.
        decisions: Number of decisions.
        resizes: Changes of a running job's devices.
        failures: Devices that died.
    """

    jobs: int
    met: int
    declined: int
    late: int
    broken: tuple[str, ...]
    blocked: float
    mean_jct_s: float
    utilisation: float
    decisions: int
    resizes: int
    failures: int


class ElasticSession:
    """An episode: call :meth:`begin`, then :meth:`apply` until :attr:`over`.

    A policy may read every attribute and change none.

    Attributes:
        now_s: Time.
        fate: State of each job, a :class:`Fate`. Shape [jobs].
        alive: Jobs that were submitted and have neither ended nor been turned away.
        left: Iterations that are left of each job. Shape [jobs].
        degree: Devices that each job holds. Shape [jobs].
        kind: Their type. Shape [jobs].
        served_s: Device-seconds that each job has had. Shape [jobs].
        end_s: Time at which each job ended, or NaN. Shape [jobs].
        rates: Iterations per second. Shape [models, kinds, degrees, spreads].
        degrees: Numbers of devices that a job can hold. Shape [degrees].
    """

    def __init__(self, config: ElasticConfig) -> None:
        self.config = config
        trace, source = config.trace, config.source
        pools = config.cluster
        if isinstance(pools, Cluster):
            pools = pools_of(pools, source.kinds)
        self.pools: Pools = pools
        self.rates = source.rates()
        self.degrees: Index = np.array(source.degrees, dtype=np.int64)
        self._place = {int(degree): at for at, degree in enumerate(self.degrees)}
        self._names = [key.name for key in source.models]
        self._check_size(trace)
        self.begin()

    def _check_size(self, trace: JobTrace) -> None:
        capacity = Room(self.pools, self.config.source.kinds).capacity()
        fits = self.degrees[None, :] <= capacity[:, None]
        able = ((self.rates.max(axis=3) > 0.0) & fits[None]).any(axis=(1, 2))
        unable = np.flatnonzero(~able[trace.model])
        if len(unable):
            job = int(unable[0])
            raise StrategyError(
                f"job {trace.job_id[job]} ({trace.models[trace.model[job]]}) runs on "
                f"no number of devices that a cluster of {int(capacity.sum())} has; "
                "give a larger cluster, other types, or a trace without it"
            )

    def begin(self, seed: int | np.random.Generator = 0) -> None:
        """Begin an episode at the first submission.

        Args:
            seed: Seed of the failures.
        """
        trace, jobs = self.config.trace, len(self.config.trace)
        self._random = np.random.default_rng(seed)
        self.room = Room(self.pools, self.config.source.kinds)
        self.now_s = 0.0
        self.fate: Index = np.zeros(jobs, dtype=np.int64)
        self.alive: Index = _NONE
        self.left: Floats = trace.iterations.copy()
        self.degree: Index = np.zeros(jobs, dtype=np.int64)
        self.kind: Index = np.zeros(jobs, dtype=np.int64)
        self.rate: Floats = np.zeros(jobs)
        self.stall_s: Floats = np.zeros(jobs)
        self.served_s: Floats = np.zeros(jobs)
        self.end_s: Floats = np.full(jobs, np.nan)
        self.late: NDArray[np.bool_] = np.zeros(jobs, dtype=np.bool_)
        self._ran_s: Floats = np.zeros(jobs)
        self._arrived = 0
        self._wake_s = np.inf
        self._repairs_s: list[tuple[float, int]] = []
        self._resizes = self._failures = self.decisions = 0
        self._held_s = self._capacity_s = 0.0
        self._promised = np.zeros(jobs, dtype=np.bool_)
        self._fail_s = self._next_failure()
        self._submit()

    @property
    def over(self) -> bool:
        """True if all jobs have come, and each has ended or been turned away."""
        return self._arrived == len(self.fate) and len(self.alive) == 0

    @property
    def new(self) -> Index:
        """Jobs that are alive, not promised, and have had no device."""
        here = self.alive
        fresh = (self.fate[here] == Fate.WAITING) & (self.served_s[here] == 0.0)
        found: Index = here[fresh]
        return found

    @property
    def capacity(self) -> Index:
        """Devices of each type that are alive. Shape [kinds]."""
        return self.room.capacity()

    def deadline_s(self, jobs: Index) -> Floats:
        """Return the deadlines of jobs. Shape [n]."""
        found: Floats = self.config.trace.deadline_s[jobs]
        return found

    def apply(self, decision: Allocation) -> None:
        """Take a decision, and let time pass until the next is due.

        Raises:
            StrategyError: If it asks for devices that are not there, for a number of
                them that a job cannot run on, or for a job that is not alive.
        """
        if self.over:
            raise StrategyError("the episode has ended; call begin for the next")
        self._tell(decision)
        self._resize(decision)
        self._wake_s = decision.wake_s if decision.wake_s > self.now_s else np.inf
        self.decisions += 1
        self._pass_time()

    def summary(self) -> ElasticSummary:
        """Return the figures of the episode, as far as it has gone."""
        trace, seen = self.config.trace, self.fate != Fate.AHEAD
        done = self.fate == Fate.DONE
        declined = int((self.fate == Fate.DECLINED).sum())
        # One that was declined after its deadline counts once.
        late = int((self.late & (self.fate != Fate.DECLINED)).sum())
        jobs = int(seen.sum())
        broken = np.flatnonzero(self.late & self._promised)
        jct = (self.end_s - trace.submit_s)[done & np.isfinite(self.end_s)]
        return ElasticSummary(
            jobs=jobs,
            met=int((done & ~self.late).sum()),
            declined=declined,
            late=late,
            broken=tuple(trace.job_id[job] for job in broken),
            blocked=(declined + late) / jobs if jobs else 0.0,
            mean_jct_s=float(jct.mean()) if len(jct) else np.nan,
            utilisation=self._held_s / self._capacity_s if self._capacity_s else 0.0,
            decisions=self.decisions,
            resizes=self._resizes,
            failures=self._failures,
        )

    def _tell(self, decision: Allocation) -> None:
        for jobs, fate in (
            (decision.promised, Fate.PROMISED),
            (decision.declined, Fate.DECLINED),
        ):
            if not len(jobs):
                continue
            wrong = [job for job in jobs.tolist() if self.fate[job] != Fate.WAITING]
            if wrong:
                raise StrategyError(
                    f"job {self.config.trace.job_id[wrong[0]]} is "
                    f"{Fate(self.fate[wrong[0]]).name}; only a WAITING job can be "
                    "promised or declined"
                )
            self.fate[jobs] = fate
        self._promised[decision.promised] = True
        if len(decision.declined):
            for job in decision.declined.tolist():
                self._stop(job)
            self.alive = self.alive[self.fate[self.alive] != Fate.DECLINED]

    def _stop(self, job: int) -> None:
        self.room.release(job)
        self.degree[job] = 0
        self.rate[job] = 0.0

    def _resize(self, decision: Allocation) -> None:
        """Move devices between jobs, and charge the jobs whose devices changed."""
        jobs, degree = decision.jobs, decision.degree
        kind = np.zeros(len(jobs), np.int64) if decision.kind is None else decision.kind
        other = (self.degree[jobs] != degree) | (
            (degree > 0) & (self.kind[jobs] != kind)
        )
        changed: set[int] = set()
        if other.any():
            changed = self._exchange(jobs[other], degree[other], kind[other])
        running = self.alive[self.degree[self.alive] > 0]
        if len(running):
            names = self._names
            self.stall_s[running] = np.maximum(
                self.stall_s[running],
                self.config.cost.stall_s(
                    Change(
                        tuple(names[m] for m in self.config.trace.model[running]),
                        self.degree[running],
                        np.isin(running, list(changed))
                        if changed
                        else np.zeros(len(running), np.bool_),
                        self.decisions,
                        self.room.alive,
                    )
                ),
            )

    def _exchange(self, jobs: Index, degree: Index, kind: Index) -> set[int]:
        """Give jobs other devices; return all whose devices changed."""
        trace = self.config.trace
        wanted = []
        for job, devices, on in zip(
            jobs.tolist(), degree.tolist(), kind.tolist(), strict=True
        ):
            if self.fate[job] not in (Fate.WAITING, Fate.PROMISED):
                raise StrategyError(
                    f"job {trace.job_id[job]} is {Fate(self.fate[job]).name}; give "
                    "devices to jobs that are alive"
                )
            if devices:
                at = self._place.get(devices, -1)
                if at < 0 or not self.rates[trace.model[job], on, at].max() > 0.0:
                    raise StrategyError(
                        f"{devices} {self.config.source.kinds[on]} for job "
                        f"{trace.job_id[job]} ({trace.models[trace.model[job]]}); it "
                        f"has no throughput there, see degrees {tuple(self._place)}"
                    )
                wanted.append((job, on, devices))
        for job in jobs.tolist():
            self._stop(job)
            self._ran_s[job] = 0.0
        used = np.bincount(
            [on for _, on, _ in wanted],
            [devices for *_, devices in wanted],
            minlength=len(self.config.source.kinds),
        )
        spare = np.bincount(self.room.kind, self.room.free, minlength=len(used))
        if (used > spare).any():
            on = int(np.argmax(used - spare))
            raise StrategyError(
                f"{int(used[on])} more {self.config.source.kinds[on]} for jobs where "
                f"{int(spare[on])} are free; give a job fewer, or pause one"
            )
        moved, unplaced = self.room.place(wanted)
        lost = set(unplaced)
        for job, on, devices in wanted:
            if job not in lost:
                self.degree[job], self.kind[job] = devices, on
        changed = {job for job, *_ in wanted} - lost | moved
        for job in changed:
            self._set_rate(job)
        self._resizes += len(changed)
        return changed

    def _set_rate(self, job: int) -> None:
        """Take the rate of a job's devices; a job without one there stands still."""
        at = self._place[int(self.degree[job])]
        by_spread = self.rates[self.config.trace.model[job], self.kind[job], at]
        # A table without the spread layout knows of no difference.
        spread = self.room.spread(job) if by_spread[1] > 0.0 else 0
        self.rate[job] = by_spread[spread] or by_spread[1]

    def _pass_time(self) -> None:
        """Let time pass until something is to be decided, or the episode ends."""
        least_s = self.now_s + self.config.slot_s
        while not self.over:
            until_s = self._next_event()
            if until_s == np.inf:
                # Nothing will ever happen: what waits now is late for good.
                for job in self.alive.tolist():
                    self._stop(job)
                    self.late[job] = True
                self.fate[self.alive] = Fate.DONE
                self.alive = _NONE
                return
            until_s = max(until_s, least_s)
            self._progress(until_s)
            self._submit()
            self._fail()
            if len(self.alive) or self._arrived == len(self.fate):
                return

    def _next_event(self) -> float:
        """Time of the next submission, end, deadline, failure or wish of the policy."""
        trace, here = self.config.trace, self.alive
        times = [self._wake_s if self._wake_s > self.now_s else np.inf]
        if self._arrived < len(self.fate):
            times.append(float(trace.submit_s[self._arrived]))
        if len(here):
            rate = self.rate[here]
            run = rate > 0.0
            if run.any():
                going = here[run]
                ends = self.now_s + self.stall_s[going] + self.left[going] / rate[run]
                times.append(float(ends.min()))
                times.append(self._fail_s)
            if self._repairs_s:
                times.append(self._repairs_s[0][0])
            due = trace.deadline_s[here]
            due = due[due > self.now_s]
            if len(due):
                times.append(float(due.min()))
        return min(times)

    def _progress(self, until_s: float) -> None:
        """Let the running jobs work until a time; end those that are done by then."""
        here, past_s = self.alive, until_s - self.now_s
        self._capacity_s += past_s * self.room.alive
        trace = self.config.trace
        if len(here):
            running = here[self.rate[here] > 0.0]
            stall = self.stall_s[running]
            need_s = self.left[running] / self.rate[running]
            work_s = np.minimum(np.maximum(past_s - stall, 0.0), need_s)
            self.stall_s[running] = np.maximum(stall - past_s, 0.0)
            self.left[running] -= work_s * self.rate[running]
            self._ran_s[running] += work_s
            held = self.degree[running] * np.minimum(past_s, stall + need_s)
            self.served_s[running] += held
            self._held_s += float(held.sum())
            ended = self.left[running] <= _LEFT * self.rate[running]
            ends_s = self.now_s + stall[ended] + need_s[ended]
            done = running[ended]
            if len(done):
                self.end_s[done] = ends_s
                self.late[done] |= ends_s > trace.deadline_s[done] + _LEFT
                self.fate[done] = Fate.DONE
                for job in done.tolist():
                    self._stop(job)
                here = here[self.fate[here] != Fate.DONE]
            missed = here[trace.deadline_s[here] <= until_s]
            if len(missed):
                self.late[missed] = True
                if self.config.late == "drop":
                    self.fate[missed] = Fate.DONE
                    for job in missed.tolist():
                        self._stop(job)
                    here = here[self.fate[here] != Fate.DONE]
            self.alive = here
        self.now_s = until_s

    def _submit(self) -> None:
        """Take in the jobs whose time has come."""
        first = self._arrived
        last = int(
            np.searchsorted(self.config.trace.submit_s, self.now_s, side="right")
        )
        if last > first:
            self.fate[first:last] = Fate.WAITING
            self.alive = np.concatenate([self.alive, np.arange(first, last)])
            self._arrived = last

    def _next_failure(self) -> float:
        working = self.room.alive
        if not np.isfinite(self.config.failures.mean_s) or working == 0:
            return np.inf
        mean_s = self.config.failures.mean_s / working
        return self.now_s + float(self._random.exponential(mean_s))

    def _fail(self) -> None:
        """Let devices come back and die whose time has come."""
        while self._repairs_s and self._repairs_s[0][0] <= self.now_s:
            _, host = self._repairs_s.pop(0)
            self.room.repair(host)
        if self._fail_s > self.now_s:
            return
        room, law = self.room, self.config.failures
        working = room.size - room.down
        host = int(self._random.choice(len(working), p=working / working.sum()))
        # Which of the host's devices dies decides whose job is hit, if any's.
        at = int(self._random.integers(working[host])) - int(room.free[host])
        hit = -1
        for job, hosts in room.held.items() if at >= 0 else ():
            at -= sum(count for one, count in hosts if one == host)
            if at < 0:
                hit = job
                break
        self._failures += 1
        if hit >= 0:
            lost_s = self._ran_s[hit] % law.checkpoint_s
            self.left[hit] = min(
                self.left[hit] + lost_s * self.rate[hit],
                self.config.trace.iterations[hit],
            )
            self._ran_s[hit] = 0.0
            self._stop(hit)
        room.fail(host)
        self._repairs_s.append(
            (self.now_s + float(self._random.exponential(law.repair_s)), host)
        )
        self._repairs_s.sort()
        self._fail_s = self._next_failure()
