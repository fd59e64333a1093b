"""Many episodes of the benchmark side by side, decided together by compiled code.

The rules are those of :class:`envs.ramp.world.RampWorld`, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import NUM_SEEN, remember
from envs.ramp.jobs import RampJobs, RampTables, ramp_tables
from envs.ramp.placement import servers_given
from envs.ramp.world import Arrival, Summary, check_arrivals
from planner.errors import StrategyError
from planner.simulate.compiled import compiled, inner

__all__ = [
    "OUTCOMES",
    "UNKNOWN",
    "Arrivals",
    "LoggedEpisode",
    "RampEpisodes",
    "ReplayLog",
    "Running",
    "Totals",
    "account",
    "arrive",
    "decide_rows",
    "leave",
    "servers_in",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Masks = NDArray[np.uint64]
Flags = NDArray[np.bool_]

#: Outcomes, by number.
OUTCOMES = ("placed", "refused", "no_room", "late")
_PLACED, _REFUSED, _NO_ROOM, _LATE = range(len(OUTCOMES))
#: Stands for an outcome where a completion time must be computed first.
UNKNOWN = len(OUTCOMES)
#: Ends of jobs and arrivals this close count as equal, as in RampWorld.
_SAME_TIME_S = 1e-7


class Running(NamedTuple):
    """Running jobs. b episodes, at most one job a server.

    Attributes:
        ends_s: End of each job. Shape [b, servers].
        masks: Servers that each job holds, as bits. Shape [b, servers].
        number: Number of jobs. Shape [b].
        held: Servers held in the interval that ends now. Shape [b].
        busy: Servers held from now on, as bits. Shape [b].
    """

    ends_s: Array
    masks: Masks
    number: Index
    held: Index
    busy: Masks


class Arrivals(NamedTuple):
    """Arrivals of each episode, padded with zeros; ``decided`` need a decision.

    Attributes:
        time_s: Shape [b, n].
        model: Shape [b, n].
        beta: Shape [b, n].
        decided: Number of arrivals that need a decision. Shape [b].
        arrived: Number of arrivals, those at the horizon included. Shape [b].
        position: Next arrival to decide. Shape [b].
    """

    time_s: Array
    model: Index
    beta: Array
    decided: Index
    arrived: Index
    position: Index


class Totals(NamedTuple):
    """Sums over the decisions of an episode, named as in Summary.

    Attributes:
        outcomes: Shape [b, outcomes].
        unfinished: Shape [b].
        done_bytes: Shape [b].
        completed: Completion time, speed-up, degree and workers of completed jobs.
            Shape [b, 4].
    """

    outcomes: Index
    unfinished: Index
    done_bytes: Array
    completed: Array


@compiled
def servers_in(mask: np.uint64) -> int:
    """Count the servers of a mask."""
    # Population count of 64 bits: pairs, fours, bytes, then a product adds the bytes.
    x = mask - ((mask >> np.uint64(1)) & np.uint64(0x5555555555555555))
    twos = np.uint64(0x3333333333333333)
    x = (x & twos) + ((x >> np.uint64(2)) & twos)
    x = (x + (x >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return int((x * np.uint64(0x0101010101010101)) >> np.uint64(56))


@inner
def leave(ends_s: Array, masks: Masks, count: int, now_s: float) -> tuple[int, int]:
    """Drop the jobs that have ended.

    Args:
        ends_s: Ends of the jobs; compacted in place. Shape [at least count].
        masks: Servers of the jobs; compacted in place.
        count: Number of jobs before.
        now_s: Time of the next decision.
    Returns:
        Number of jobs left, and of servers held in the interval that ends now, which
        include those of jobs that leave now.
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
def arrive(running: Running, rows: Index, now_s: Array) -> None:
    """Advance to the next decisions.

    Args:
        running: Changed in place.
        rows: Episodes. Shape [r].
        now_s: Time of the next decision in each. Shape [r].
    """
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
def decide_rows(
    tables: RampTables,
    running: Running,
    arrivals: Arrivals,
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
) -> None:
    """Place each row's job if possible, and write the outcome.

    Args:
        tables: Tables of the jobs.
        running: Changed in place.
        arrivals: Arrivals of all episodes.
        known_jct_s: Completion times computed so far, else NaN. Shape [b, j, s].
        choice: Index of a degree, -1 to turn the job away. Shape [b].
        rows: Episodes to decide. Shape [r].
        outcome: Filled in; UNKNOWN where a completion time is missing. Shape [b].
    """
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
            outcome[row] = UNKNOWN
        elif jct > arrivals.beta[row, now] * tables.sequential_jct_s[model]:
            outcome[row] = _LATE
        else:
            outcome[row] = _PLACED
            job = running.number[row]
            running.ends_s[row, job] = arrivals.time_s[row, now] + jct
            running.masks[row, job] = given
            running.number[row] += 1


