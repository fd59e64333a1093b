"""Parts of the step time of every row of a strategy table, in one compiled pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.columns import Columns
from planner.cost.result import PARTS
from planner.cost.row_waits import (
    SENDS,
    TEXTBOOK,
    WAY,
    Work,
    slow_links,
    transfer_waits,
)
from planner.cost.summaries import SENDS as FOUND_SENDS
from planner.cost.summaries import TIMES, Summaries
from planner.schema import SCHEDULES, V_SCHEDULES
from planner.simulate import closed_form_makespan
from planner.simulate.compiled import compiled
from planner.space.table import StrategyTable

__all__ = ["RowTimes", "has_textbook_time", "row_times"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

_FOLDED = np.array([name in V_SCHEDULES for name in SCHEDULES])
# Compiled code is kept as long as this file is unchanged: what it takes for granted
# about the order of columns must be said in here.
_TIMES = (
    "forward",
    "backward",
    "weight",
    "selective",
    "full",
    "tp",
    "tp_again",
    "cp",
    "ep",
)
_FORWARD, _BACKWARD, _WEIGHT, _SELECTIVE, _FULL = range(5)
_TP, _TP_AGAIN, _CP, _EP = range(5, len(_TIMES))


def has_textbook_time(table: StrategyTable) -> NDArray[np.bool_]:
    """Rows whose makespan is a formula. Shape [n].

    The others are timed by chains of actions, which are found by simulating equal
    stages: milliseconds for each schedule, depth and number of microbatches that no
    row had before.
    """
    odd = (table.virtual_stages > 1) & (table.num_microbatches % table.pp > 0)
    return np.asarray(TEXTBOOK[table.schedule] & ~odd)


class _Parts(NamedTuple):
    """Those of :data:`PARTS` that are filled in here, under their names. Shapes [n]."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    pipeline_bubble: Array
    pipeline_transfer: Array
    shared_cores: Array


@compiled
def _work(times: Array, recompute: int) -> Work:
    """From the times of a rank or of the model, under one recompute kind.

    The forward has its share of communication: a half, of context a third.
    """
    forward, backward = times[_FORWARD], times[_BACKWARD]
    tensor, expert, context = 2 * times[_TP], 2 * times[_EP], times[_CP]
    shared = tensor / 2 + expert / 2 + context / 3
    again = 0.0
    if recompute > 0:
        tensor += times[_TP_AGAIN]
    if recompute == 2:
        again, expert, context = times[_FULL], 1.5 * expert, context * (4 / 3)
    elif recompute == 1:
        again = times[_SELECTIVE]
    return Work(
        forward,
        backward,
        times[_WEIGHT],
        again,
        tensor,
        context,
        expert,
        forward + backward + again + tensor + context + expert,
        forward + shared,
    )


@compiled
def _by_chains(
    rows: Columns,
    load: Array,
    whole: Array,
    sends: Array,
    found: Index,
    place: Index,
    times: Array,
) -> int:
    """Find rows that no textbook formula covers, and what their chains are made of.

    Args:
        rows: The table.
        load: Times of the slowest rank. Shape [pairs, _TIMES].
        whole: Times of the model. Shape [pairs, _TIMES].
        sends: Of transfers. Shape [pairs, SENDS].
        found: Filled in with these rows. Shape [n].
        place: Filled in with where in ``found`` each row is, or -1. Shape [n].
        times: Filled in for these rows with forward, backward and weight seconds of
            one mean stage, a transfer, and the slowest rank. Shape [5, n].
    Returns:
        How many were found.
    """
    count = 0
    for row in range(len(rows.pp)):
        schedule, recompute = rows.schedule[row], rows.recompute[row]
        pp, virtual = rows.pp[row], rows.virtual_stages[row]
        odd = virtual > 1 and rows.num_microbatches[row] % pp > 0
        place[row] = -1
        if TEXTBOOK[schedule] and not odd:
            continue
        pair, stages = rows.pair[row], pp * virtual
        all_of = _work(whole[pair], recompute)
        # A V turns on the last rank, where nothing is sent.
        boundaries = max(stages - 1 - int(_FOLDED[schedule]), 1)
        times[0, count] = all_of.forward_total / stages
        times[2, count] = all_of.weight / stages
        times[1, count] = all_of.total / stages - times[0, count] - times[2, count]
        times[3, count] = sends[pair, WAY] / boundaries
        times[4, count] = _work(load[pair], recompute).total
        found[count], place[row] = row, count
        count += 1
    return count


