"""What transfers between stages add to the pipeline of a strategy table's row."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.schema import FORWARDS_FIRST_SCHEDULES, SCHEDULES
from planner.simulate.compiled import compiled

__all__ = ["SENDS", "TEXTBOOK", "WAY", "Work", "slow_links", "transfer_waits"]

Array = NDArray[np.float64]

_ONE_BY_ONE, _INTERLEAVED = SCHEDULES.index("1F1B"), SCHEDULES.index("Interleaved1F1B")
#: Schedules whose makespan is M x slowest rank + fill.
TEXTBOOK = np.array(
    [name in {"GPipe", "1F1B", "Interleaved1F1B"} for name in SCHEDULES]
)
_FORWARDS_FIRST = np.array([name in FORWARDS_FIRST_SCHEDULES for name in SCHEDULES])
#: Columns of ``sends`` here, in the words of :data:`planner.cost.summaries.SENDS`.
#: Compiled code is kept as long as this file is unchanged, so that they are said here.
SENDS = ("way", "edge", "link", "tail", "depth")
WAY, _EDGE, _LINK, _TAIL, _DEPTH = range(len(SENDS))


class Work(NamedTuple):
    """Seconds of one microbatch by cause, and two sums of them."""

    forward: float
    backward: float
    weight: float
    again: float
    tensor: float
    context: float
    expert: float
    total: float
    forward_total: float


@compiled
def transfer_waits(
    schedule: int,
    pp: int,
    virtual: int,
    many: int,
    load: Work,
    whole: Work,
    send: float,
) -> float:
    """What transfers add beyond one way down the pipeline and back.

    1F1B lets pp microbatches in, so that each round of pp waits for the first of them
    to come back: (all + 2 send) / pp is the least time of a microbatch. Interleaved
    stages hide transfers under a forward or a backward unless those are shorter. Counts
    of hops are those of :func:`planner.simulate.bubble_coefficients` for equal stages.
    """
    if pp == 1:
        return 0.0
    if schedule == _ONE_BY_ONE:
        rounds = (pp - 1) * many // pp - 1 + (many % pp == 1)
        late = max((whole.total + 2 * send) / pp - load.total, 0.0)
        return max(late * pp / (pp - 1) * rounds, 0.0)
    if schedule == _INTERLEAVED:
        stages = pp * virtual
        forward = whole.forward_total / stages
        shorter = min(forward, whole.total / stages - forward)
        longer = max(send / max(stages - 1, 1) - shorter, 0.0)
        return max((many - pp) * (virtual - 1) * longer, 0.0)
    return 0.0


@compiled
def slow_links(
    schedule: int,
    pp: int,
    virtual: int,
    many: int,
    load: Work,
    whole: Work,
    sends: Array,
) -> float:
    """The least seconds of a pipeline whose links are what is slow.

    What is sent over a link queues. Where all forwards come before all backwards, each
    half takes as long as its rank or its link. Of 1F1B, each round of ``depth``
    microbatches makes a trip over some boundaries and back: a rank is one forward ahead
    of the next; see :func:`planner.simulate.uneven.one_by_one_makespan`.
    """
    if pp == 1:
        return 0.0
    if _FORWARDS_FIRST[schedule]:
        edge, backward_total = sends[_EDGE], load.total - load.forward_total
        if edge <= min(load.forward_total, backward_total):
            return 0.0
        there, back = max(load.forward_total, edge), max(backward_total, edge)
        fill = whole.total + 2 * sends[WAY] - there - back
        return float(many * (there + back) + fill / virtual)
    # Before the first transfer and after the last: with one stage a rank and backwards
    # in one piece all of a microbatch, else a stage at least.
    all_of_it = virtual == 1 and TEXTBOOK[schedule]
    once = whole.total if all_of_it else whole.total / (pp * virtual)
    found = once + many * sends[_LINK]
    if schedule == _ONE_BY_ONE:
        trips = 1 + (many - 1) // int(sends[_DEPTH])
        before = sends[WAY] - sends[_TAIL]
        ways = 2 * (before + trips * sends[_TAIL])
        found = max(found, whole.total + (many - 1) * whole.total / pp + ways)
    return float(found)
