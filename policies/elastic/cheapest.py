"""A scheduler that lets new jobs wait within their slack and starts cheap ones first.

A job is promised its deadline when it starts, on devices with which it ends in time if
it keeps them to its end. It loses devices only if it still ends in time on those that
are left, the restart included, or if it pauses and a time is kept at which it starts
again (:mod:`policies.elastic.promises`). Other jobs move only if each can afford it. To
follow these plans is therefore always safe: no promise is broken, as long as no device
dies.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.elastic.costs import Change
from envs.elastic.session import Allocation, ElasticSession, Fate
from planner.simulate.compiled import compiled, inner
from policies.elastic.promises import EARLY_S, GAP_S, Needs, Rows, make_way
from policies.elastic.rules import Levels, one_kind

__all__ = ["CheapestFirst", "Chooser", "Order", "fluid_order"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Weight of a level that a running job holds, against one that a restart would bring.
_HELD = 2.0
#: Restarts that a larger degree has to pay for.
_RESTARTS = 2.0
#: Decisions over which the longest stall is looked for; ElasticFlow's overheads are
#: larger at every 60th.
_DECISIONS = range(1, 121)
#: Rows that are tried in a decision to let jobs start where others pause.
_PAUSES = 40
#: Most times that levels are lowered until all jobs can be placed.
_TRIES = 60


class Order(NamedTuple):
    """Choice of a policy about the jobs that wait.

    Attributes:
        first: Jobs that may start now, the first to be tried first; places in
            :class:`Needs`. Shape [k].
        declined: Jobs that are turned away. Shape [n].
        weight: Weight of each job's progress where free devices are shared. Shape [n].
    """

    first: Index
    declined: Flags
    weight: Floats


class Chooser(Protocol):
    """Chooses the waiting jobs that start."""

    def __call__(self, needs: Needs) -> Order:
        """Return the order in which waiting jobs are tried."""


def fluid_order(needs: Needs) -> Order:
    """Try those jobs first that can all be met, and of these the most urgent.

    Device-seconds are taken as a fluid: jobs are added by deadline, and when the
    device-seconds until one are too few, the job with the most is left out (Moore
    1968). Jobs left out are tried last, the cheapest first.
    """
    waiting = np.flatnonzero(needs.undecided & (needs.least < needs.levels))
    running = np.flatnonzero(needs.held >= 0)
    paused = np.flatnonzero(np.isfinite(needs.resume_s))
    starts_s = np.append(np.zeros(len(running)), needs.resume_s[paused])
    ends_s = starts_s + np.append(
        needs.time_s[running, needs.held[running]],
        needs.restart_s[paused, needs.resume[paused]],
    )
    levels = np.append(needs.held[running], needs.resume[paused])
    order = waiting[np.argsort(needs.slack_s[waiting], kind="stable")]
    kept = _moore(
        needs.slack_s[order],
        needs.cost_s[order],
        starts_s,
        ends_s,
        needs.degrees[levels].astype(np.float64),
        float(needs.capacity),
    )
    urgent, rest = order[kept], order[~kept]
    laxity_s = needs.slack_s - needs.time_s.min(axis=1)
    first = np.concatenate(
        [
            urgent[np.argsort(laxity_s[urgent], kind="stable")],
            rest[np.argsort(needs.cost_s[rest], kind="stable")],
        ]
    )
    nobody = np.zeros(len(needs.jobs), dtype=np.bool_)
    return Order(first, nobody, np.ones(len(needs.jobs)))


@compiled
def _moore(
    slack_s: Floats,
    cost_s: Floats,
    starts_s: Floats,
    ends_s: Floats,
    degree: Floats,
    capacity: float,
) -> Flags:
    """Return the jobs that a fluid of device-seconds suffices for.

    Args:
        slack_s: Time until each deadline, ascending. Shape [n].
        cost_s: Device-seconds of each. Shape [n].
        starts_s: Time until each promised job has its devices. Shape [m].
        ends_s: Time until it ends. Shape [m].
        degree: Its devices. Shape [m].
        capacity: Devices.
    """
    kept = np.zeros(len(slack_s), dtype=np.bool_)
    total = 0.0
    for job in range(len(slack_s)):
        supply = capacity * slack_s[job]
        for other in range(len(ends_s)):
            supply -= degree[other] * max(
                0.0, min(ends_s[other], slack_s[job]) - starts_s[other]
            )
        kept[job] = True
        total += cost_s[job]
        while total > supply:
            worst = -1
            for other in range(job + 1):
                if kept[other] and (worst < 0 or cost_s[other] > cost_s[worst]):
                    worst = other
            if worst < 0:
                break
            kept[worst] = False
            total -= cost_s[worst]
    return kept


class CheapestFirst:
    """Start waiting jobs in an order, and share what is free by what it brings.

    Args:
        choose: Order of the waiting jobs; :func:`fluid_order` by default.
    """

    def __init__(self, choose: Chooser = fluid_order) -> None:
        self._choose = choose
        self._levels: Levels | None = None
        self._stalls = np.zeros((0, 0))
        # Time and level at which each paused job is to start again.
        self._resumes: dict[int, tuple[float, int]] = {}

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        capacity = one_kind(session, "cheapest-first")
        if self._levels is None:
            self._levels = Levels(session, capacity, peak=True)
            self._stalls = _longest_stalls(session, capacity)
        needs = self._needs(session, capacity)
        base = _rows(needs, session.config.slot_s)
        if len(base.paused) and not base.hold(before=True):
            # A device has died: what paused starts when it can.
            self._resumes = {}
            needs = self._needs(session, capacity)
            base = _rows(needs, session.config.slot_s)
        order = self._choose(needs)
        rows = _fitted(session, base, _shared(base, order, _can_pause(session)))
        level = rows.now
        self._resumes = {
            int(needs.jobs[at]): (
                session.now_s + float(rows.start_s[at]),
                int(rows.level[at]),
            )
            for at in rows.paused
        }
        promised = needs.undecided & (level >= 0)
        waiting = needs.undecided & ~promised
        # What cannot begin after the next slot is told so now.
        last_s = needs.slack_s - needs.time_s.min(axis=1) - EARLY_S
        declined = waiting & (order.declined | (last_s <= session.config.slot_s))
        waiting &= ~declined
        wake_s = session.now_s + min(
            float(last_s[waiting].min(initial=np.inf)) + EARLY_S,
            float(rows.start_s[rows.paused].min(initial=np.inf)),
        )
        stay = ~declined
        return Allocation(
            jobs=needs.jobs[stay],
            degree=np.where(level >= 0, needs.degrees[level], 0)[stay],
            promised=needs.jobs[promised],
            declined=needs.jobs[declined],
            wake_s=wake_s,
        )

    def _needs(self, session: ElasticSession, capacity: int) -> Needs:
        assert self._levels is not None
        jobs, trace = session.alive, session.config.trace
        model, degree = trace.model[jobs], session.degree[jobs]
        held = np.where(degree > 0, np.searchsorted(session.degrees, degree), -1)
        rates, stalls = self._levels.rates[model], self._stalls[model]
        levels = self._levels.top[model]
        at = np.arange(len(session.degrees))
        with np.errstate(divide="ignore"):
            work_s = session.left[jobs][:, None] / rates
        work_s[at >= levels[:, None]] = np.inf
        # A job that keeps its devices has its present stall to wait for; others may
        # have to wait for both.
        stall_s = session.stall_s[jobs][:, None]
        restart_s = work_s + np.maximum(stalls, stall_s)
        time_s = np.where(at == held[:, None], work_s + stall_s, restart_s)
        slack_s = trace.deadline_s[jobs] - session.now_s
        undecided = session.fate[jobs] == Fate.WAITING
        in_time = time_s <= (slack_s - EARLY_S)[:, None]
        least = np.where(in_time.any(axis=1), in_time.argmax(axis=1), levels)
        cost_s = np.where(in_time, time_s * session.degrees, np.inf)
        found = np.append(cost_s, np.full((len(jobs), 1), np.inf), axis=1)
        resumes = [self._resumes.get(job, (np.inf, 0)) for job in jobs.tolist()]
        return Needs(
            jobs,
            undecided,
            slack_s,
            held,
            levels,
            rates,
            time_s,
            least,
            found[np.arange(len(jobs)), np.minimum(least, len(at))],
            stalls,
            session.degrees,
            capacity,
            restart_s,
            np.array([time_s for time_s, _ in resumes]) - session.now_s,
            np.array([one for _, one in resumes], dtype=np.int64),
        )


def _can_pause(session: ElasticSession) -> bool:
    """Return True if jobs can always be placed, by moves of smaller ones at most.

    So it is where all sizes are powers of two, no device is dead, and no job is slower
    on more hosts than it needs. Jobs that change nothing must cost nothing, either.
    """
    room = session.room
    names = tuple(key.name for key in session.config.source.models)
    ones = np.ones(len(names), dtype=np.int64)
    still = Change(names, ones, np.zeros(len(names), np.bool_), 1, session.room.alive)
    sizes = np.append(session.degrees, room.size)
    return bool(
        (sizes & (sizes - 1) == 0).all()
        and (room.size == room.size[0]).all()
        and not room.down.any()
        and not (session.rates[..., 1] > 0.0).any()
        and not session.config.cost.stall_s(still).any()
    )


def _rows(needs: Needs, slot_s: float) -> Rows:
    """Return the rows of promised jobs if nothing changes but what is due now."""
    due = needs.resume_s <= 0.0
    paused = np.isfinite(needs.resume_s)
    level = np.where(paused, needs.resume, needs.held)
    late = (needs.held >= 0) & (
        needs.time_s[np.arange(len(level)), needs.held] > needs.slack_s - EARLY_S / 4
    )
    return Rows(
        needs,
        level,
        np.where(paused & ~due, needs.resume_s, 0.0),
        np.where(late, np.inf, needs.slack_s - EARLY_S / 2),
        slot_s,
    )


def _shared(base: Rows, order: Order, pausing: bool) -> Rows:
    """Return rows with the level of each job now, as if all devices were on one host.

    A running job keeps at least the level with which it ends in time; one that cannot,
    the level that it has. Jobs that lost their devices come first, then the waiting
    ones in their order, those that are late already last; what is left is shared.

    Args:
        pausing: Whether jobs may pause to let others start.
    """
    needs, rows = base.needs, base.copy()
    hopeless = needs.least >= needs.levels
    running = needs.held >= 0
    low = np.where(running & ~hopeless, np.minimum(needs.least, needs.held), needs.held)
    rows.level = np.where(running, _lowered(rows, low), rows.level)
    free = rows.free()
    lost = ~needs.undecided & (rows.level < 0)
    first = order.first[~hopeless[order.first] & ~order.declined[order.first]]
    tried = (np.flatnonzero(lost & ~hopeless), first, np.flatnonzero(lost & hopeless))
    able = running & ~hopeless & (needs.restart_s.min(axis=1) < rows.due_s)
    tries = _PAUSES if pausing else 0
    for at in np.concatenate(tried).tolist():
        level = 0 if hopeless[at] else int(needs.least[at])
        more = int(needs.degrees[level])
        if more <= free:
            rows.level[at] = level
            if not len(rows.paused) or rows.hold():
                free -= more
                continue
            rows.level[at] = -1
        if tries > 0 and not hopeless[at]:
            tries -= make_way(rows, at, level, able, tries)
            free = rows.free()
    _resume(rows)
    return _raised(rows, order.weight)


def _lowered(rows: Rows, low: Index) -> Index:
    """Return the lowest levels at which no job runs on when a paused one starts."""
    needs, level = rows.needs, rows.level.copy()
    starts_s = rows.start_s[rows.paused]
    if not len(starts_s):
        return low
    for job in np.flatnonzero((needs.held >= 0) & (low < needs.held)).tolist():
        kept_s = needs.time_s[job, needs.held[job]]
        for one in range(int(low[job]), int(needs.held[job])):
            longer_s = needs.time_s[job, one] + len(starts_s) * needs.stalls[job, one]
            if longer_s > rows.due_s[job]:
                continue
            if not ((starts_s >= kept_s) & (starts_s < longer_s + GAP_S)).any():
                level[job] = one
                break
    return level


def _resume(rows: Rows) -> None:
    """Start paused jobs before their time, where devices are free."""
    needs = rows.needs
    paused = rows.paused
    for at in paused[np.argsort(rows.start_s[paused], kind="stable")].tolist():
        if needs.held[at] >= 0:
            continue
        then = (int(rows.level[at]), float(rows.start_s[at]))
        for level in range(int(needs.least[at]), int(needs.levels[at])):
            if needs.degrees[level] > rows.free():
                break
            rows.level[at], rows.start_s[at] = level, 0.0
            if rows.hold():
                break
            rows.level[at], rows.start_s[at] = then


def _raised(rows: Rows, weight: Floats) -> Rows:
    """Return rows in which the free devices are shared by what they bring."""
    needs = rows.needs
    starts_s, free_then = rows.free_later()
    moves = rows.moves(np.broadcast_to(needs.degrees, needs.time_s.shape))
    found = rows.copy()
    level = _raise_levels(
        rows.now,
        needs.held,
        needs.levels,
        needs.rates,
        needs.time_s + moves * needs.stalls + GAP_S,
        rows.due_s - EARLY_S / 2,
        needs.stalls,
        needs.degrees,
        weight,
        rows.free(),
        starts_s,
        free_then,
    )
    found.level = np.where(rows.start_s > 0.0, rows.level, level)
    return found if not len(starts_s) or found.hold() else rows


def _longest_stalls(session: ElasticSession, capacity: int) -> Floats:
    """Longest stall of each model after a change to each degree.

    Shape [models, degrees].
    """
    names = [key.name for key in session.config.source.models]
    count = len(session.degrees)
    each = tuple(name for name in names for _ in range(count))
    degree = np.tile(session.degrees, len(names))
    changed = np.ones(len(degree), dtype=np.bool_)
    found = np.zeros(len(degree))
    for decision in _DECISIONS:
        change = Change(each, degree, changed, decision, capacity)
        found = np.maximum(found, session.config.cost.stall_s(change))
    return found.reshape(len(names), count)


@inner
def _raised_later(
    starts_s: Floats,
    free_then: Index,
    ends_s: tuple[float, float],
    degree: tuple[int, int],
) -> bool:
    """Raise a job's devices where that leaves enough for the jobs that start later.

    Args:
        starts_s: Times at which these start. Shape [k].
        free_then: Devices that are free then; changed. Shape [k].
        ends_s: End of the job before and after.
        degree: Its devices before and after.
    """
    for sign in (0, 1):
        for then in range(len(starts_s)):
            more = 0
            if starts_s[then] < ends_s[1]:
                more += degree[1]
            if starts_s[then] < ends_s[0]:
                more -= degree[0]
            if sign == 0 and more > free_then[then]:
                return False
            free_then[then] -= sign * more
    return True


@compiled
def _raise_levels(
    low: Index,
    held: Index,
    levels: Index,
    rates: Floats,
    time_s: Floats,
    limit_s: Floats,
    stalls: Floats,
    degrees: Index,
    weight: Floats,
    free: int,
    starts_s: Floats,
    free_then: Index,
) -> Index:
    """Raise the levels of running jobs, the most progress a device first.

    Args:
        low: Levels that are decided; -1 for a job that does not run. Shape [n].
        limit_s: Time by which a job has to end. Shape [n].
        free: Devices that are free.
        starts_s: Times at which paused jobs start. Shape [k].
        free_then: Devices that are free then; changed. Shape [k].
    Returns:
        The levels. Shape [n].
    """
    jobs = len(low)
    level, gains = low.copy(), np.zeros(jobs)
    best = np.zeros(jobs)
    for job in range(jobs):
        for at in range(levels[job]):
            best[job] = max(best[job], rates[job, at] / degrees[at])
    fresh = np.ones(jobs, dtype=np.bool_)
    while free > 0:
        chosen = -1
        for job in range(jobs):
            at = level[job] + 1
            if fresh[job]:
                fresh[job] = False
                gains[job] = 0.0
                able = level[job] >= 0 and at < levels[job]
                # A restart can cost more than the further devices bring.
                if able and time_s[job, at] <= limit_s[job]:
                    more = degrees[at] - degrees[level[job]]
                    gain = (rates[job, at] - rates[job, level[job]]) / more / best[job]
                    if at <= held[job]:
                        gain *= _HELD
                    elif held[job] >= 0:
                        gain *= time_s[job, at] / (
                            time_s[job, at] + _RESTARTS * stalls[job, at]
                        )
                    gains[job] = gain * weight[job]
            if gains[job] > 0.0 and (chosen < 0 or gains[job] > gains[chosen]):
                chosen = job
        if chosen < 0:
            break
        at = level[chosen]
        more = degrees[at + 1] - degrees[at]
        ends_s = (time_s[chosen, at], time_s[chosen, at + 1])
        held_then = (degrees[at], degrees[at + 1])
        if more > free or not _raised_later(starts_s, free_then, ends_s, held_then):
            gains[chosen] = 0.0
            continue
        free -= more
        level[chosen] += 1
        fresh[chosen] = True
    return level


def _fitted(session: ElasticSession, base: Rows, rows: Rows) -> Rows:
    """Lower levels until all changes can be placed.

    Other jobs move only if each of them can afford it.

    Args:
        base: Rows if nothing changes.
        rows: Rows that are wanted.
    """
    if _placed(session, rows):
        return rows
    needs, room, rows = base.needs, session.room, rows.copy()
    for _ in range(_TRIES):
        level = rows.now
        changed = np.flatnonzero(level != needs.held)
        grown = changed[level[changed] >= 0]
        free = room.free.copy()
        for job in needs.jobs[changed].tolist():
            for host, devices in room.held.get(job, ()):
                free[host] += devices
        bad = _unplaced(free, room.size, needs, level, grown)
        if bad < 0:
            return rows if not len(rows.paused) or rows.hold() else base
        if level[bad] > max(needs.least[bad], needs.held[bad], 0):
            rows.level[bad] -= 1
            continue
        if needs.held[bad] < 0 and _placed(session, rows):
            return rows
        rows.level[bad], rows.start_s[bad] = base.level[bad], base.start_s[bad]
    # To change nothing is always possible.
    return base


def _placed(session: ElasticSession, rows: Rows) -> bool:
    """Return True if all can be placed, and jobs that move then end in time.

    Where a job is slower on more hosts than it needs, none may move.
    """
    needs, level = rows.needs, rows.now
    room = session.room.copy()
    changed = np.flatnonzero(level != needs.held)
    for job in needs.jobs[changed].tolist():
        room.release(job)
    moved, unplaced = room.place(
        [
            (int(needs.jobs[at]), 0, int(needs.degrees[level[at]]))
            for at in changed.tolist()
            if level[at] >= 0
        ]
    )
    if unplaced or (moved and (session.rates[..., 1] > 0.0).any()):
        return False
    if not moved and not len(rows.paused):
        return True
    return rows.hold(np.isin(needs.jobs, list(moved)))


def _unplaced(
    free: Index, sizes: Index, needs: Needs, level: Index, jobs: Index
) -> int:
    """Place jobs, the largest first; return the first without room, or -1."""
    size = int(sizes.max())
    for at in jobs[np.argsort(-level[jobs], kind="stable")].tolist():
        if not _place(free, size, int(needs.degrees[level[at]])):
            return int(at)
    return -1


def _place(free: Index, size: int, devices: int) -> bool:
    """Take devices of the fewest hosts, as a session does; False without room."""
    whole, rest = divmod(devices, size)
    full = np.flatnonzero(free == size)[:whole]
    if len(full) < whole:
        return False
    free[full] = 0
    if rest:
        able = np.where(free >= rest, free, size + 1)
        best = int(able.argmin())
        if able[best] > size:
            free[full] = size
            return False
        free[best] -= rest
    return True
