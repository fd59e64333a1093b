"""All ways on from one ideal by one device, with those that cannot win left out.

The sets a device can take are enumerated by a depth-first search that puts in one
group at a time; a group passed over stays out of the whole branch, so that each set is
met once. A branch ends where the device's load can only stay above the best known
split, or where what is left over is too much for the devices left.
"""

from __future__ import annotations

import numpy as np

from planner.simulate.compiled import compiled, copy_into, inlined
from planner.split.board import (
    BARRED,
    BUSY,
    CROSSES,
    HELD,
    MOVED,
    PLACED,
    STAYS,
    Board,
    Problem,
)
from planner.split.ideals import Reached, Words, put
from planner.split.task import Array, Index

__all__ = ["DONE", "FULL", "NO_BETTER", "PAUSED", "expand"]

DONE, FULL, PAUSED = 0, 1, 2

#: By what part of it a load must be lower to be lower.
NO_BETTER = 1e-9


@inlined
def _has(row: Words, at: int) -> bool:
    return bool(row[at >> 6] >> np.uint64(at & 63) & np.uint64(1))


@inlined
def _prices(p: Problem, b: Board, f: int, sums: Array, sign: float) -> None:
    """Add (or take back) what a flow costs as things stand."""
    consumers = p.flow_start[f + 1] - p.flow_start[f]
    price = sign * p.flow_ms[f]
    if b.produced[f]:
        if b.taken[f] < consumers:
            sums[MOVED] += price
        if b.out[f] > 0:
            sums[STAYS] += price
    elif b.taken[f] > 0:
        sums[MOVED] += price
        if b.away[f]:
            sums[STAYS] += price
    if b.produced[f] or b.given[f]:
        if b.placed[f] + b.taken[f] < consumers:
            sums[CROSSES] += price
    elif b.placed[f] + b.taken[f] > 0:
        sums[CROSSES] += price


@compiled
def _start(p: Problem, b: Board, ideal: Words) -> None:
    """Lay out the board for searches on from an ideal."""
    m, flows = len(p.work), len(p.flow_ms)
    b.ideal[0] = ideal
    b.barred[0] = 0
    b.sums[0] = 0.0
    b.taken[:] = 0
    b.produced[:] = False
    for f in range(flows):
        b.given[f] = b.away[f] = _has(ideal, p.flow_from[f])
        count = 0
        for k in range(p.flow_start[f], p.flow_start[f + 1]):
            count += _has(ideal, p.flow_to[k])
        b.placed[f] = b.out[f] = count
        _prices(p, b, f, b.sums[0], 1.0)
    for at in range(m):
        b.waits[at] = p.before_start[at + 1] - p.before_start[at]
    for at in range(m):
        if _has(ideal, at):
            for k in range(p.after_start[at], p.after_start[at + 1]):
                b.waits[p.after[k]] -= 1
    end = 0
    for at in range(m):
        if b.waits[at] == 0 and not _has(ideal, at):
            b.options[end] = at
            end += 1
    b.piece[0, 0] = b.piece[0, 1] = 0
    b.piece[0, 2] = end