@compiled
def account(
    tables: RampTables,
    running: Running,
    arrivals: Arrivals,
    totals: Totals,
    seen: NDArray[np.float32],
    known_jct_s: Array,
    choice: Index,
    rows: Index,
    outcome: Index,
    horizon_s: float,
) -> None:
    """Add the outcomes to the totals, and go on to the next arrivals.

    Args:
        tables: Tables of the jobs.
        running: Running jobs after the decisions.
        arrivals: Positions are changed in place.
        totals: Changed in place.
        seen: Deadlines so far, changed in place. Shape [b, NUM_SEEN].
        known_jct_s: As for :func:`decide_rows`.
        choice: As for :func:`decide_rows`.
        rows: As for :func:`decide_rows`.
        outcome: Written by :func:`decide_rows`.
        horizon_s: End of the episodes.
    """
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


@dataclass(slots=True, kw_only=True)
class LoggedEpisode:
    """Decisions of one episode so far; lists have one entry a decision.

    Attributes:
        arrivals: Up to the horizon; those on it are not decided.
        outcome: Number of the outcome in :data:`OUTCOMES`.
        degree: Requested degree; 0 for turning away.
        split: Largest split of a placed job, else 0.
        jct_s: Completion time of a placed job, else 0.
        servers: Servers of a placed job, as bits.
    """

    arrivals: Sequence[Arrival]
    outcome: list[int] = field(default_factory=list)
    degree: list[int] = field(default_factory=list)
    split: list[int] = field(default_factory=list)
    jct_s: list[float] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)


class ReplayLog:
    """Records the fate of every job in episodes side by side."""

    def __init__(self) -> None:
        self.episodes: dict[int, LoggedEpisode] = {}

    def begin(self, row: int, arrivals: Sequence[Arrival], horizon_s: float) -> None:
        """Begin the record of an episode."""
        there = [arrival for arrival in arrivals if arrival.time_s <= horizon_s]
        self.episodes[row] = LoggedEpisode(arrivals=there)

    def note(
        self, episodes: RampEpisodes, rows: Index, choice: Index, outcome: Index
    ) -> None:
        """Record decisions, before time advances.

        Args:
            episodes: The episodes.
            rows: Episodes that are not over. Shape [r].
            choice: Index of a degree, or -1. Shape [b].
            outcome: Outcome in each episode. Shape [b].
        """
        tables, running = episodes.tables, episodes.running
        for row in rows.tolist():
            kept, taken = self.episodes[row], int(choice[row])
            model = int(
                episodes.arrivals.model[row, episodes.arrivals.position[row] - 1]
            )
            placed = outcome[row] == 0
            split = int(tables.splits[model, taken]) if placed else 0
            jct_s = episodes.known_jct_s[row, model, split] if placed else 0.0
            latest = int(running.number[row]) - 1
            kept.outcome.append(int(outcome[row]))
            kept.degree.append(int(tables.degrees[taken]) if taken >= 0 else 0)
            kept.split.append(split)
            kept.jct_s.append(float(jct_s))
            kept.servers.append(int(running.masks[row, latest]) if placed else 0)


