"""Schedules of elastic jobs on hosts: free devices over time, and jobs laid into them.

A schedule gives each job segments of constant devices. It counts what a start and every
change costs, and says on which hosts a job lies, so that what it promises can be done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Hosts",
    "Piece",
    "Profile",
    "Schedule",
    "Shape",
    "Task",
    "fastest_s",
    "lay_out",
    "plan_task",
    "relaxed",
]

Index = NDArray[np.int64]
#: Devices of a job: pairs of a host and a number of its devices, by host.
Hosts = tuple[tuple[int, int], ...]
#: Whether a job gets the fewest device-seconds, or the earliest end.
Preference = Literal["room", "finish"]

#: Share of a job's work that rounding may leave over.
_LEFT = 1e-9
#: Jobs that are planned, again and again, before an order of them is given up.
_MOST_PLANS = 100


class Shape(NamedTuple):
    """A number of devices of one type.

    Attributes:
        kind: Number of the type.
        degree: Number of devices.
        rate: Iterations per second on the fewest hosts.
        spread: Iterations per second on more; 0 if the job may not run so.
        row: Number of the throughput.
    """

    kind: int
    degree: int
    rate: float
    spread: float
    row: int


class Piece(NamedTuple):
    """Devices of a job from a time to another.

    Attributes:
        start: Start.
        end: End.
        hosts: Devices.
        stall: Time at the start without progress.
        rate: Iterations per second after that.
        row: Number of the throughput.
    """

    start: float
    end: float
    hosts: Hosts
    stall: float
    rate: float
    row: int

    def done(self) -> float:
        """Return the iterations of the piece."""
        return max(0.0, self.end - self.start - self.stall) * self.rate


#: Pieces of each job, by the job's name, in time.
Schedule = Mapping[str, tuple[Piece, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job as schedules see it.

    Attributes:
        name: Name.
        left: Iterations left.
        due: Deadline; infinity for none.
        submitted: Time of submission.
        shapes: Shapes that it can have.
        held: Piece of the devices that it holds, its end without meaning; or None.
        elastic: Whether these may be changed.
        start_s: Time that its first start costs.
        change_s: Device-seconds that a change costs besides.
        started: Whether it has run before.
    """

    name: str
    left: float
    due: float
    submitted: float
    shapes: tuple[Shape, ...]
    held: Piece | None
    elastic: bool
    start_s: float
    change_s: float
    started: bool

    def stall(self, degree: int, *, again: bool) -> float:
        """Time that a start on some devices costs.

        Args:
            degree: Number of devices.
            again: Whether it has run before.
        """
        return self.start_s + (self.change_s / degree if again else 0.0)


class Profile:
    """Free devices of each host from each breakpoint to the next, the last for ever.

    Args:
        now: First breakpoint.
        free: Devices that are usable. Shape [hosts].
        size: Devices that a host has. Shape [hosts].
        kind: Type of each host. Shape [hosts].
    """

    def __init__(self, now: float, free: Index, size: Index, kind: Index) -> None:
        self.times = [now]
        self.free: Index = free[None].astype(np.int64)
        self.size, self.kind = size, kind

    def copy(self) -> Profile:
        """Return a copy that can be changed."""
        other = Profile(self.times[0], self.free[0], self.size, self.kind)
        other.times, other.free = list(self.times), self.free.copy()
        return other

    def take(self, start: float, end: float, hosts: Hosts, sign: int = 1) -> None:
        """Take devices from a time to another; give them back with ``sign=-1``."""
        if end <= start:
            return
        first = self._breakpoint(start)
        last = len(self.times) if math.isinf(end) else self._breakpoint(end)
        for host, devices in hosts:
            self.free[first:last, host] -= sign * devices

    def available(self, start: float, end: float) -> Index:
        """Devices of each host that are free all the time. Shape [hosts]."""
        first = int(np.searchsorted(self.times, start, side="right")) - 1
        last = max(first + 1, int(np.searchsorted(self.times, end, side="left")))
        found: Index = self.free[max(first, 0) : last].min(axis=0)
        return found

    def holds(self, start: float, end: float, hosts: Hosts) -> bool:
        """Return True if devices of some hosts are free all the time."""
        if end <= start:
            return True
        free = self.available(start, end)
        return all(free[host] >= devices for host, devices in hosts)

    def place(self, free: Index, shape: Shape) -> tuple[Hosts, float] | None:
        """Lay a shape over free devices: the fewest hosts, or others if it may.

        Args:
            free: Free devices. Shape [hosts].
            shape: Shape.
        Returns:
            Devices and their rate; None without room.
        """
        able = np.flatnonzero((self.kind == shape.kind) & (free > 0))
        if int(free[able].sum()) < shape.degree:
            return None
        size = int(self.size[self.kind == shape.kind].max())
        whole, rest = divmod(shape.degree, size)
        full = able[free[able] == size][:whole]
        if len(full) == whole:
            hosts = [(int(host), size) for host in full]
            if not rest:
                return tuple(hosts), shape.rate
            others = able[free[able] >= rest]
            if whole:
                others = others[~np.isin(others, full)]
            if len(others):
                hosts.append((int(others[free[others].argmin()]), rest))
                return tuple(sorted(hosts)), shape.rate
        if shape.spread <= 0.0:
            return None
        return self._anywhere(free, able, shape.degree), shape.spread

    def _anywhere(self, free: Index, able: Index, left: int) -> Hosts:
        hosts = []
        for host in able[np.argsort(-free[able], kind="stable")].tolist():
            taken = min(left, int(free[host]))
            hosts.append((host, taken))
            left -= taken
            if not left:
                break
        return tuple(sorted(hosts))

    def _breakpoint(self, at: float) -> int:
        where = int(np.searchsorted(self.times, at, side="left"))
        if where < len(self.times) and self.times[where] == at:
            return where
        self.times.insert(where, at)
        self.free = np.insert(self.free, where, self.free[max(where - 1, 0)], axis=0)
        return where


