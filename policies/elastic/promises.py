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

    An option is a device type and a number of devices of it; those of a type stand
    together, ascending.

    Attributes:
        jobs: Their numbers. Shape [n].
        undecided: Whether a job is neither promised nor declined. Shape [n].
        slack_s: Time until the deadline. Shape [n].
        held: Option that it holds; -1 for none. Shape [n].
        tops: Option after the last that it can use of each type. Shape [n, kinds].
        rates: Iterations per second of each option. Shape [n, options].
        time_s: Time to its end with each option from now on, with the restart that the
            option asks for; infinity where it cannot run. Shape [n, options].
        least: Lowest option of each type with which it ends in time if it begins now
            and keeps it; -1 if none. Shape [n, kinds].
        ranked: The same, the one of fewest device-seconds first. Shape [n, kinds].
        cost_s: Device-seconds of that one, weighted by the worth of its type; infinity
            if there is none. Shape [n].
        stalls: Seconds that a change to each option takes. Shape [n, options].
        degrees: Devices of each option. Shape [options].
        kinds: Device type of each option. Shape [options].
        capacity: Devices of each type. Shape [kinds].
        worth: Worth of a device of each type; 1 in the mean over devices.
            Shape [kinds].
        restart_s: Time to its end with each option from a restart on.
            Shape [n, options].
        resume_s: Time until a paused job is to start again; infinity for other jobs.
            Shape [n].
        resume: Option with which it then starts. Shape [n].
    """

    jobs: Index
    undecided: Flags
    slack_s: Floats
    held: Index
    tops: Index
    rates: Floats
    time_s: Floats
    least: Index
    ranked: Index
    cost_s: Floats
    stalls: Floats
    degrees: Index
    kinds: Index
    capacity: Index
    worth: Floats
    restart_s: Floats
    resume_s: Floats
    resume: Index

    @property
    def able(self) -> Flags:
        """Flags of jobs that end in time if they begin now. Shape [n]."""
        return self.ranked[:, 0] >= 0

    @property
    def size(self) -> Floats:
        """Worth of the devices of each option. Shape [options]."""
        return self.degrees * self.worth[self.kinds]

    @property
    def supply(self) -> float:
        """Worth of all devices."""
        return float(self.worth @ self.capacity)

    def options_of(self, job: int) -> list[int]:
        """Options with which a job ends in time if it begins now, by type.

        Types are in the order of ``ranked``; on each, fewer devices come first.
        """
        return [
            option
            for least in self.ranked[job].tolist()
            if least >= 0
            for option in range(least, self.tops[job, self.kinds[least]])
        ]

    def any_of(self, job: int) -> Index:
        """Lowest option of each type on which a job runs at all."""
        runs = np.flatnonzero(self.rates[job] > 0.0)
        return runs[np.unique(self.kinds[runs], return_index=True)[1]]

    def used(self, options: Index) -> Index:
        """Devices of each type that options take; -1 is none. Shape [kinds]."""
        found = np.zeros(len(self.capacity), dtype=np.int64)
        taken = options[options >= 0]
        np.add.at(found, self.kinds[taken], self.degrees[taken])
        return found


@dataclass(slots=True)
class Rows:
    """Rows of jobs.

    Attributes:
        needs: The jobs.
        level: Option of each; -1 for a job without devices. Shape [n].
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
        """Option that each job has now; -1 for none. Shape [n]."""
        return np.where(self.start_s > 0.0, -1, self.level)

    @property
    def paused(self) -> Index:
        """Jobs that start later. Shape [k]."""
        return np.flatnonzero((self.level >= 0) & (self.start_s > 0.0))

    def free(self) -> Index:
        """Devices of each type that are free now. Shape [kinds]."""
        return self.needs.capacity - self.needs.used(self.now)

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
            self.needs.kinds[self.level],
            self.due_s + (EARLY_S / 4 if before else 0.0),
            0.0 if before else GAP_S,
            self.slot_s,
            self.needs.capacity,
        )
        return found

    def free_later(self) -> tuple[Floats, Index]:
        """Times at which paused jobs start, and devices of each type free then."""
        degree, time_s, stall_s = self._parts()
        starts = np.unique(self.start_s[self.paused])
        moves = self.moves(np.maximum(self.level, 0))
        end_s = self.start_s + time_s + moves * stall_s
        end_s += np.where(self.start_s > 0.0, self.slot_s, 0.0)
        there = (self.start_s <= starts[:, None]) & (starts[:, None] < end_s + GAP_S)
        kinds = np.arange(len(self.needs.capacity))
        of_type = self.needs.kinds[self.level][:, None] == kinds
        return starts, self.needs.capacity - there @ (degree[:, None] * of_type)

    def moves(self, options: Index) -> Index:
        """Larger jobs that start later, and may move a job. Shape of ``options``.

        Args:
            options: Option of each job. Shape [n] or [n, options].
        """
        needs = self.needs
        due_s = self.due_s.reshape(-1, *(1,) * (options.ndim - 1))
        found = np.zeros(np.broadcast_shapes(options.shape, due_s.shape), np.int64)
        degree, of_type = needs.degrees[options], needs.kinds[options]
        for at in self.paused.tolist():
            larger = degree < needs.degrees[self.level[at]]
            larger &= of_type == needs.kinds[self.level[at]]
            found += larger & (self.start_s[at] < due_s)
        return found


