"""Many episodes of the benchmark side by side, decided together by compiled code.

The rules are those of :class:`envs.ramp.world.RampWorld`, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import NUM_SEEN
from envs.ramp.log import ReplayLog
from envs.ramp.steps import (
    OUTCOMES,
    UNKNOWN,
    Arrivals,
    Running,
    Totals,
    account,
    arrive,
    decide_rows,
)
from envs.ramp.tables import RampTables, ramp_tables
from envs.ramp.world import Arrival, RampJobs, Summary, check_arrivals
from planner.errors import StrategyError

__all__ = ["RampEpisodes"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]


class RampEpisodes:
    """Episodes side by side.

    Args:
        jobs: What may arrive.
        episodes: Arrivals of each, in order of time.
        horizon_s: When episodes end.
        tables: Of the jobs, if they have been laid out already.
        log: Keeps what becomes of every job, if it is asked to.

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
        log: ReplayLog | None = None,
    ) -> None:
        self.jobs, self.horizon_s = jobs, horizon_s
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
