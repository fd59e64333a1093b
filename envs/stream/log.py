"""The fate of every job of a stream, followed from one decision to the next.

Compiled code keeps no log: between two decisions its state shows the jobs that have
ended, and the rules of :func:`envs.stream.events.proceed` give the times of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from envs.ramp.record import device_runs
from envs.stream.decisions import OUTCOMES as DECIDED
from envs.stream.events import Stream
from envs.stream.state import StreamState
from envs.stream.tables import StreamTables
from planner.schema.stream import Outcome

__all__ = ["LoggedJob", "StreamLog"]

Index = NDArray[np.int64]

#: As in envs.stream.events.
_SAME_TIME_S = 1e-7


@dataclass(slots=True, kw_only=True)
class LoggedJob:
    """One job so far.

    Attributes:
        outcome: Final outcome; ``undecided`` or ``unfinished`` before.
        asked: Requested devices.
        decided_s: Time at which it was placed, turned away or dropped.
        start_s: Start of its run.
        end_s: End of its run.
        way: Candidate shape and reach of its run.
        devices: Devices that it holds or held, as runs.
        done: Share of its work that is done.
    """

    outcome: Outcome = "undecided"
    asked: int = 0
    decided_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    way: tuple[int, int] | None = None
    devices: tuple[tuple[int, int], ...] = ()
    done: float = 0.0


class StreamLog:
    """Records the fate of every job in one episode.

    Args:
        tables: Tables of jobs and network.
        stream: Arrivals.
        places: Jobs that can wait, the head included.
    """

    def __init__(self, tables: StreamTables, stream: Stream, places: int) -> None:
        self.tables, self.stream, self.places = tables, stream, places
        self.jobs: list[LoggedJob] = []
        self._queue: list[int] = []
        self._slots: dict[int, int] = {}

    def decided(self, state: StreamState, choice: int, outcome: int) -> None:
        """Record a decision on the head, before time advances.

        Args:
            state: State after the decision.
            choice: Candidate, -1 for none.
            outcome: Number of the outcome in OUTCOMES of envs.stream.decisions.
        """
        name = DECIDED[outcome]
        if name == "waiting":
            return
        number = self._queue.pop(0)
        job, now = self.jobs[number], float(state.clock[0])
        job.asked = int(self.tables.degrees[choice]) if choice >= 0 else 0
        job.decided_s = now
        if name == "placed":
            slot = next(
                s
                for s in np.flatnonzero(state.running).tolist()
                if s not in self._slots
            )
            self._slots[slot] = number
            held = np.flatnonzero(state.holder == slot).tolist()
            job.outcome, job.start_s = "unfinished", now
            job.way = int(state.choice[slot]), int(state.reach[slot])
            job.devices = device_runs(held)
        elif name == "refused":
            job.outcome = "refused"
        else:
            job.outcome = "late" if name == "late" else "no_room"

    def went_on(self, state: StreamState) -> None:
        """Record the events up to the next decision or the end.

        Args:
            state: State after the events.

        Raises:
            AssertionError: If the state contradicts the rules.
        """
        horizon_s, times = float(state.clock[1]), self.stream.time_s
        ended = [slot for slot in self._slots if not state.running[slot]]
        ended.sort(key=lambda slot: (state.ends_s[slot], slot))
        arriving = list(range(len(self.jobs), int(state.counts[1])))
        self.jobs += [LoggedJob() for _ in arriving]
        # Arrivals on the horizon are not decided.
        arriving = [number for number in arriving if times[number] < horizon_s]
        while ended or arriving:
            upcoming = arriving[0] if arriving else int(state.counts[1])
            at_s = float(times[upcoming]) if upcoming < len(times) else np.inf
            end_s = float(state.ends_s[ended[0]]) if ended else np.inf
            now = min(end_s, at_s, horizon_s)
            if end_s <= now + _SAME_TIME_S:
                self._end(state, ended.pop(0), now)
                self._give_up(now)
            else:
                self._give_up(now)
                self._arrive(arriving.pop(0), now)
        waits = state.waiting.arrived_s[: state.counts[0]]
        if not np.array_equal(times[self._queue], waits):
            raise AssertionError(
                f"jobs {self._queue} should wait at {state.clock[0]} s, and those that "
                f"do arrived at {waits}"
            )

    def measure(self, state: StreamState) -> None:
        """Update the share of their work that running jobs have done."""
        for slot, number in self._slots.items():
            share = float(state.left_s[slot]) / self._alone_s(number)
            self.jobs[number].done = min(max(1.0 - share, 0.0), 1.0)

    def _alone_s(self, number: int) -> float:
        """Return the seconds of a running job without shared links."""
        way, model = self.jobs[number].way, self.stream.model[number]
        if way is None:
            raise AssertionError(f"job {number} runs without a plan")
        steps = self.stream.size[number] * self.tables.steps[model]
        return float(steps * self.tables.step_s[model, way[0], way[1], 0])

    def _end(self, state: StreamState, slot: int, now: float) -> None:
        job = self.jobs[self._slots.pop(slot)]
        met = now <= state.due_s[slot] + _SAME_TIME_S * max(1.0, now)
        job.outcome, job.end_s, job.done = "met" if met else "late", now, 1.0

    def _give_up(self, now: float) -> None:
        """Drop waiting jobs that even an empty cluster could not end in time."""
        kept = []
        for number in self._queue:
            model, size = self.stream.model[number], self.stream.size[number]
            longest = self.stream.beta[number] * size
            longest *= self.tables.sequential_jct_s[model]
            due = self.stream.time_s[number] + longest
            if now + size * self.tables.fastest_s[model] > due + _SAME_TIME_S:
                self.jobs[number].outcome = "late"
                self.jobs[number].decided_s = now
            else:
                kept.append(number)
        self._queue = kept

    def _arrive(self, number: int, now: float) -> None:
        if len(self._queue) < self.places:
            self._queue.append(number)
            return
        self.jobs[number].outcome, self.jobs[number].decided_s = "no_room", now