@compiled
def _hold(
    start_s: Floats,
    degree: Index,
    time_s: Floats,
    stall_s: Floats,
    kinds: Index,
    due_s: Floats,
    gap_s: float,
    slot_s: float,
    capacity: Index,
) -> bool:
    """Return True if rows end in time and devices suffice.

    Args:
        start_s: Time until each begins. Shape [n].
        degree: Devices; 0 for no row. Shape [n].
        time_s: Time from its begin to its end. Shape [n].
        stall_s: Time that a move takes. Shape [n].
        kinds: Type of the devices. Shape [n].
        due_s: Time by which it has to end. Shape [n].
        gap_s: Time for which its devices are then free at least.
        slot_s: Longest delay of a start.
        capacity: Devices of each type. Shape [kinds].
    """
    jobs = len(start_s)
    end_s = np.zeros(jobs)
    later = np.flatnonzero((degree > 0) & (start_s > 0.0))
    for job in range(jobs):
        if degree[job] == 0:
            continue
        moves = 0
        for other in later:
            larger = degree[other] > degree[job] and kinds[other] == kinds[job]
            if larger and start_s[other] < due_s[job]:
                moves += 1
        end_s[job] = start_s[job] + time_s[job] + moves * stall_s[job]
        if start_s[job] > 0.0:
            end_s[job] += slot_s
        if end_s[job] > due_s[job]:
            return False
    for place in range(-1, len(later)):
        at_s = 0.0 if place < 0 else start_s[later[place]]
        free = capacity.copy()
        for job in range(jobs):
            if degree[job] > 0 and start_s[job] <= at_s < end_s[job] + gap_s:
                free[kinds[job]] -= degree[job]
        if free.min() < 0:
            return False
    return True


def make_way(rows: Rows, job: int, option: int, able: Flags, tries: int) -> int:
    """Start a job where others make way; do nothing where that breaks a promise.

    One of them goes to devices of another type, or some of them pause.

    Args:
        rows: Rows of all jobs; changed.
        job: The job.
        option: Its devices.
        able: Jobs that may pause. Shape [n].
        tries: Most rows that are tried.

    Returns:
        Rows that were tried.
    """
    needs, kind = rows.needs, rows.needs.kinds[option]
    free, now = rows.free(), rows.now
    short = int(needs.degrees[option] - free[kind])
    who = np.flatnonzero(able & (now >= 0) & (needs.kinds[now] == kind))
    if not len(who):
        return 0
    later, start_s = _latest(rows, who, needs.restart_s[job, option] + 2 * GAP_S)
    degree = needs.degrees[now[who]]
    tried = 0
    trial = rows.copy()

    def attempt(changed: list[tuple[int, int, float]]) -> bool:
        trial.take(rows)
        trial.level[job], trial.start_s[job] = option, 0.0
        for one, to, at_s in changed:
            trial.level[one], trial.start_s[one] = to, at_s
        return bool((trial.free() >= 0).all()) and trial.hold()

    single = np.flatnonzero((start_s > 0.0) & (degree >= short))
    single = single[np.lexsort((-start_s[single], degree[single]))][:_TRIED]
    ways = _elsewhere(rows, who[degree >= short], free, kind)
    pauses = [(int(who[one]), int(later[one]), float(start_s[one])) for one in single]
    for way in [*ways, *pauses]:
        if tried >= tries:
            return tried
        tried += 1
        if attempt([way]):
            rows.take(trial)
            return tried
    several = np.flatnonzero((start_s > 0.0) & (degree < short))
    several = several[np.argsort(-start_s[several], kind="stable")]
    enough = np.flatnonzero(np.cumsum(degree[several]) >= short)
    if len(enough) and tried < tries:
        tried += 1
        group = several[: enough[0] + 1]
        if attempt(
            [(int(who[one]), int(later[one]), float(start_s[one])) for one in group]
        ):
            rows.take(trial)
    return tried


def _latest(rows: Rows, who: Index, until_s: float) -> tuple[Index, Floats]:
    """Options with which jobs of one type can start again, and the latest times.

    Args:
        rows: Rows of all jobs.
        who: The jobs that pause. Shape [k].
        until_s: Time until which each has to pause, if it can.

    Returns:
        The lowest option with which a job can wait so long, else that with which it can
        wait longest, and the time; 0 or less if it cannot pause. Shape [k] each.
    """
    needs = rows.needs
    own = np.flatnonzero(needs.kinds == needs.kinds[rows.level[who[0]]])
    moves = rows.moves(np.broadcast_to(own, (len(needs.jobs), len(own))))
    mine = np.ix_(who, own)
    moves_s = moves[who] * needs.stalls[mine]
    latest_s = rows.due_s[who][:, None] - EARLY_S / 4 - rows.slot_s - moves_s
    latest_s -= needs.restart_s[mine]
    fits = latest_s >= until_s
    later = np.where(fits.any(axis=1), fits.argmax(axis=1), latest_s.argmax(axis=1))
    start_s = latest_s[np.arange(len(who)), later]
    spare_s = start_s - _SPARE * needs.stalls[who, own[later]]
    start_s = np.where(fits.any(axis=1), np.maximum(spare_s, until_s), start_s)
    return own[later], start_s


def _elsewhere(
    rows: Rows, who: Index, free: Index, kind: int
) -> list[tuple[int, int, float]]:
    """Jobs that can go on in time on free devices of another type.

    Returns:
        The jobs, their options there and 0, the smallest jobs first.
    """
    needs, found = rows.needs, []
    for job in who[np.argsort(needs.degrees[rows.level[who]], kind="stable")].tolist():
        for option in needs.ranked[job].tolist():
            on = needs.kinds[option]
            if option >= 0 and on != kind and needs.degrees[option] <= free[on]:
                found.append((job, option, 0.0))
                break
    return found[:_TRIED]
