"""Many episodes of the benchmark side by side, decided together by compiled code.

The rules are those of :class:`envs.ramp.world.RampWorld`, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import NUM_SEEN, remember
from envs.ramp.requests import servers_given
from envs.ramp.tables import RampTables, ramp_tables
from envs.ramp.world import Arrival, RampJobs, Summary, check_arrivals
from planner.errors import StrategyError
from planner.simulate.compiled import compiled

__all__ = ["OUTCOMES", "RampEpisodes", "Running", "leave", "servers_in"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]

#: Outcomes by their number.
OUTCOMES = ("placed", "refused", "no_room", "late")
_PLACED, _REFUSED, _NO_ROOM, _LATE, _UNKNOWN = range(5)
#: Ends of jobs and arrivals this close are at one time; as in RampWorld.
_SAME_TIME_S = 1e-7


class Running(NamedTuple):
    """Jobs that run. b episodes, at most one job a server.

    Attributes:
        ends_s: When each leaves. Shape [b, servers].
        masks: Servers that each holds, as bits. Shape [b, servers].
        number: Of the jobs. Shape [b].
        held: Servers held in the interval that ends now. Shape [b].
        busy: Servers held from now on, as bits. Shape [b].
    """

    ends_s: Array
    masks: Masks
    number: Index
    held: Index
    busy: Masks


class _Arrivals(NamedTuple):
    """Of each episode, filled up with zeros; ``decided`` of them need a decision."""

    time_s: Array
    model: Index
    beta: Array
    decided: Index
    arrived: Index
    position: Index


class _Totals(NamedTuple):
    """Sums over an episode's decisions, as Summary names them. Shapes [b, …]."""

    outcomes: Index
    unfinished: Index
    done_bytes: Array
    #: Completion time, speed-up, degree and workers of completed jobs.
    completed: Array


