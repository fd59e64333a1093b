"""Decisions of :mod:`policies.elastic.cheapest` fitted to the hosts of a cluster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.elastic.costs import Change
from envs.elastic.pools import Room
from envs.elastic.session import ElasticSession
from policies.elastic.promises import Needs, Rows

__all__ = ["can_pause", "fitted"]

Index = NDArray[np.int64]

#: Most times that devices are lowered until all jobs can be placed.
_TRIES = 60


def can_pause(session: ElasticSession) -> bool:
    """Return True if jobs can always be placed, by moves of smaller ones at most.

    So it is where all sizes are powers of two, hosts of a type are equal, and no device
    is dead. Jobs that change nothing must cost nothing, either.
    """
    room = session.room
    names = tuple(key.name for key in session.config.source.models)
    ones = np.ones(len(names), dtype=np.int64)
    still = Change(names, ones, np.zeros(len(names), np.bool_), 1, session.room.alive)
    sizes = np.append(session.degrees, room.size)
    return bool(
        (sizes & (sizes - 1) == 0).all()
        and all(
            len(set(room.size[room.kind == kind])) == 1
            for kind in set(room.kind.tolist())
        )
        and not room.down.any()
        and not session.config.cost.stall_s(still).any()
    )


def fitted(session: ElasticSession, base: Rows, rows: Rows) -> Rows:
    """Lower devices of jobs until all changes can be placed.

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
        bad = _unplaced(free, room, needs, level, grown)
        if bad < 0:
            return rows if not len(rows.paused) or rows.hold() else base
        if level[bad] > _lowest(needs, bad, int(level[bad])):
            rows.level[bad] -= 1
            continue
        if needs.held[bad] < 0 and _placed(session, rows):
            return rows
        rows.level[bad], rows.start_s[bad] = base.level[bad], base.start_s[bad]
    # To change nothing is always possible.
    return base


def _lowest(needs: Needs, job: int, option: int) -> int:
    """Lowest option of an option's type that a job is to have."""
    kind = needs.kinds[option]
    held, least = int(needs.held[job]), int(needs.least[job, kind])
    if least < 0:
        return option
    return max(least, held) if held >= 0 and needs.kinds[held] == kind else least


def _placed(session: ElasticSession, rows: Rows) -> bool:
    """Return True if all can be placed, and jobs that move then end in time.

    Jobs that change have to lie on the fewest hosts that hold them, if they are slower
    on more.
    """
    needs, level = rows.needs, rows.now
    room = session.room.copy()
    changed = np.flatnonzero(level != needs.held)
    for job in needs.jobs[changed].tolist():
        room.release(job)
    given = changed[level[changed] >= 0]
    moved, unplaced = room.place(
        [
            (int(needs.jobs[at]), int(needs.kinds[level[at]]), devices)
            for at, devices in zip(
                given.tolist(), needs.degrees[level[given]].tolist(), strict=True
            )
        ]
    )
    if unplaced:
        return False
    if (session.rates[..., 1] > 0.0).any() and any(
        room.spread(job) for job in moved.union(needs.jobs[given].tolist())
    ):
        return False
    if not moved and not len(rows.paused):
        return True
    return rows.hold(np.isin(needs.jobs, list(moved)))


def _unplaced(free: Index, room: Room, needs: Needs, level: Index, jobs: Index) -> int:
    """Place jobs, the largest first; return the first without room, or -1."""
    hosts = [room.kind == kind for kind in range(len(needs.capacity))]
    sizes = [int(room.size[of].max(initial=1)) for of in hosts]
    order = np.argsort(-needs.degrees[level[jobs]], kind="stable")
    for at in jobs[order].tolist():
        kind = needs.kinds[level[at]]
        there = free[hosts[kind]]
        if not _place(there, sizes[kind], int(needs.degrees[level[at]])):
            return int(at)
        free[hosts[kind]] = there
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