def fastest_s(task: Task) -> float:
    """Time that a job needs at the least, with all devices free."""
    found = [
        task.stall(shape.degree, again=task.started)
        + task.left / max(shape.rate, shape.spread)
        for shape in task.shapes
    ]
    if task.held is not None:
        held = task.held
        best = max([held.rate, *(max(each.rate, each.spread) for each in task.shapes)])
        found.append(min(held.stall + task.left / held.rate, task.left / best))
    return min(found, default=math.inf)


def _keep(task: Task, profile: Profile) -> tuple[Piece, ...] | None:
    """Plan the devices that a job holds to its end; None if they are not free."""
    held = task.held
    if held is None:
        return None
    end = held.start + held.stall + task.left / held.rate
    if not profile.holds(held.start, end, held.hosts):
        return None
    return (held._replace(end=end),)


def _until(task: Task, profile: Profile, start: float) -> tuple[Piece, float] | None:
    """Let a job run on until a time, or until its devices are not free any more.

    Returns:
        The piece, and the iterations that it leaves.
    """
    held = task.held
    if held is None:
        return None
    ends = [at for at in profile.times if held.start < at < start]
    for end in (start, *reversed(ends)):
        if end > held.start and profile.holds(held.start, end, held.hosts):
            piece = held._replace(end=end)
            return piece, task.left - piece.done()
    return None


def _constant(
    task: Task, profile: Profile, shape: Shape, start: float
) -> tuple[Piece, ...] | None:
    """Plan one shape from a time on to the end; None without room."""
    before: tuple[Piece, ...] = ()
    left = task.left
    ran = _until(task, profile, start)
    if ran is not None:
        before, left = (ran[0],), ran[1]
        if left <= _LEFT * task.left:
            return None
    again = task.started or bool(before)
    stall = task.stall(shape.degree, again=again)
    rate = shape.rate
    for _ in range(2):
        end = start + stall + left / rate
        placed = profile.place(profile.available(start, end), shape)
        if placed is None:
            return None
        if placed[1] == rate:
            piece = Piece(start, end, placed[0], stall, rate, shape.row)
            return (*before, piece)
        rate = placed[1]
    return None


def _device_s(pieces: Sequence[Piece]) -> float:
    return sum(
        (piece.end - piece.start) * sum(devices for _, devices in piece.hosts)
        for piece in pieces
    )


def _constants(
    task: Task, profile: Profile, prefer: Preference
) -> tuple[Piece, ...] | None:
    """Plan the best single shape that meets the deadline; None without one."""
    best: tuple[Piece, ...] | None = None
    best_cost = (math.inf, math.inf)
    totals = {
        kind: profile.free[:, profile.kind == kind].sum(axis=1)
        for kind in {shape.kind for shape in task.shapes}
    }
    now = profile.times[0]
    for shape in task.shapes:
        roomy = totals[shape.kind] >= shape.degree
        work = task.left / max(shape.rate, shape.spread)
        for at, start in enumerate(profile.times):
            if task.held is None and start + work > task.due:
                break
            if start > task.due:
                break
            if not roomy[at]:
                continue
            found = _constant(task, profile, shape, max(start, now))
            if found is None or found[-1].end > task.due:
                continue
            cost = (_device_s(found), found[-1].end)
            cost = cost if prefer == "room" else cost[::-1]
            if cost < best_cost:
                best, best_cost = found, cost
            break
    return best


