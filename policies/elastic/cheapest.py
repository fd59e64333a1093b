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
from planner.simulate.compiled import compiled
from policies.elastic.fitting import can_pause, fitted
from policies.elastic.growth import raised
from policies.elastic.promises import EARLY_S, GAP_S, Needs, Rows, make_way
from policies.elastic.rules import Levels

__all__ = ["CheapestFirst", "Chooser", "Order", "fluid_order"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Decisions over which the longest stall is looked for; ElasticFlow's overheads are
#: larger at every 60th.
_DECISIONS = range(1, 121)
#: Rows that are tried in a decision to let jobs start where others pause.
_PAUSES = 40


class Order(NamedTuple):
    """Choice of a policy about the jobs that wait.

    Attributes:
        first: Jobs that may start now, the first to be tried first; places in
            :class:`Needs`. Shape [k].
        declined: Jobs that are turned away. Shape [n].
        weight: Weight of each job's progress where free devices of one type are
            shared. Shape [n].
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
    waiting = np.flatnonzero(needs.undecided & needs.able)
    running = np.flatnonzero(needs.held >= 0)
    paused = np.flatnonzero(np.isfinite(needs.resume_s))
    starts_s = np.append(np.zeros(len(running)), needs.resume_s[paused])
    ends_s = starts_s + np.append(
        needs.time_s[running, needs.held[running]],
        needs.restart_s[paused, needs.resume[paused]],
    )
    options = np.append(needs.held[running], needs.resume[paused])
    order = waiting[np.argsort(needs.slack_s[waiting], kind="stable")]
    kept = _moore(
        needs.slack_s[order],
        needs.cost_s[order],
        starts_s,
        ends_s,
        needs.size[options],
        needs.supply,
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
        self._options: _Options | None = None
        # Time and option at which each paused job is to start again.
        self._resumes: dict[int, tuple[float, int]] = {}

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""
        needs = self._needs(session)
        base = _rows(needs, session.config.slot_s)
        if len(base.paused) and not base.hold(before=True):
            # A device has died: what paused starts when it can.
            self._resumes = {}
            needs = self._needs(session)
            base = _rows(needs, session.config.slot_s)
        order = self._choose(needs)
        rows = fitted(session, base, _shared(base, order, can_pause(session)))
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
            kind=np.where(level >= 0, needs.kinds[level], 0)[stay],
            promised=needs.jobs[promised],
            declined=needs.jobs[declined],
            wake_s=wake_s,
        )

    def _needs(self, session: ElasticSession) -> Needs:
        if self._options is None:
            self._options = _options(session)
        has, trace, jobs = self._options, session.config.trace, session.alive
        model, degree = trace.model[jobs], session.degree[jobs]
        at = session.kind[jobs] * len(session.degrees)
        at += np.searchsorted(session.degrees, degree)
        held = np.where(degree > 0, at, -1)
        rates, stalls = has.rates[model], has.stalls[model]
        with np.errstate(divide="ignore"):
            work_s = session.left[jobs][:, None] / rates
        # A job that keeps its devices has its present stall to wait for; others may
        # have to wait for both.
        stall_s = session.stall_s[jobs][:, None]
        restart_s = work_s + np.maximum(stalls, stall_s)
        kept = np.arange(len(has.degrees)) == held[:, None]
        time_s = np.where(kept, work_s + stall_s, restart_s)
        slack_s = trace.deadline_s[jobs] - session.now_s
        least, cost_s = _least(time_s, slack_s - EARLY_S, has.degrees, has.kinds)
        capacity = session.capacity
        worth = _worth(cost_s, capacity)
        cost_s = cost_s * worth
        order = np.argsort(cost_s, axis=1, kind="stable")
        resumes = [self._resumes.get(job, (np.inf, 0)) for job in jobs.tolist()]
        return Needs(
            jobs,
            session.fate[jobs] == Fate.WAITING,
            slack_s,
            held,
            has.tops[model],
            rates,
            time_s,
            least,
            np.take_along_axis(least, order, axis=1),
            cost_s.min(axis=1),
            stalls,
            has.degrees,
            has.kinds,
            capacity,
            worth,
            restart_s,
            np.array([time_s for time_s, _ in resumes]) - session.now_s,
            np.array([one for _, one in resumes], dtype=np.int64),
        )


class _Options(NamedTuple):
    """Options of a session's models, as of :class:`Needs`.

    Attributes:
        rates: Iterations per second; 0 beyond what a model can use.
            Shape [models, options].
        tops: Option after the last of each type. Shape [models, kinds].
        stalls: Longest stall after a change. Shape [models, options].
        degrees: Devices. Shape [options].
        kinds: Device types. Shape [options].
    """

    rates: Floats
    tops: Index
    stalls: Floats
    degrees: Index
    kinds: Index


def _options(session: ElasticSession) -> _Options:
    """Return the options of a session's models."""
    capacity, count = session.capacity, len(session.degrees)
    levels = [
        Levels(session, int(devices), peak=True, kind=kind)
        for kind, devices in enumerate(capacity)
    ]
    usable = [
        np.where(np.arange(count) < one.top[:, None], one.rates, 0.0) for one in levels
    ]
    first = count * np.arange(len(capacity))
    stalls = _longest_stalls(session, int(capacity.sum()))
    return _Options(
        np.concatenate(usable, axis=1),
        first + np.stack([one.top for one in levels], axis=1),
        np.tile(stalls, len(capacity)),
        np.tile(session.degrees, len(capacity)),
        np.repeat(np.arange(len(capacity)), count),
    )


def _least(
    time_s: Floats, due_s: Floats, degrees: Index, kinds: Index
) -> tuple[Index, Floats]:
    """Lowest option of each type with which each job ends in time; -1 if none.

    Returns:
        The options, and their device-seconds, infinity if there is none.
        Shape [n, kinds] each.
    """
    count = int(kinds[-1]) + 1
    in_time = (time_s <= due_s[:, None]).reshape(
        len(time_s), count, len(kinds) // count
    )
    first = in_time.argmax(axis=2) + np.searchsorted(kinds, np.arange(count))
    cost_s = np.take_along_axis(time_s * degrees, first, axis=1)
    some = in_time.any(axis=2)
    return np.where(some, first, -1), np.where(some, cost_s, np.inf)


def _worth(cost_s: Floats, capacity: Index) -> Floats:
    """Worth of a device of each type; 1 in the mean over devices. Shape [kinds].

    Args:
        cost_s: Device-seconds of each job on each type. Shape [n, kinds].
        capacity: Devices of each type. Shape [kinds].
    """
    worth, ends = np.ones(len(capacity)), np.isfinite(cost_s)
    # Costs are compared with those on the type that most jobs can use.
    most = int(ends.sum(axis=0).argmax())
    for kind in range(len(capacity)):
        both = ends[:, kind] & ends[:, most]
        if kind != most and both.any():
            ratio = np.log(cost_s[both, most] / cost_s[both, kind])
            worth[kind] = np.exp(np.median(ratio))
    return worth * (int(capacity.sum()) / (worth @ capacity))


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
    """Return rows with the option of each job now, as if each type were on one host.

    A running job keeps at least the devices with which it ends in time; one that
    cannot, those that it has. Jobs that lost their devices come first, then the waiting
    ones in their order, those that are late already last; what is left is shared.

    Args:
        pausing: Whether jobs may pause to let others start.
    """
    needs, rows = base.needs, base.copy()
    hopeless = ~needs.able
    running = needs.held >= 0
    own = needs.least[np.arange(len(needs.jobs)), needs.kinds[needs.held]]
    low = np.where(running & (own >= 0), np.minimum(own, needs.held), needs.held)
    rows.level = np.where(running, _lowered(rows, low), rows.level)
    lost = ~needs.undecided & (rows.level < 0)
    first = order.first[~hopeless[order.first] & ~order.declined[order.first]]
    tried = (np.flatnonzero(lost & ~hopeless), first, np.flatnonzero(lost & hopeless))
    able = running & (needs.restart_s.min(axis=1) < rows.due_s)
    able &= ~hopeless
    tries, free = _PAUSES if pausing else 0, rows.free()
    for at in np.concatenate(tried).tolist():
        options = needs.any_of(at) if hopeless[at] else needs.ranked[at]
        options = options[options >= 0]
        if _begun(rows, at, options, free) or hopeless[at]:
            continue
        for option in options.tolist():
            if tries > 0 and rows.level[at] < 0:
                tries -= make_way(rows, at, option, able, tries)
                free = rows.free()
    _resume(rows)
    return raised(rows, order.weight)


def _begun(rows: Rows, at: int, options: Index, free: Index) -> bool:
    """Start a job with the first option that is free; return False if none is.

    Args:
        free: Devices of each type that are free; changed. Shape [kinds].
    """
    needs = rows.needs
    for option in options.tolist():
        more, kind = needs.degrees[option], needs.kinds[option]
        if more <= free[kind]:
            rows.level[at] = option
            if not len(rows.paused) or rows.hold():
                free[kind] -= more
                return True
            rows.level[at] = -1
    return False


def _lowered(rows: Rows, low: Index) -> Index:
    """Return the lowest options with which no job runs on when a paused one starts."""
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
        free = rows.free()
        for option in needs.options_of(at):
            if needs.degrees[option] > free[needs.kinds[option]]:
                continue
            rows.level[at], rows.start_s[at] = option, 0.0
            if rows.hold():
                break
            rows.level[at], rows.start_s[at] = then


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