@compiled
def _fill_parts(
    rows: Columns,
    load: Array,
    whole: Array,
    sends: Array,
    crowding: Array,
    place: Index,
    by_chains: Array,
    parts: _Parts,
    forward_s: Array,
    backward_s: Array,
) -> None:
    """Parts of the step but for data parallelism and the optimizer.

    Seconds of the pipeline are M x slowest rank + (all - slowest rank) / virtual
    stages: the fill passes one virtual stage of each rank. Exact for equal stages, for
    Interleaved1F1B in whole rounds of pp microbatches; the rest goes by chains. What a
    slow rank does during the fill is not taken off, so that 1F1B of uneven stages is a
    little too long; :func:`planner.simulate.uneven.one_by_one_makespan` takes it off.
    Source: Narayanan et al. 2021, section 2.2.
    """
    for row in range(len(rows.pp)):
        pp, schedule = rows.pp[row], rows.schedule[row]
        virtual, many = rows.virtual_stages[row], rows.num_microbatches[row]
        pair, recompute = rows.pair[row], rows.recompute[row]
        own, all_of = _work(load[pair], recompute), _work(whole[pair], recompute)
        if place[row] >= 0:
            plain, sent = by_chains[0, place[row]], by_chains[1, place[row]]
        else:
            send = sends[pair, WAY]
            plain = many * own.total + (all_of.total - own.total) / virtual
            waits = transfer_waits(schedule, pp, virtual, many, own, all_of, send)
            sent = plain + 2 * send + waits
        slow = slow_links(schedule, pp, virtual, many, own, all_of, sends[pair])
        sent = max(sent, slow)
        crowd = crowding[rows.place[row], 0]
        # Processes that share cores can at best keep all cores busy all the time.
        cores = many * all_of.total / pp * crowding[rows.place[row], 1]
        plain = max(plain, many * own.total)
        sent = max(sent, plain)
        parts.compute[row] = many * (own.forward + own.backward)
        parts.recompute[row] = many * own.again
        parts.tensor[row] = many * own.tensor
        parts.context[row] = many * own.context
        parts.expert[row] = many * own.expert
        parts.pipeline_bubble[row] = plain - many * own.total
        parts.pipeline_transfer[row] = sent - plain
        parts.shared_cores[row] = max(sent * crowd, cores) - sent
        forward_s[row] = own.forward_total * crowd
        backward_s[row] = own.total * crowd - forward_s[row]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTimes:
    """Times of every row of a table.

    Attributes:
        parts_s: By part, those of data parallelism and the optimizer left at 0. Shape
            [PARTS, n].
        forward_s: Of one microbatch on the slowest rank. Shape [n].
        backward_s: The same for the whole backward. Shape [n].
    """

    parts_s: Array
    forward_s: Array
    backward_s: Array


def row_times(rows: Columns, summaries: Summaries, crowding: Array) -> RowTimes:
    """Time every row's pipeline.

    Args:
        rows: The table.
        summaries: Of the cuts that ``rows.pair`` names.
        crowding: How much processes that share cores slow each other down, at each of
            ``rows.place``, see :class:`planner.cost.orders.Places`. [places, 2].
    """
    count = len(rows.pp)
    found, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    times = np.empty((5, count))
    order = [TIMES.index(name) for name in _TIMES]
    load, whole = summaries.load[:, order], summaries.whole[:, order]
    sends = summaries.sends[:, [FOUND_SENDS.index(name) for name in SENDS]]
    of_pairs = (
        np.ascontiguousarray(load),
        np.ascontiguousarray(whole),
        np.ascontiguousarray(sends),
    )
    chained = _by_chains(rows, *of_pairs, found, place, times)
    result = RowTimes(
        parts_s=np.zeros((len(PARTS), count)),
        forward_s=np.empty(count),
        backward_s=np.empty(count),
    )
    _fill_parts(
        rows,
        *of_pairs,
        crowding,
        place,
        _makespans(rows, found[:chained], times[:, :chained]),
        _Parts(*(result.parts_s[PARTS.index(name)] for name in _Parts._fields)),
        result.forward_s,
        result.backward_s,
    )
    return result


def _makespans(rows: Columns, found: Index, times: Array) -> Array:
    """Of some rows without and with transfers. Shape [2, found]."""
    if not len(found):
        return np.zeros((2, 0))
    forward, backward, weight, hop, slowest = times
    hops = np.stack([np.zeros_like(hop), hop])
    return closed_form_makespan(
        rows.schedule[found],
        rows.pp[found],
        rows.virtual_stages[found],
        rows.num_microbatches[found],
        forward,
        backward,
        weight,
        hops,
        hops,
        slowest_rank_s=slowest,
    )