@inlined
def _take(p: Problem, b: Board, at: int, depth: int, on_cpu: bool) -> None:
    """Put a group into the device's set: what depth + 1 stands for."""
    copy_into(b.ideal[depth + 1], b.ideal[depth])
    b.ideal[depth + 1, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
    copy_into(b.barred[depth + 1], b.barred[depth])
    sums = b.sums[depth + 1]
    copy_into(sums, b.sums[depth])
    sums[BUSY] += p.cpu[at] if on_cpu else p.work[at]
    sums[HELD] += p.size[at]
    sums[PLACED] += p.work[at]
    for k in range(p.touch_start[at], p.touch_start[at + 1]):
        f = p.touch[k]
        _prices(p, b, f, sums, -1.0)
        b.taken[f] += 1
        _prices(p, b, f, sums, 1.0)
    for k in range(p.give_start[at], p.give_start[at + 1]):
        f = p.give[k]
        _prices(p, b, f, sums, -1.0)
        b.produced[f] = True
        _prices(p, b, f, sums, 1.0)
    b.entered[depth + 1] = at


@inlined
def _give_back(p: Problem, b: Board, at: int) -> None:
    for k in range(p.touch_start[at], p.touch_start[at + 1]):
        b.taken[p.touch[k]] -= 1
    for k in range(p.give_start[at], p.give_start[at + 1]):
        b.produced[p.give[k]] = False


@inlined
def _pass_over(p: Problem, b: Board, at: int, depth: int) -> None:
    """Leave a group out of the branch, and with it all that come after it."""
    sums = b.sums[depth]
    for k in range(p.touch_start[at], p.touch_start[at + 1]):
        f = p.touch[k]
        if b.out[f] == 0 and b.produced[f]:
            sums[STAYS] += p.flow_ms[f]
        b.out[f] += 1
    for k in range(p.give_start[at], p.give_start[at + 1]):
        f = p.give[k]
        if b.taken[f] > 0:
            sums[STAYS] += p.flow_ms[f]
        b.away[f] = True
    for word in range(b.barred.shape[1]):
        fresh = p.reach[at, word] & ~b.barred[depth, word]
        b.barred[depth, word] |= fresh
        base = word << 6
        while fresh:
            if fresh & np.uint64(1):
                sums[BARRED] += p.work[base]
            fresh >>= np.uint64(1)
            base += 1


@inlined
def _close(p: Problem, b: Board, depth: int) -> None:
    """Undo what this depth passed over, and what was taken to get there."""
    for i in range(b.piece[depth, 0], b.piece[depth, 2]):
        at = b.options[i]
        for k in range(p.touch_start[at], p.touch_start[at + 1]):
            b.out[p.touch[k]] -= 1
        for k in range(p.give_start[at], p.give_start[at + 1]):
            b.away[p.give[k]] = False
    if depth > 0:
        at = b.entered[depth]
        _give_back(p, b, at)
        for k in range(p.after_start[at], p.after_start[at + 1]):
            b.waits[p.after[k]] += 1


@inlined
def _open(p: Problem, b: Board, depth: int) -> None:
    """List what may be taken next: what was left, and what the last one lets in."""
    at, last, end = b.entered[depth], b.piece[depth - 1, 1], b.piece[depth - 1, 2]
    fill = end
    b.piece[depth, 0] = b.piece[depth, 1] = fill
    for i in range(last + 1, end):
        b.options[fill] = b.options[i]
        fill += 1
    for k in range(p.after_start[at], p.after_start[at + 1]):
        b.waits[p.after[k]] -= 1
        if b.waits[p.after[k]] == 0:
            b.options[fill] = p.after[k]
            fill += 1
    b.piece[depth, 2] = fill


@inlined
def _next(p: Problem, b: Board, depth: int, limit: float) -> None:
    """Pass over the current group; end the piece if too much is barred."""
    _pass_over(p, b, b.options[b.piece[depth, 1]], depth)
    b.piece[depth, 1] += 1
    if b.sums[depth, BARRED] > limit:
        b.piece[depth, 2] = b.piece[depth, 1]


@inlined
def _admissible(
    p: Problem, sums: Array, at: int, memory: float, bound: float, on_cpu: bool
) -> bool:
    """Whether a set with this group in it can be part of a better split."""
    if on_cpu:
        return bool(sums[BUSY] < bound)
    return bool(
        sums[BUSY] + sums[STAYS] < bound and sums[HELD] <= memory and p.supported[at]
    )


@compiled
def expand(
    p: Problem,
    b: Board,
    reached: Reached,
    source: int,
    state: int,
    on_cpu: bool,
    rest: Array,
    memory: float,
    best: Array,
    budget: Index,
) -> int:
    """Note all sets one more device leads to: ``DONE``, ``FULL`` or ``PAUSED``.

    Full tables are to be replaced; then, as after a pause, the call is made again.

    Args:
        p: The groups; ``b`` is scratch, ``reached`` where sets are noted.
        source: Row to go on from.
        state: Devices used then.
        on_cpu: Whether the device is a CPU.
        rest: Work not yet placed at the source, then the most work that the other
            devices could do after this one, without and with what crosses. Shape [3].
        memory: Bytes of an accelerator.
        best: Load that a split must be below to be better than the best one known,
            and the row of that one. Shape [2].
        budget: Steps left. Shape [1].
    """
    _start(p, b, reached.bits[source])
    depth = 0
    while True:
        if b.piece[depth, 1] == b.piece[depth, 2]:
            _close(p, b, depth)
            if depth == 0:
                return DONE
            depth -= 1
            _next(p, b, depth, rest[1])
            continue
        at = b.options[b.piece[depth, 1]]
        budget[0] -= 1
        if budget[0] < 0:
            return PAUSED
        _take(p, b, at, depth, on_cpu)
        sums = b.sums[depth + 1]
        if not _admissible(p, sums, at, memory, best[0], on_cpu):
            _give_back(p, b, at)
            _next(p, b, depth, rest[1])
            continue
        depth += 1
        _open(p, b, depth)
        load = sums[BUSY] + (0.0 if on_cpu else sums[MOVED])
        load = max(load, reached.value[source])
        left = rest[0] - sums[PLACED]
        if load >= best[0] or left > rest[1] or left + sums[CROSSES] > rest[2]:
            continue
        row = put(reached, b.ideal[depth], state, load, source)
        if row < 0:
            return FULL
        if _all_in(b, depth):
            best[0], best[1] = load * (1 - NO_BETTER), row


@inlined
def _all_in(b: Board, depth: int) -> bool:
    """Whether every group is placed."""
    if b.piece[depth, 2] > b.piece[depth, 0]:
        return False
    count = 0
    for word in range(b.ideal.shape[1]):
        bits = b.ideal[depth, word]
        while bits:
            bits &= bits - np.uint64(1)
            count += 1
    return bool(count == len(b.waits))