def _filled(task: Task, profile: Profile, most: int) -> tuple[Piece, ...] | None:
    """Plan with other devices at every breakpoint, up to a number of them.

    Args:
        task: The job.
        profile: Free devices.
        most: Most devices.
    """
    ends = [*profile.times[1:], math.inf]
    shapes = sorted(
        (shape for shape in task.shapes if shape.degree <= most),
        key=lambda shape: -shape.rate,
    )
    pieces: list[Piece] = []
    left, again = task.left, task.started
    held = task.held
    for start, free_until in zip(profile.times, ends, strict=True):
        end = min(free_until, task.due)
        if end <= start:
            break
        stay = _stay(pieces, held, start)
        if stay is not None and not profile.holds(start, end, stay.hosts):
            stay = None
        free = profile.available(start, end)
        move = _best_move(task, profile, shapes, free, start, again)
        gains = [
            max(0.0, end - start - each.stall) * each.rate if each else 0.0
            for each in (stay, move)
        ]
        chosen = stay if stay is not None and gains[0] >= gains[1] else move
        if chosen is None or max(gains) <= 0.0:
            continue
        done = start + chosen.stall + left / chosen.rate
        piece = chosen._replace(end=min(done, end))
        left -= piece.done()
        again = True
        _append(pieces, piece)
        if done <= end:
            return tuple(pieces)
    return None


def _stay(pieces: list[Piece], held: Piece | None, start: float) -> Piece | None:
    """Return the piece that a job has when an interval starts, going on."""
    if not pieces:
        return held if held is not None and held.start == start else None
    last = pieces[-1]
    if last.end < start:
        return None
    rest = max(0.0, last.start + last.stall - start)
    return last._replace(start=start, stall=rest)


def _best_move(
    task: Task,
    profile: Profile,
    shapes: Sequence[Shape],
    free: Index,
    start: float,
    again: bool,
) -> Piece | None:
    for shape in shapes:
        placed = profile.place(free, shape)
        if placed is not None:
            stall = task.stall(shape.degree, again=again)
            return Piece(start, math.inf, placed[0], stall, placed[1], shape.row)
    return None


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, or lengthen the last one if it goes on."""
    last = pieces[-1] if pieces else None
    goes_on = (
        last is not None
        and last.end == piece.start
        and last.hosts == piece.hosts
        and last.row == piece.row
        and piece.stall == max(0.0, last.start + last.stall - piece.start)
    )
    if last is not None and goes_on:
        pieces[-1] = last._replace(end=piece.end)
    else:
        pieces.append(piece)


def plan_task(
    task: Task, profile: Profile, *, prefer: Preference = "room", keep: bool = True
) -> tuple[Piece, ...] | None:
    """Plan a job in free devices so that it meets its deadline.

    A job keeps its devices if it may and that suffices. Otherwise it gets one shape
    from the earliest time on, and if none suffices, other devices at each breakpoint.

    Args:
        task: The job.
        profile: Free devices; not changed.
        prefer: ``room`` for the fewest device-seconds, ``finish`` for the earliest end.
        keep: Whether a job that holds devices keeps them where that suffices.
    Returns:
        Its pieces; None if no plan was found.
    """
    kept = _keep(task, profile)
    if task.held is not None and not task.elastic:
        return kept if kept is not None and kept[-1].end <= task.due else None
    if keep and kept is not None and kept[-1].end <= task.due:
        return kept
    found = _constants(task, profile, prefer)
    if found is None and math.isfinite(task.due):
        for most in sorted({shape.degree for shape in task.shapes}):
            found = _filled(task, profile, most)
            if found is not None:
                break
    if found is None and kept is not None and kept[-1].end <= task.due:
        return kept
    return found


def lay_out(
    tasks: Iterable[Task],
    profile: Profile,
    *,
    prefer: Preference = "room",
    keep: bool = True,
) -> dict[str, tuple[Piece, ...]] | None:
    """Plan jobs one after the other so that all meet their deadlines.

    A job that finds no place is planned first in the next try.

    Args:
        tasks: The jobs, the first first.
        profile: Free devices; not changed.
        prefer: As for :func:`plan_task`.
        keep: As for :func:`plan_task`.
    Returns:
        The schedule; None if none was found.
    """
    order = list(tasks)
    count = max(1, len(order))
    for _ in range(1 + min(2 * count, max(1, _MOST_PLANS // count))):
        room, schedule = profile.copy(), {}
        for task in order:
            pieces = plan_task(task, room, prefer=prefer, keep=keep)
            if pieces is None:
                break
            schedule[task.name] = pieces
            for piece in pieces:
                room.take(piece.start, piece.end, piece.hosts)
        else:
            return schedule
        if order[0] is task:
            return None
        order.remove(task)
        order.insert(0, task)
    return None


def relaxed(task: Task) -> Task:
    """Return a job without its deadline."""
    return replace(task, due=math.inf)
