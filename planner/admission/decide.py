"""Admit a job or turn it away, so that every promise can be kept.

A decision carries a schedule of all jobs. :mod:`planner.admission.check` goes through
it before it is returned, so that nothing is promised that the schedule does not keep.
While all goes as scheduled, the same schedule keeps the promises of later decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from planner.admission.check import guarantee_violations
from planner.admission.problem import Problem, read_problem
from planner.admission.schedule import (
    Hosts,
    Piece,
    Preference,
    Profile,
    Schedule,
    Task,
    fastest_s,
    lay_out,
    plan_task,
    relaxed,
)
from planner.errors import ExecutionError
from planner.schema.admission import (
    AdmissionDecision,
    ChangeKind,
    ClusterState,
    DeclineCause,
    JobChange,
    JobRequest,
    Promise,
    Reservation,
    StateJob,
    Throughputs,
)

__all__ = ["admit", "reschedule"]

#: Changes at times this close are one.
_SAME_S = 1e-3
_Pieces = dict[str, tuple[Piece, ...]]


def admit(
    job: JobRequest,
    state: ClusterState,
    *,
    throughputs: Throughputs | None = None,
    prefer: Literal["room", "finish"] = "room",
) -> AdmissionDecision:
    """Decide whether a job can be promised its deadline, and what it gets.

    Jobs that were promised theirs keep them. Running jobs are resized, moved or paused
    only if all promises can then be kept, and only if the job finds no place otherwise.
    A job without a deadline is always admitted, and gets what is left.

    Args:
        job: The job.
        state: State of the cluster.
        throughputs: Throughputs; by default those of the state.
        prefer: Give the job the fewest device-seconds (``room``), or the shape with
            which it ends first (``finish``).
    Returns:
        The decision, with its schedule.
    Raises:
        StrategyError: If the job or the state contradicts the throughputs; see
            :func:`planner.admission.problem.read_problem`.
        UnknownNameError: If a model or a device type has no throughputs.
    """
    problem = read_problem(state, throughputs, job)
    base, broken = _present(problem, without=job.name)
    if job.deadline_s is None:
        return _decided(problem, job.name, base, broken, promised=False)
    task = problem.tasks[job.name]
    problem = _late_ones_fixed(problem, base, broken)
    why = _too_slow(problem, task)
    if why is not None:
        return _declined(problem, job.name, base, broken, why, cause="alone")
    why = _too_many(problem, task, broken)
    if why is not None:
        return _declined(problem, job.name, base, broken, why, cause="load")
    found = _with_new(problem, task, base, prefer)
    if found is None:
        why = (
            f"no schedule was found in which {job.name} ends by its deadline and all "
            f"promises are kept"
        )
        return _declined(problem, job.name, base, broken, why, cause="search")
    return _decided(problem, job.name, found, broken, promised=True)


def reschedule(
    state: ClusterState, *, throughputs: Throughputs | None = None
) -> AdmissionDecision:
    """Schedule the jobs of a state anew, after devices have come or gone.

    Args:
        state: State of the cluster.
        throughputs: Throughputs; by default those of the state.
    Returns:
        A decision about no job; ``broken`` has the promises that cannot be kept.
    Raises:
        StrategyError: As of :func:`admit`.
        UnknownNameError: As of :func:`admit`.
    """
    problem = read_problem(state, throughputs)
    base, broken = _present(problem, without=None)
    return _decided(problem, None, base, broken, promised=False)


def _late_ones_fixed(
    problem: Problem, base: _Pieces, broken: Mapping[str, str]
) -> Problem:
    """Let a new job delay none whose promise is broken."""
    late = {
        name: replace(task, due=base[name][-1].end)
        for name, task in problem.tasks.items()
        if name in broken and base.get(name)
    }
    return replace(problem, tasks={**problem.tasks, **late})


def _fixed(problem: Problem) -> tuple[_Pieces, Profile]:
    """Return pieces of running jobs that cannot change, and what they leave free."""
    profile, pieces = problem.profile.copy(), {}
    for name, task in problem.tasks.items():
        if task.held is None or task.elastic:
            continue
        kept = plan_task(relaxed(task), profile)
        if kept is not None:
            pieces[name] = kept
            for piece in kept:
                profile.take(piece.start, piece.end, piece.hosts)
    return pieces, profile


def _promised(problem: Problem) -> list[Task]:
    """Tasks that were promised their deadlines, the earliest first."""
    found = [problem.tasks[name] for name, job in problem.jobs.items() if job.promised]
    return sorted(found, key=lambda task: (task.due, task.submitted, task.name))


def _present(problem: Problem, without: str | None) -> tuple[_Pieces, dict[str, str]]:
    """Schedule the jobs of the state.

    Returns:
        Their pieces, and the promises that cannot be kept with the reasons.
    """
    kept = _last(problem)
    if kept is not None:
        return _rest(problem, kept, without), {}
    pieces, profile = _fixed(problem)
    broken = {
        name: _late(problem, name, pieces[name][-1].end)
        for name in pieces
        if problem.jobs[name].promised
        and pieces[name][-1].end > problem.tasks[name].due
    }
    tasks = [task for task in _promised(problem) if task.name not in pieces]
    found = _search(tasks, profile)
    if found is None:
        found, lost = _as_many(tasks, profile)
        broken |= {task.name: _why_broken(problem, task) for task in lost}
    pieces |= found
    return _rest(problem, pieces, without), broken


def _late(problem: Problem, name: str, end: float) -> str:
    due = problem.tasks[name].due
    return f"it keeps its devices and ends {end - due:.10g} s after its deadline"


def _why_broken(problem: Problem, task: Task) -> str:
    down = sum(host.down for host in problem.state.hosts)
    why = f"; {down} devices are down" if down else ""
    left = task.due - problem.state.now_s
    if fastest_s(task) > left:
        return f"it needs {fastest_s(task):.6g} s and has {max(left, 0.0):.6g} s{why}"
    return f"no schedule was found that keeps it with the other promises{why}"


def _as_many(tasks: Sequence[Task], profile: Profile) -> tuple[_Pieces, list[Task]]:
    """Keep promises one after the other, the earliest deadline first."""
    kept: list[Task] = []
    lost: list[Task] = []
    found: _Pieces = {}
    for task in tasks:
        trial = _search([*kept, task], profile)
        if trial is None:
            lost.append(task)
        else:
            kept.append(task)
            found = trial
    return found, lost


def _search(
    tasks: Sequence[Task], profile: Profile, prefer: Preference = "room"
) -> _Pieces | None:
    """Look for a schedule that keeps all deadlines, with few changes first."""
    now = profile.times[0]
    by_slack = sorted(tasks, key=lambda task: task.due - now - fastest_s(task))
    attempts: tuple[tuple[Sequence[Task], Preference, bool], ...] = (
        (tasks, prefer, True),
        (tasks, "room", False),
        (by_slack, "room", False),
        (tasks, "finish", False),
    )
    for order, wanted, keep in attempts:
        found = lay_out(order, profile, prefer=wanted, keep=keep)
        if found is not None:
            return found
    return None


def _last(problem: Problem) -> _Pieces | None:
    """Return what the last decision reserved for promised jobs, if it still holds."""
    state = problem.state
    given = {each.job: each for each in state.reservations}
    names = [name for name, job in problem.jobs.items() if job.promised]
    rigid, _ = _fixed(problem)
    if not names or any(name not in given for name in names):
        return None
    pieces: _Pieces = {}
    for name in names:
        cut = _cut(problem, problem.tasks[name], given[name])
        if cut is None:
            return None
        pieces[name] = cut
    pieces = {**{name: rigid[name] for name in rigid if name not in pieces}, **pieces}
    made = problem.reservations(pieces, names)
    jobs = [job for name, job in problem.jobs.items() if name in pieces]
    wrong = guarantee_violations(state, problem.throughputs, made, jobs)
    return None if wrong else pieces


def _cut(problem: Problem, task: Task, given: Reservation) -> tuple[Piece, ...] | None:
    """Return the part of a reservation that lies ahead; None if it does not fit."""
    now, left = problem.state.now_s, task.left
    place = {host.name: at for at, host in enumerate(problem.state.hosts)}
    rows = {
        (row.model, row.batch, row.device, row.degree): at
        for at, row in enumerate(problem.throughputs.rows)
    }
    request = problem.jobs[task.name].request
    pieces: list[Piece] = []
    for segment in given.segments:
        row = rows.get((request.model, request.batch, segment.device, segment.degree))
        if segment.end_s <= now:
            continue
        if row is None or any(name not in place for name in segment.devices):
            return None
        hosts = tuple(sorted((place[name], n) for name, n in segment.devices.items()))
        start = max(segment.start_s, now)
        stall = max(0.0, segment.start_s + segment.stall_s - start)
        if not pieces and start == now:
            held = task.held
            same = held is not None and held.hosts == hosts
            stall = held.stall if held is not None and same else segment.stall_s
        piece = Piece(start, segment.end_s, hosts, stall, segment.iterations_per_s, row)
        if piece.done() >= left:
            end = start + stall + left / piece.rate
            return (*pieces, piece._replace(end=end))
        left -= piece.done()
        pieces.append(piece)
    if not pieces:
        return None
    # Rounding, or a job that is slower than it should be: let the last go on.
    last = pieces[-1]
    return (*pieces[:-1], last._replace(end=last.end + left / last.rate))


def _rest(problem: Problem, pieces: _Pieces, without: str | None) -> _Pieces:
    """Add the jobs without promises, the first submitted first."""
    found, profile = dict(pieces), problem.profile.copy()
    rigid, _ = _fixed(problem)
    found |= {name: each for name, each in rigid.items() if name not in found}
    for each in found.values():
        for piece in each:
            profile.take(piece.start, piece.end, piece.hosts)
    waiting = [
        task
        for name, task in problem.tasks.items()
        if name not in found and name != without
    ]
    # Those that have lost a promise come before those that never had one.
    waiting.sort(
        key=lambda task: (
            not problem.jobs[task.name].promised,
            task.submitted,
            task.name,
        )
    )
    for task in waiting:
        planned = plan_task(relaxed(task), profile, prefer="finish") or ()
        found[task.name] = planned
        for piece in planned:
            profile.take(piece.start, piece.end, piece.hosts)
    return found


def _with_new(
    problem: Problem, task: Task, base: _Pieces, prefer: Preference
) -> _Pieces | None:
    """Find a schedule with a new job, by as few changes of others as will do."""
    promised = {name for name, job in problem.jobs.items() if job.promised}
    rigid, free = _fixed(problem)
    keep = set(base) - {task.name}
    for fixed in (keep, (promised | set(rigid)) & keep):
        profile = problem.profile.copy()
        for name in fixed:
            for piece in base[name]:
                profile.take(piece.start, piece.end, piece.hosts)
        new = plan_task(task, profile, prefer=prefer)
        if new is not None:
            chosen = {name: base[name] for name in fixed} | {task.name: new}
            return _rest(problem, chosen, None)
    tasks = [each for each in _promised(problem) if each.name not in rigid]
    tasks.append(task)
    tasks.sort(key=lambda each: (each.due, each.submitted, each.name))
    found = _search(tasks, free, prefer)
    return None if found is None else _rest(problem, rigid | found, None)


def _too_slow(problem: Problem, new: Task) -> str | None:
    """Return why a job cannot meet its deadline even alone; None if it may."""
    left = new.due - problem.state.now_s
    if left <= 0.0:
        return f"its deadline passed {-left:.6g} s ago; give a later one"
    usable = [
        shape for shape in new.shapes if shape.degree <= _usable(problem, shape.kind)
    ]
    if not usable:
        return "too many devices are down for any number that it can run on"
    fastest = min(
        new.stall(shape.degree, again=False) + new.left / max(shape.rate, shape.spread)
        for shape in usable
    )
    if fastest > left:
        return (
            f"it needs {fastest:.6g} s at the least, and its deadline is in "
            f"{left:.6g} s; give a later deadline or fewer iterations"
        )
    return None


def _too_many(problem: Problem, new: Task, broken: Mapping[str, str]) -> str | None:
    """Return why devices cannot suffice for all deadlines; None if they may."""
    now = problem.state.now_s
    tasks = [task for task in _promised(problem) if task.name not in broken]
    for due in sorted({task.due for task in (*tasks, new)}):
        if due < new.due:
            continue
        need = sum(_least_device_s(task) for task in (*tasks, new) if task.due <= due)
        have = _free_device_s(problem.profile, due)
        if need > have * (1 + 1e-9):
            return (
                f"the jobs that are due in {due - now:.6g} s, itself included, need "
                f"{need:.6g} device-seconds at the least, and there are {have:.6g}; "
                f"give a later deadline"
            )
    return None


def _usable(problem: Problem, kind: int) -> int:
    hosts = problem.state.hosts
    return sum(
        host.devices - host.down for host in hosts if host.device == problem.kinds[kind]
    )


def _least_device_s(task: Task) -> float:
    """Device-seconds that the rest of a job takes at the least."""
    rates = [shape.degree / max(shape.rate, shape.spread) for shape in task.shapes]
    if task.held is not None:
        held = task.held
        rates.append(sum(count for _, count in held.hosts) / held.rate)
    return task.left * min(rates)


def _free_device_s(profile: Profile, end: float) -> float:
    times = [*profile.times, math.inf]
    return sum(
        float(profile.free[at].sum()) * max(0.0, min(times[at + 1], end) - times[at])
        for at in range(len(profile.times))
    )


def _declined(
    problem: Problem,
    name: str,
    base: _Pieces,
    broken: Mapping[str, str],
    why: str,
    *,
    cause: DeclineCause,
) -> AdmissionDecision:
    jobs = {each: job for each, job in problem.jobs.items() if each != name}
    found = {each: pieces for each, pieces in base.items() if each != name}
    return _document(
        problem,
        jobs,
        found,
        broken,
        {
            "job": name,
            "admitted": False,
            "reasons": (why,),
            "cause": cause,
            "proven": cause != "search",
        },
    )


def _decided(
    problem: Problem,
    name: str | None,
    pieces: _Pieces,
    broken: Mapping[str, str],
    *,
    promised: bool,
) -> AdmissionDecision:
    """Return the decision that a schedule makes."""
    jobs = dict(problem.jobs)
    if name is None:
        told: dict[str, Any] = {"job": None, "admitted": False, "reasons": ()}
        return _document(problem, jobs, pieces, broken, told)
    request = problem.jobs[name].request
    if not promised:
        pieces = pieces if name in pieces else _rest(problem, pieces, None)
        told = {"job": name, "admitted": True, "reasons": (_best_effort(pieces, name),)}
        return _document(problem, jobs, pieces, broken, told)
    jobs[name] = jobs[name].model_copy(update={"promised": True})
    assert request.deadline_s is not None
    end = pieces[name][-1].end
    promise = Promise(
        finish_s=end,
        deadline_s=request.deadline_s,
        slack_s=max(0.0, request.deadline_s - end),
    )
    told = {
        "job": name,
        "admitted": True,
        "promise": promise,
        "reasons": (_why_promised(problem, pieces[name], promise),),
    }
    return _document(problem, jobs, pieces, broken, told)


def _best_effort(pieces: Schedule, name: str) -> str:
    if not pieces[name]:
        return "it has no deadline, and waits as no devices come free that it can use"
    return "it has no deadline, and gets devices that promises leave free"


def _why_promised(problem: Problem, pieces: Sequence[Piece], promise: Promise) -> str:
    row = problem.throughputs.rows[pieces[0].row]
    wait = pieces[0].start - problem.state.now_s
    since = "now on" if wait <= 0.0 else f"{wait:.6g} s from now on"
    return (
        f"with {row.degree} {row.device} from {since} "
        f"it ends {promise.slack_s:.6g} s before its deadline"
    )


def _document(
    problem: Problem,
    jobs: Mapping[str, StateJob],
    pieces: _Pieces,
    broken: Mapping[str, str],
    told: Mapping[str, Any],
) -> AdmissionDecision:
    """Check a schedule, and return it as a decision.

    Raises:
        ExecutionError: If the check finds what the search should have seen to.
    """
    promised = [
        name for name, job in jobs.items() if job.promised and name not in broken
    ]
    schedule = problem.reservations(pieces, promised)
    checked = [
        job.model_copy(update={"promised": name in promised})
        for name, job in jobs.items()
    ]
    wrong = guarantee_violations(problem.state, problem.throughputs, schedule, checked)
    if wrong:
        raise ExecutionError(
            f"the schedule that was found cannot be carried out: {wrong[0]}; nothing "
            "is promised, please report it with the state"
        )
    return AdmissionDecision(
        **told,
        changes=tuple(_changes(problem, pieces, new=told["job"])),
        schedule=schedule,
        broken=dict(broken),
        decided_s=problem.state.now_s,
        origin=problem.throughputs.origin,
        source=problem.throughputs.name,
    )


def _changes(problem: Problem, pieces: _Pieces, new: str | None) -> Iterator[JobChange]:
    found: list[JobChange] = []
    for name, each in pieces.items():
        if name != new:
            made = _changes_of(problem, pieces, name, each)
            found += (one for one in made if not _planned(problem, one))
    yield from sorted(found, key=lambda change: (change.at_s, change.job))


def _planned(problem: Problem, change: JobChange) -> bool:
    """Return True if the reservations of the state have a change already."""
    for given in problem.state.reservations:
        if given.job != change.job:
            continue
        if not change.after:
            return any(
                abs(each.end_s - change.at_s) < _SAME_S for each in given.segments
            )
        return any(
            abs(each.start_s - change.at_s) < _SAME_S and each.devices == change.after
            for each in given.segments
        )
    return False


def _changes_of(
    problem: Problem, schedule: _Pieces, name: str, pieces: Sequence[Piece]
) -> Iterator[JobChange]:
    task, until = problem.tasks[name], problem.state.now_s
    before: Hosts = () if task.held is None else task.held.hosts
    ran = task.started
    for piece in pieces:
        if before and piece.start > until:
            yield _change(problem, schedule, name, "paused", until, before, (), 0.0)
            before = ()
        if piece.hosts != before:
            kind = _kind(before, piece.hosts, ran)
            change = (before, piece.hosts, piece.stall)
            yield _change(problem, schedule, name, kind, piece.start, *change)
        before, ran, until = piece.hosts, True, piece.end
    if before and not pieces:
        yield _change(problem, schedule, name, "paused", until, before, (), 0.0)


def _kind(before: Hosts, after: Hosts, ran: bool) -> ChangeKind:
    if not before:
        return "resumed" if ran else "started"
    same = sum(n for _, n in before) == sum(n for _, n in after)
    return "moved" if same else "resized"


def _change(
    problem: Problem,
    schedule: _Pieces,
    name: str,
    kind: ChangeKind,
    at: float,
    before: Hosts,
    after: Hosts,
    stall: float,
) -> JobChange:
    return JobChange(
        job=name,
        kind=kind,
        at_s=at,
        before=problem.devices_of(before),
        after=problem.devices_of(after),
        stall_s=stall,
        reason=_reason(problem, schedule, name, at, before, after),
    )


def _reason(
    problem: Problem,
    schedule: _Pieces,
    name: str,
    at: float,
    before: Hosts,
    after: Hosts,
) -> str:
    """Say to whom devices go, or where they come from."""
    kept = dict(after)
    lost = {host for host, count in before if kept.get(host, 0) < count}
    if not lost:
        return "devices are free for it" if after else "it waits"
    takers = [
        other
        for other, pieces in schedule.items()
        if other != name
        and any(
            piece.start <= at < piece.end and lost & {host for host, _ in piece.hosts}
            for piece in pieces
        )
    ]
    down = any(problem.state.hosts[host].down for host in lost)
    due = [other for other in takers if problem.tasks[other].due < math.inf]
    if due:
        return f"its devices are needed by {', '.join(due)}, due by a deadline"
    if takers:
        return f"its devices go to {', '.join(takers)}"
    if down:
        return "devices that it held are down"
    return "it meets its deadline with these, and leaves room for others"