class RampEpisodes:
    """Episodes side by side.

    Args:
        jobs: Jobs that may arrive.
        episodes: Arrivals of each, in order of time.
        horizon_s: End of the episodes.
        tables: Tables of the jobs, if they exist already.
        log: Records the fate of every job; None for no record.

    Raises:
        ClusterError: As :func:`envs.ramp.jobs.ramp_tables`.
        UnknownNameError: If an arrival's model is no job.
        StrategyError: If an arrival's beta is not in (0, 1] or times go backwards.
    """

    def __init__(
        self,
        jobs: RampJobs,
        episodes: Sequence[Sequence[Arrival]],
        horizon_s: float = 1e6,
        tables: RampTables | None = None,
        log: ReplayLog | None = None,
    ) -> None:
        self.jobs, self.horizon_s = jobs, float(horizon_s)
        self.log = log
        self.tables = ramp_tables(jobs) if tables is None else tables
        self._names = list(jobs.jobs)
        self._number = {name: index for index, name in enumerate(self._names)}
        count = len(episodes)
        longest = max((len(arrivals) for arrivals in episodes), default=0)
        self.arrivals = Arrivals(
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
        self._totals = Totals(
            outcomes=np.zeros((count, len(OUTCOMES)), dtype=np.int64),
            unfinished=np.zeros(count, dtype=np.int64),
            done_bytes=np.zeros(count),
            completed=np.zeros((count, 4)),
        )
        for row, arrivals in enumerate(episodes):
            self.restart(row, arrivals)

    def restart(self, row: int, arrivals: Sequence[Arrival]) -> None:
        """Restart an episode, with no running jobs and no known completion times.

        Args:
            row: Number of the episode.
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
        if self.log is not None:
            self.log.begin(row, arrivals, self.horizon_s)

    def _lengthened(self, count: int) -> Arrivals:
        before = self.arrivals
        pad = ((0, 0), (0, count - before.time_s.shape[1]))
        return before._replace(
            time_s=np.pad(before.time_s, pad),
            model=np.pad(before.model, pad),
            beta=np.pad(before.beta, pad, constant_values=1.0),
        )

    @property
    def unfinished(self) -> Index:
        """Number of jobs placed so far that end after the horizon. Shape [b]."""
        return self._totals.unfinished.copy()

    @property
    def over(self) -> Flags:
        """True for episodes whose jobs have all been decided. Shape [b]."""
        return self.arrivals.position >= self.arrivals.decided

    def heads(self) -> tuple[Array, Index, Array]:
        """Return time, model and beta of the heads; zeros after the end. [b]."""
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
        """Return the degrees that the benchmark's mask allows. Shape [b, d]."""
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
            decide_rows(
                self.tables,
                self.running,
                self.arrivals,
                self.known_jct_s,
                choice,
                left,
                outcome,
            )
            left = rows[outcome[rows] == UNKNOWN]
            for row in left.tolist():
                self._work_out(row, int(choice[row]))
        account(
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
        if self.log is not None:
            self.log.note(self, rows, choice, outcome)
        self._advance(rows)
        return outcome

    def _advance(self, rows: Index) -> None:
        time_s = self.heads()[0]
        now = np.where(self.over, self.horizon_s, time_s)[rows]
        arrive(self.running, rows, now)

    def _work_out(self, row: int, choice: int) -> None:
        """Compute the completion time of the first placement of a job and split."""
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
        """Summarise an episode, as if it ended at the horizon."""
        placed, refused, no_room, late = self._totals.outcomes[row].tolist()
        unfinished = int(self._totals.unfinished[row])
        completed = placed - unfinished
        sums = self._totals.completed[row]
        means = sums / completed if completed else np.full(4, np.nan)
        return Summary(
            blocked=refused + no_room + late + unfinished,
            arrived=int(self.arrivals.arrived[row]),
            refused=refused,
            no_room=no_room,
            late=late,
            unfinished=unfinished,
            throughput_bytes_per_s=float(self._totals.done_bytes[row] / self.horizon_s),
            mean_jct_s=float(means[0]),
            mean_speedup=float(means[1]),
            mean_degree=float(means[2]),
            mean_workers=float(means[3]),
        )