@compiled
def servers_in(mask: np.uint64) -> int:
    """How many servers a mask has."""
    # Masks are 64 bits wide: pairs, fours, bytes, and a product that adds bytes up.
    x = mask - ((mask >> np.uint64(1)) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    x = (x & twos) + ((x >> np.uint64(2)) & twos)
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@compiled
def leave(ends_s: Array, masks: Masks, count: int, now_s: float) -> tuple[int, int]:
    """Drop the jobs that have ended.

    Args:
        ends_s: Of the jobs; closed up in place. Shape [at least count].
        masks: Likewise.
        count: Jobs before.
        now_s: Time of the next decision.
    Returns:
        Jobs left, and servers held in the interval that ends now: a job that leaves
        just now still counts there.
    """
    held, left = 0, 0
    for job in range(count):
        end = ends_s[job]
        if end >= now_s - _SAME_TIME_S:
            held += servers_in(masks[job])
        if end > now_s + _SAME_TIME_S:
            ends_s[left], masks[left] = end, masks[job]
            left += 1
    return left, held


@compiled
def _arrive(running: Running, rows: Index, now_s: Array) -> None:
    for index in range(len(rows)):
        row = rows[index]
        left, held = leave(
            running.ends_s[row], running.masks[row], running.number[row], now_s[index]
        )
        busy = np.uint64(0)
        for job in range(left):
            busy |= running.masks[row, job]
        running.number[row], running.held[row], running.busy[row] = left, held, busy


@compiled
def _decide(
    tables: RampTables,
    running: Running,
    arrivals: _Arrivals,
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
) -> None:
    """Place what can be placed, and say what became of each row's job."""
    for row in rows:
        now = arrivals.position[row]
        model, k = arrivals.model[row, now], choice[row]
        left = tables.num_servers - running.held[row]
        if k < 0 or tables.degrees[k] > left:
            outcome[row] = _REFUSED
            continue
        given = servers_given(tables.sizes[model, k], tables.blocks, running.busy[row])
        if given == 0:
            outcome[row] = _NO_ROOM
            continue
        jct = known_jct_s[row, model, tables.splits[model, k]]
        if np.isnan(jct):
            outcome[row] = _UNKNOWN
        elif jct > arrivals.beta[row, now] * tables.sequential_jct_s[model]:
            outcome[row] = _LATE
        else:
            outcome[row] = _PLACED
            job = running.number[row]
            running.ends_s[row, job] = arrivals.time_s[row, now] + jct
            running.masks[row, job] = given
            running.number[row] += 1


@compiled
def _account(
    tables: RampTables,
    running: Running,
    arrivals: _Arrivals,
    totals: _Totals,
    seen: NDArray[np.float32],
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
    horizon_s: float,
) -> None:
    for row in rows:
        now = arrivals.position[row]
        arrivals.position[row] += 1
        remember(seen[row], arrivals.beta[row, now])
        totals.outcomes[row, outcome[row]] += 1
        if outcome[row] != _PLACED:
            continue
        model, start = arrivals.model[row, now], arrivals.time_s[row, now]
        split = tables.splits[model, choice[row]]
        jct = known_jct_s[row, model, split]
        share = min(1.0, (horizon_s - start) / jct)
        totals.done_bytes[row] += tables.demand_bytes[model] * share
        job = running.number[row] - 1
        if running.ends_s[row, job] > horizon_s + _SAME_TIME_S:
            totals.unfinished[row] += 1
            continue
        totals.completed[row, 0] += jct
        totals.completed[row, 1] += tables.sequential_jct_s[model] / jct
        totals.completed[row, 2] += split
        totals.completed[row, 3] += servers_in(running.masks[row, job])


class RampEpisodes:
    """Episodes side by side.

    Args:
        jobs: What may arrive.
        episodes: Arrivals of each, in order of time.
        horizon_s: When episodes end.
        tables: Of the jobs, if they have been laid out already.

    Raises:
        ClusterError: As :func:`envs.ramp.tables.ramp_tables`.
        UnknownNameError: If an arrival's model is no job.
        StrategyError: If an arrival's beta is not in (0, 1] or times go backwards.
    """

    def __init__(
        self,
        jobs: RampJobs,
        episodes: Sequence[Sequence[Arrival]],
        horizon_s: float = 1e6,
        tables: RampTables | None = None,
    ) -> None:
        self.jobs, self.horizon_s = jobs, horizon_s
        self.tables = ramp_tables(jobs) if tables is None else tables
        self._names = list(jobs.jobs)
        self._number = {name: index for index, name in enumerate(self._names)}
        count = len(episodes)
        longest = max((len(arrivals) for arrivals in episodes), default=0)
        self.arrivals = _Arrivals(
            time_s=np.zeros((count, longest)),
            model=np.zeros((count, longest), dtype=np.int64),
            beta=np.ones((count, longest)),
            decided=np.zeros(count, dtype=np.int64),
            arrived=np.zeros(count, dtype=np.int64),
            position=np.zeros(count, dtype=np.int64),
        )
        servers = self.tables.num_servers
        self.running = Running(
            ends_s=np.zeros((count, servers)),
            masks=np.zeros((count, servers), dtype=np.uint64),
            number=np.zeros(count, dtype=np.int64),
            held=np.zeros(count, dtype=np.int64),
            busy=np.zeros(count, dtype=np.uint64),
        )
        most = int(self.tables.splits.max(initial=1))
        self.known_jct_s = np.full((count, len(self._names), most + 1), np.nan)
        self.seen = np.zeros((count, NUM_SEEN), dtype=np.float32)
        self._totals = _Totals(
            outcomes=np.zeros((count, len(OUTCOMES)), dtype=np.int64),
            unfinished=np.zeros(count, dtype=np.int64),
            done_bytes=np.zeros(count),
            completed=np.zeros((count, 4)),
        )
        for row, arrivals in enumerate(episodes):
            self.restart(row, arrivals)

    def restart(self, row: int, arrivals: Sequence[Arrival]) -> None:
        """Begin an episode anew, with nothing running and nothing known.

        Args:
            row: Of the episode.
            arrivals: In order of time; those at or after the horizon are not decided.
        """
        check_arrivals(self.jobs.jobs, arrivals)
        decided = [a for a in arrivals if a.time_s < self.horizon_s]
        count = len(decided)
        if count > self.arrivals.time_s.shape[1]:
            self.arrivals = self._lengthened(count)
        self.arrivals.time_s[row, :count] = [a.time_s for a in decided]
        self.arrivals.model[row, :count] = [self._number[a.model] for a in decided]
        self.arrivals.beta[row, :count] = [a.beta for a in decided]
        self.arrivals.decided[row] = count
        self.arrivals.arrived[row] = sum(a.time_s <= self.horizon_s for a in arrivals)
        self.arrivals.position[row] = 0
        for part in (*self.running, *self._totals, self.seen):
            part[row] = 0
        self.known_jct_s[row] = np.nan

    def _lengthened(self, count: int) -> _Arrivals:
        before = self.arrivals
        pad = ((0, 0), (0, count - before.time_s.shape[1]))
        return before._replace(
            time_s=np.pad(before.time_s, pad),
            model=np.pad(before.model, pad),
            beta=np.pad(before.beta, pad, constant_values=1.0),
        )

    @property
    def unfinished(self) -> Index:
        """Jobs placed so far that end after the horizon. Shape [b]."""
        return self._totals.unfinished.copy()

    @property
    def over(self) -> Flags:
        """Whether all jobs of an episode have been decided. Shape [b]."""
        return self.arrivals.position >= self.arrivals.decided

    def heads(self) -> tuple[Array, Index, Array]:
        """Time, model and beta of the jobs to decide; zeros where it is over. [b]."""
        longest = self.arrivals.time_s.shape[1]
        if not longest:
            none = np.zeros(len(self.arrivals.position))
            return none, none.astype(np.int64), none
        now = np.minimum(self.arrivals.position, longest - 1)
        rows = np.arange(len(now))
        return (
            self.arrivals.time_s[rows, now],
            self.arrivals.model[rows, now],
            self.arrivals.beta[rows, now],
        )

    def valid(self) -> Flags:
        """Which degrees the benchmark's mask allows. Shape [b, d]."""
        left = self.tables.num_servers - self.running.held
        return np.asarray(self.tables.degrees[None, :] <= left[:, None])

    def decide(self, choice: Index) -> Index:
        """Place each episode's job, or turn it away; go on to the next arrivals.

        Args:
            choice: Index of a degree, or -1 to turn the job away. Shape [b].
        Returns:
            Numbers of :data:`OUTCOMES`; -1 for episodes that are over. Shape [b].
        Raises:
            StrategyError: If a choice is no degree's index.
        """
        choice = np.asarray(choice, dtype=np.int64)
        if choice.size and not -1 <= choice.min() <= choice.max() < len(
            self.tables.degrees
        ):
            raise StrategyError(
                f"choices from {choice.min()} to {choice.max()}; give the index of one "
                f"of the degrees {self.tables.degrees.tolist()}, or -1"
            )
        outcome = np.full(len(choice), -1, dtype=np.int64)
        rows = np.flatnonzero(~self.over)
        left = rows
        while len(left):
            _decide(
                self.tables,
                self.running,
                self.arrivals,
                self.known_jct_s,
                choice,
                left,
                outcome,
            )
            left = rows[outcome[rows] == _UNKNOWN]
            for row in left.tolist():
                self._work_out(row, int(choice[row]))
        _account(
            self.tables,
            self.running,
            self.arrivals,
            self._totals,
            self.seen,
            self.known_jct_s,
            choice,
            rows,
            outcome,
            self.horizon_s,
        )
        self._advance(rows)
        return outcome

    def _advance(self, rows: Index) -> None:
        time_s = self.heads()[0]
        now = np.where(self.over, self.horizon_s, time_s)[rows]
        _arrive(self.running, rows, now)

    def _work_out(self, row: int, choice: int) -> None:
        """The completion time that an episode's first placement of a kind decides."""
        servers = self.tables.num_servers
        busy = (int(self.running.busy[row]) >> np.arange(servers)) & 1 > 0
        model = int(self.arrivals.model[row, self.arrivals.position[row]])
        name, degree = self._names[model], int(self.tables.degrees[choice])
        placed = self.jobs.place(name, degree, busy)
        if placed is None:
            raise AssertionError(f"{name} at {degree} has a block but no placement")
        split = self.tables.splits[model, choice]
        self.known_jct_s[row, model, split] = self.jobs.jct_s(name, degree, placed)

    def summary(self, row: int) -> Summary:
        """What an episode has come to, as if it ended at the horizon."""
        counts = self._totals.outcomes[row]
        unfinished = int(self._totals.unfinished[row])
        completed = int(counts[_PLACED]) - unfinished
        sums = self._totals.completed[row]
        means = sums / completed if completed else np.full(4, np.nan)
        return Summary(
            blocked=int(counts[_REFUSED:].sum()) + unfinished,
            arrived=int(self.arrivals.arrived[row]),
            refused=int(counts[_REFUSED]),
            no_room=int(counts[_NO_ROOM]),
            late=int(counts[_LATE]),
            unfinished=unfinished,
            throughput_bytes_per_s=float(self._totals.done_bytes[row] / self.horizon_s),
            mean_jct_s=float(means[0]),
            mean_speedup=float(means[1]),
            mean_degree=float(means[2]),
            mean_workers=float(means[3]),
        )
