"""What a search from one ideal keeps track of."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.split.groups import Groups
from planner.split.ideals import Words
from planner.split.task import Array, Index, Mask

__all__ = [
    "BARRED",
    "BUSY",
    "CROSSES",
    "HELD",
    "MOVED",
    "PLACED",
    "STAYS",
    "Board",
    "Problem",
    "new_board",
]

# Columns of Board.sums.
BUSY, HELD, MOVED, STAYS, CROSSES, BARRED, PLACED = range(7)


class Problem(NamedTuple):
    """The groups in the form compiled code takes; see :class:`Groups`.

    Attributes:
        work: Time on an accelerator, 0 where it cannot run. Shape [m].
        reach: Each group with all after it. Shape [m, words].
    """

    work: Array
    cpu: Array
    size: Array
    supported: Mask
    after_start: Index
    after: Index
    before_start: Index
    flow_ms: Array
    flow_from: Index
    flow_start: Index
    flow_to: Index
    touch_start: Index
    touch: Index
    give_start: Index
    give: Index
    reach: Words


class Board(NamedTuple):
    """Scratch of one search.

    Attributes:
        waits: Groups before this one that are neither placed nor taken. Shape [m].
        taken: Consumers of each flow taken by the device. Shape [f].
        placed: Consumers of each flow on earlier devices. Shape [f].
        out: Consumers of each flow that will not be taken. Shape [f].
        produced: Whether the device takes the producer. Shape [f].
        given: Whether an earlier device has the producer. Shape [f].
        away: Whether the producer will not be taken. Shape [f].
        ideal: The set reached, by depth. Shape [m + 2, words].
        barred: What can no longer be taken, by depth. Shape [m + 2, words].
        sums: Busy ms, bytes held, ms moved, ms moved whatever comes, ms that cross
            from the set reached, ms of work barred, ms of work placed since the
            source; by depth. Shape [m + 2, 7].
        options: Groups that may be taken, a piece for each depth.
        piece: First, next and end of that piece, by depth. Shape [m + 2, 3].
        entered: Group taken, by depth. Shape [m + 2].
    """

    waits: Index
    taken: Index
    placed: Index
    out: Index
    produced: Mask
    given: Mask
    away: Mask
    ideal: Words
    barred: Words
    sums: Array
    options: Index
    piece: Index
    entered: Index


def new_board(groups: Groups) -> Board:
    """Scratch for searches over these groups."""
    m, f, words = len(groups), len(groups.flow_ms), (len(groups) + 63) // 64
    return Board(
        waits=np.zeros(m, dtype=np.int64),
        taken=np.zeros(f, dtype=np.int64),
        placed=np.zeros(f, dtype=np.int64),
        out=np.zeros(f, dtype=np.int64),
        produced=np.zeros(f, dtype=np.bool_),
        given=np.zeros(f, dtype=np.bool_),
        away=np.zeros(f, dtype=np.bool_),
        ideal=np.zeros((m + 2, words), dtype=np.uint64),
        barred=np.zeros((m + 2, words), dtype=np.uint64),
        sums=np.zeros((m + 2, 7)),
        options=np.zeros((m + 2) * (m + 1) // 2 + m + 2, dtype=np.int64),
        piece=np.zeros((m + 2, 3), dtype=np.int64),
        entered=np.zeros(m + 2, dtype=np.int64),
    )
