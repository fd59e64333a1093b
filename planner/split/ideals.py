"""Sets of groups that hold with each group all that comes before it (ideals).

A set is a row of 64-bit words. Sets reached with so many accelerators and CPUs are
kept in one table with a hash, each with the least bottleneck it was reached at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, copy_into, inlined
from planner.split.groups import Groups
from planner.split.task import Array, Index

__all__ = ["Reached", "Words", "bytes_of", "followers", "grown", "new_reached", "put"]

Words = NDArray[np.uint64]


class Reached(NamedTuple):
    """Sets reached so far; tables are replaced by larger ones when full.

    Attributes:
        bits: The sets. Shape [capacity, words].
        state: Devices used, as a number. Shape [capacity].
        value: Least bottleneck in ms. Shape [capacity].
        parent: Row it was reached from; -1 at the start. Shape [capacity].
        onward: Next row of the same state; -1 at the end. Shape [capacity].
        first: First row by state; -1 if none. Shape [states].
        slots: Row by hash; -1 if free. Shape [power of two].
        used: Number of rows used. Shape [1].
    """

    bits: Words
    state: Index
    value: Array
    parent: Index
    onward: Index
    first: Index
    slots: Index
    used: Index


def new_reached(words: int, states: int, capacity: int = 1 << 12) -> Reached:
    """An empty table. ``capacity`` is a power of two."""
    return Reached(
        bits=np.zeros((capacity, words), dtype=np.uint64),
        state=np.zeros(capacity, dtype=np.int64),
        value=np.zeros(capacity),
        parent=np.zeros(capacity, dtype=np.int64),
        onward=np.zeros(capacity, dtype=np.int64),
        first=np.full(states, -1, dtype=np.int64),
        slots=np.full(4 * capacity, -1, dtype=np.int64),
        used=np.zeros(1, dtype=np.int64),
    )


def bytes_of(reached: Reached) -> int:
    """Memory of the tables."""
    return sum(table.nbytes for table in reached)


@inlined
def _slot(slots: Index, bits: Words, states: Index, row: Words, state: int) -> int:
    """Where a set is, or would go."""
    mixed = np.uint64(state) + np.uint64(0x9E3779B97F4A7C15)
    for k in range(len(row)):
        mixed = (mixed ^ row[k]) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
    mask = len(slots) - 1
    at = np.int64(mixed & np.uint64(mask))
    while slots[at] >= 0:
        found = slots[at]
        if states[found] == state:
            same = True
            for k in range(len(row)):
                if bits[found, k] != row[k]:
                    same = False
                    break
            if same:
                return int(at)
        at = (at + 1) & mask
    return int(at)


@compiled
def put(reached: Reached, row: Words, state: int, value: float, parent: int) -> int:
    """Note that a set is reached.

    Returns:
        Its row; -1 if the tables are full.
    """
    slot = _slot(reached.slots, reached.bits, reached.state, row, state)
    at = reached.slots[slot]
    if at >= 0:
        if value < reached.value[at]:
            reached.value[at] = value
            reached.parent[at] = parent
        return int(at)
    at = reached.used[0]
    if at == len(reached.state):
        return -1
    reached.used[0] = at + 1
    reached.slots[slot] = at
    copy_into(reached.bits[at], row)
    reached.state[at] = state
    reached.value[at] = value
    reached.parent[at] = parent
    reached.onward[at] = reached.first[state]
    reached.first[state] = at
    return int(at)


@compiled
def _hash_again(slots: Index, bits: Words, states: Index, count: int) -> None:
    for at in range(count):
        slots[_slot(slots, bits, states, bits[at], states[at])] = at


def grown(reached: Reached) -> Reached:
    """The same in tables of twice the size."""
    count, capacity = int(reached.used[0]), len(reached.state)
    new = new_reached(reached.bits.shape[1], len(reached.first), 2 * capacity)
    for name in ("bits", "state", "value", "parent", "onward"):
        getattr(new, name)[:count] = getattr(reached, name)[:count]
    new.first[:] = reached.first
    new.used[0] = count
    _hash_again(new.slots, new.bits, new.state, count)
    return new


@compiled
def _gather(order: Index, start: Index, flat: Index, bits: Words) -> None:
    for k in range(len(order) - 1, -1, -1):
        at = order[k]
        bits[at, at >> 6] |= np.uint64(1) << np.uint64(at & 63)
        for i in range(start[at], start[at + 1]):
            for word in range(bits.shape[1]):
                bits[at, word] |= bits[flat[i], word]


def followers(groups: Groups, order: Index) -> Words:
    """Each group with all that come after it. Shape [m, words].

    Args:
        groups: The graph.
        order: All groups, producers first. Shape [m].
    """
    bits = np.zeros((len(groups), (len(groups) + 63) // 64), dtype=np.uint64)
    _gather(order, groups.after_start, groups.after, bits)
    return bits
