"""Plans of promised jobs that may pause, and the check that all of them hold.

A job has a row: devices from now to its end, or none until it starts again, and then
devices to its end. Rows hold if every job ends by its deadline and devices suffice at
all times. Then to follow them is safe, whatever comes:

* a job that is to start again at a time does so at most one slot later, and its devices
  are kept for it from that time on, to its end after such a delay;
* where it starts, smaller jobs may have to move (:class:`envs.elastic.pools.Room`), so
  each job has time for one restart for each larger job that is to start again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled

__all__ = ["EARLY_S", "GAP_S", "Needs", "Rows", "make_way"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Jobs that are tried one by one when one is to make way, and rows tried for each.
_TRIED = 8
#: Seconds by which promised jobs end early, for rounding.
EARLY_S = 1e-3
#: Restarts that a paused job keeps in reserve, for pauses of others that come later.
_SPARE = 10.0
#: Seconds for which devices are free before a paused job takes them, for rounding.
GAP_S = EARLY_S / 8


class Needs(NamedTuple):
    """Jobs that a decision is about.

    Attributes:
        jobs: Their numbers. Shape [n].
        undecided: Whether a job is neither promised nor declined. Shape [n].
        slack_s: Time until the deadline. Shape [n].
        held: Level of the devices that it holds; -1 for none. Shape [n].
        levels: Levels that it can use. Shape [n].
        rates: Iterations per second at each level. Shape [n, levels].
        time_s: Time to its end at each level from now on, with the restart that the
            level asks for; infinity where it cannot run. Shape [n, levels].
        least: Lowest level with which it ends in time if it begins now and keeps it;
            ``levels`` if none. Shape [n].
        cost_s: Device-seconds at that level; infinity if none. Shape [n].
        stalls: Seconds that a change to each level takes. Shape [n, levels].
        degrees: Devices of each level. Shape [levels].
        capacity: Devices of the cluster.
        restart_s: Time to its end at each level from a restart on. Shape [n, levels].
        resume_s: Time until a paused job is to start again; infinity for other jobs.
            Shape [n].
        resume: Level with which it then starts. Shape [n].
    """

    jobs: Index
    undecided: Flags
    slack_s: Floats
    held: Index
    levels: Index
    rates: Floats
    time_s: Floats
    least: Index
    cost_s: Floats
    stalls: Floats
    degrees: Index
    capacity: int
    restart_s: Floats
    resume_s: Floats
    resume: Index


@dataclass(slots=True)
class Rows:
    """Rows of jobs.

    Attributes:
        needs: The jobs.
        level: Level of each; -1 for a job without devices. Shape [n].
        start_s: Time until it has them; 0 for now. Shape [n].
        due_s: Time by which it has to end; infinity if it is late anyway. Shape [n].
        slot_s: Longest delay of a start.
    """

    needs: Needs
    level: Index
    start_s: Floats
    due_s: Floats
    slot_s: float

    def copy(self) -> Rows:
        """Return rows that can be changed apart."""
        return Rows(
            self.needs, self.level.copy(), self.start_s.copy(), self.due_s, self.slot_s
        )

    def take(self, other: Rows) -> None:
        """Become as other rows."""
        self.level[:], self.start_s[:] = other.level, other.start_s

    @property
    def now(self) -> Index:
        """Level that each job has now; -1 for none. Shape [n]."""
        return np.where(self.start_s > 0.0, -1, self.level)

    @property
    def paused(self) -> Index:
        """Jobs that start later. Shape [k]."""
        return np.flatnonzero((self.level >= 0) & (self.start_s > 0.0))

    def free(self) -> int:
        """Devices that are free now."""
        level = self.now
        held = self.needs.degrees[level[level >= 0]]
        return self.needs.capacity - int(held.sum())

    def _parts(self, moved: Flags | None = None) -> tuple[Index, Floats, Floats]:
        """Degree, time to the end and stall of each job. Shape [n]."""
        needs, at = self.needs, np.arange(len(self.level))
        level = np.maximum(self.level, 0)
        kept = (self.level == needs.held) & (self.start_s <= 0.0)
        if moved is not None:
            kept &= ~moved
        time_s = np.where(kept, needs.time_s[at, level], needs.restart_s[at, level])
        degree = np.where(self.level >= 0, needs.degrees[level], 0)
        return degree, time_s, needs.stalls[at, level]

    def hold(self, moved: Flags | None = None, *, before: bool = False) -> bool:
        """Return True if all jobs end in time.

        Args:
            moved: Whether a job that keeps its number of devices gets others now.
                Shape [n].
            before: Whether the rows held before; then they may be off by rounding.
        """
        degree, time_s, stall_s = self._parts(moved)
        found: bool = _hold(
            self.start_s,
            degree,
            time_s,
            stall_s,
            self.due_s + (EARLY_S / 4 if before else 0.0),
            0.0 if before else GAP_S,
            self.slot_s,
            self.needs.capacity,
        )
        return found

    def free_later(self) -> tuple[Floats, Index]:
        """Times at which paused jobs start, and the devices that are then free."""
        degree, time_s, stall_s = self._parts()
        starts = np.unique(self.start_s[self.paused])
        moves = self.moves(degree)
        end_s = self.start_s + time_s + moves * stall_s
        end_s += np.where(self.start_s > 0.0, self.slot_s, 0.0)
        there = (self.start_s <= starts[:, None]) & (starts[:, None] < end_s + GAP_S)
        return starts, self.needs.capacity - (there * degree).sum(axis=1)

    def moves(self, degree: Index) -> Index:
        """Larger jobs that start later, and may move a job. Shape of ``degree``.

        Args:
            degree: Devices of each job. Shape [n] or [n, levels].
        """
        paused = self.paused
        due_s = self.due_s.reshape(-1, *(1,) * (degree.ndim - 1))
        found = np.zeros(np.broadcast_shapes(degree.shape, due_s.shape), dtype=np.int64)
        for at in paused.tolist():
            larger = int(self.needs.degrees[self.level[at]])
            found += (degree < larger) & (self.start_s[at] < due_s)
        return found


@compiled
def _hold(
    start_s: Floats,
    degree: Index,
    time_s: Floats,
    stall_s: Floats,
    due_s: Floats,
    gap_s: float,
    slot_s: float,
    capacity: int,
) -> bool:
    """Return True if rows end in time and devices suffice.

    Args:
        start_s: Time until each begins. Shape [n].
        degree: Devices; 0 for no row. Shape [n].
        time_s: Time from its begin to its end. Shape [n].
        stall_s: Time that a move takes. Shape [n].
        due_s: Time by which it has to end. Shape [n].
        gap_s: Time for which its devices are then free at least.
        slot_s: Longest delay of a start.
        capacity: Devices.
    """
    jobs = len(start_s)
    end_s = np.zeros(jobs)
    later = np.flatnonzero((degree > 0) & (start_s > 0.0))
    for job in range(jobs):
        if degree[job] == 0:
            continue
        moves = 0
        for other in later:
            if degree[other] > degree[job] and start_s[other] < due_s[job]:
                moves += 1
        end_s[job] = start_s[job] + time_s[job] + moves * stall_s[job]
        if start_s[job] > 0.0:
            end_s[job] += slot_s
        if end_s[job] > due_s[job]:
            return False
    for place in range(-1, len(later)):
        at_s = 0.0 if place < 0 else start_s[later[place]]
        used = 0
        for job in range(jobs):
            if degree[job] > 0 and start_s[job] <= at_s < end_s[job] + gap_s:
                used += degree[job]
        if used > capacity:
            return False
    return True


def make_way(rows: Rows, job: int, level: int, able: Flags, tries: int) -> int:
    """Start a job where others pause for it; do nothing where that breaks a promise.

    Args:
        rows: Rows of all jobs; changed.
        job: The job.
        level: Its level.
        able: Jobs that may pause. Shape [n].
        tries: Most rows that are tried.

    Returns:
        Rows that were tried.
    """
    needs = rows.needs
    short = int(needs.degrees[level]) - rows.free()
    who = np.flatnonzero(able & (rows.now >= 0))
    if not len(who):
        return 0
    every = np.broadcast_to(needs.degrees, needs.restart_s.shape)
    moves_s = rows.moves(every)[who] * needs.stalls[who]
    latest_s = rows.due_s[who][:, None] - EARLY_S / 4 - rows.slot_s - moves_s
    latest_s -= needs.restart_s[who]
    until_s = needs.restart_s[job, level] + 2 * GAP_S
    fits = latest_s >= until_s
    # The lowest level at which a job can wait until this one has ended; else the level
    # at which it can wait longest.
    later = np.where(fits.any(axis=1), fits.argmax(axis=1), latest_s.argmax(axis=1))
    at = np.arange(len(who))
    start_s = latest_s[at, later]
    spare_s = start_s - _SPARE * needs.stalls[who, later]
    start_s = np.where(fits.any(axis=1), np.maximum(spare_s, until_s), start_s)
    degree = needs.degrees[rows.now[who]]
    useful = start_s > 0.0
    tried = 0
    trial = rows.copy()

    def attempt(group: list[int]) -> bool:
        trial.take(rows)
        trial.level[job], trial.start_s[job] = level, 0.0
        for one in group:
            trial.level[who[one]], trial.start_s[who[one]] = later[one], start_s[one]
        return trial.free() >= 0 and trial.hold()

    single = np.flatnonzero(useful & (degree >= short))
    for one in single[np.lexsort((-start_s[single], degree[single]))][:_TRIED].tolist():
        if tried >= tries:
            return tried
        tried += 1
        if attempt([one]):
            rows.take(trial)
            return tried
    several = np.flatnonzero(useful & (degree < short))
    several = several[np.argsort(-start_s[several], kind="stable")]
    enough = np.flatnonzero(np.cumsum(degree[several]) >= short)
    if len(enough) and tried < tries:
        tried += 1
        if attempt(several[: enough[0] + 1].tolist()):
            rows.take(trial)
    return tried
