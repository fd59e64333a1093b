"""A scheduler that lets new jobs wait within their slack and starts cheap ones first.

A job is promised its deadline when it starts, on devices with which it ends in time if
it keeps them to its end. It loses devices only if it still ends in time on those that
are left, the restart included, and nothing is placed where other jobs would have to
move. To change nothing is therefore always safe: no promise is broken, as long as no
device dies.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from envs.elastic.costs import Change
from envs.elastic.session import Allocation, ElasticSession, Fate
from planner.simulate.compiled import compiled
from policies.elastic.rules import Levels, one_kind

__all__ = ["CheapestFirst", "Chooser", "Needs", "Order", "fluid_order"]

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
#: Seconds by which a promised job ends early, for rounding.
_EARLY_S = 1e-3
#: Most times that levels are lowered until all jobs can be placed.
_TRIES = 60


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
    running = needs.held >= 0
    ends_s = needs.time_s[running, needs.held[running]]
    order = waiting[np.argsort(needs.slack_s[waiting], kind="stable")]
    kept = _moore(
        needs.slack_s[order],
        needs.cost_s[order],
        ends_s,
        needs.degrees[needs.held[running]].astype(np.float64),
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
    slack_s: Floats, cost_s: Floats, ends_s: Floats, degree: Floats, capacity: float
) -> Flags:
    """Return the jobs that a fluid of device-seconds suffices for.

    Args:
        slack_s: Time until each deadline, ascending. Shape [n].
        cost_s: Device-seconds of each. Shape [n].
        ends_s: Time until each running job ends. Shape [m].
        degree: Its devices. Shape [m].
        capacity: Devices.
    """
    kept = np.zeros(len(slack_s), dtype=np.bool_)
    total = 0.0
    for job in range(len(slack_s)):
        supply = capacity * slack_s[job]
        for other in range(len(ends_s)):
            supply -= degree[other] * min(ends_s[other], slack_s[job])
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

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        capacity = one_kind(session, "cheapest-first")
        if self._levels is None:
            self._levels = Levels(session, capacity, peak=True)
            self._stalls = _longest_stalls(session, capacity)
        needs = self._needs(session, capacity)
        order = self._choose(needs)
        level = _fitted(session, needs, _shared(needs, order))
        promised = needs.undecided & (level >= 0)
        waiting = needs.undecided & ~promised
        # What cannot begin after the next slot is told so now.
        last_s = needs.slack_s - needs.time_s.min(axis=1) - _EARLY_S
        declined = waiting & (order.declined | (last_s <= session.config.slot_s))
        waiting &= ~declined
        wake_s = np.inf
        if waiting.any():
            wake_s = session.now_s + float(last_s[waiting].min()) + _EARLY_S
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
            time_s = session.left[jobs][:, None] / rates
        # A job that keeps its devices has its present stall to wait for; others may
        # have to wait for both.
        time_s += np.where(
            at == held[:, None],
            session.stall_s[jobs][:, None],
            np.maximum(stalls, session.stall_s[jobs][:, None]),
        )
        time_s[at >= levels[:, None]] = np.inf
        slack_s = trace.deadline_s[jobs] - session.now_s
        undecided = session.fate[jobs] == Fate.WAITING
        in_time = time_s <= (slack_s - _EARLY_S)[:, None]
        least = np.where(in_time.any(axis=1), in_time.argmax(axis=1), levels)
        cost_s = np.where(in_time, time_s * session.degrees, np.inf)
        found = np.append(cost_s, np.full((len(jobs), 1), np.inf), axis=1)
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
        )


def _shared(needs: Needs, order: Order) -> Index:
    """Return the level of each job now, as if all devices were on one host.

    A running job keeps at least the level with which it ends in time; one that cannot,
    the level that it has. Jobs that lost their devices come first, then the waiting
    ones in their order, those that are late already last; what is left is shared.
    """
    running = needs.held >= 0
    low = np.where(running, np.minimum(needs.least, needs.held), -1)
    hopeless = needs.least >= needs.levels
    low = np.where(running & hopeless, needs.held, low)
    degree = np.where(low >= 0, needs.degrees[low], 0)
    free = needs.capacity - int(degree.sum())
    lost = ~needs.undecided & ~running
    first = order.first[~hopeless[order.first] & ~order.declined[order.first]]
    tried = (np.flatnonzero(lost & ~hopeless), first, np.flatnonzero(lost & hopeless))
    for at in np.concatenate(tried).tolist():
        level = 0 if hopeless[at] else int(needs.least[at])
        if needs.degrees[level] <= free:
            free -= int(needs.degrees[level])
            low[at] = level
    raised: Index = _raise_levels(
        low,
        needs.held,
        needs.levels,
        needs.rates,
        needs.time_s,
        np.where(hopeless, np.inf, needs.slack_s - _EARLY_S),
        needs.stalls,
        needs.degrees,
        order.weight,
        free,
    )
    return raised


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
) -> Index:
    """Raise the levels of running jobs, the most progress a device first.

    Args:
        low: Levels that are decided; -1 for a job that does not run. Shape [n].
        limit_s: Time by which a job has to end. Shape [n].
        free: Devices that are free.
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
        more = degrees[level[chosen] + 1] - degrees[level[chosen]]
        if more > free:
            gains[chosen] = 0.0
            continue
        free -= more
        level[chosen] += 1
        fresh[chosen] = True
    return level


def _fitted(session: ElasticSession, needs: Needs, level: Index) -> Index:
    """Lower levels until all changes can be placed.

    Other jobs move only to let a job start, and only if each of them can afford it.

    Args:
        level: Levels that are wanted. Shape [n].
    """
    room, level = session.room, level.copy()
    movable = _can_move(session, needs)
    for _ in range(_TRIES):
        changed = np.flatnonzero(level != needs.held)
        grown = changed[level[changed] >= 0]
        free = room.free.copy()
        for job in needs.jobs[changed].tolist():
            for host, devices in room.held.get(job, ()):
                free[host] += devices
        bad = _unplaced(free, room.size, needs, level, grown)
        if bad < 0:
            return level
        if level[bad] > max(needs.least[bad], needs.held[bad], 0):
            level[bad] -= 1
            continue
        if movable and needs.held[bad] < 0:
            empty, running = room.size - room.down, np.flatnonzero(level >= 0)
            if _unplaced(empty, room.size, needs, level, running) < 0:
                return level
        level[bad] = needs.held[bad]
    # To change nothing is always possible.
    return needs.held.copy()


def _can_move(session: ElasticSession, needs: Needs) -> bool:
    """Return True if all running jobs that are not late can be moved and end in time.

    Where a job is slower on more hosts than it needs, none is moved.
    """
    if (session.rates[..., 1] > 0.0).any():
        return False
    running = np.flatnonzero((needs.held >= 0) & (needs.slack_s > 0.0))
    at, jobs = needs.held[running], needs.jobs[running]
    stall_s = np.maximum(session.stall_s[jobs], needs.stalls[running, at])
    moved_s = stall_s + session.left[jobs] / needs.rates[running, at]
    return bool((moved_s <= needs.slack_s[running] - _EARLY_S).all())


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
