"""Pipelines that are flushed once a step: from times of stages to the pipeline's end.

Transfers queue. What a rank sends to another goes over one link, message after message:
a transfer waits until the bytes of the one before are through. Over links that are
slower than the stages between them, as between sites, that is what bounds the step; a
simulator that lets any number of transfers pass at once calls GPipe's forwards free to
overlap all of them.

Rows of a table are timed by closed forms in one compiled pass, one strategy by running
its schedule's exact order.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipelines import (
    Pipeline,
    PipelineMemory,
    PipelinePricing,
    RowTimes,
)
from planner.cost.result import PARTS
from planner.cost.strategy.stages import Stages, StageTimes
from planner.cost.table.rows import Columns
from planner.cost.table.stages import SENDS, TIMES, Summaries
from planner.schema.methods import MethodDocument
from planner.simulate import (
    ActionKind,
    ActionTable,
    Sharing,
    Timeline,
    check_sharing,
    closed_form_makespan,
    closed_form_of_stages,
    evaluate,
    peak_held_bytes,
    peak_in_flight,
    schedule_columns,
    simulate_shared,
    timeline,
)
from planner.simulate.compiled import compiled, inner
from planner.space.table import StrategyTable

__all__ = [
    "PRICING",
    "Flushed",
    "Work",
    "has_textbook_time",
    "queues",
    "slow_links",
    "transfer_waits",
    "with_a_flush",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Columns of schedules that compiled code here takes.
RULES = ("folded", "forwards_first", "textbook", "one_by_one", "rounds")

_FOLDED, _FORWARDS_FIRST, _TEXTBOOK, _ONE_BY_ONE, _ROUNDS = range(len(RULES))


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


@inner
def transfer_waits(
    rule: Index,
    pp: int,
    virtual: int,
    many: int,
    load: Work,
    whole: Work,
    send: float,
) -> float:
    """Seconds that transfers add beyond one way down the pipeline and back.

    1F1B lets pp microbatches in, so that each round of pp waits for the first of them
    to come back: (all + 2 send) / pp is the least time of a microbatch. Interleaved
    stages hide transfers under a forward or a backward unless those are shorter. Counts
    of hops are those of :func:`planner.simulate.bubble_coefficients` for equal stages.
    """
    if pp == 1:
        return 0.0
    if rule[_ONE_BY_ONE]:
        rounds = (pp - 1) * many // pp - 1 + (many % pp == 1)
        late = max((whole.total + 2 * send) / pp - load.total, 0.0)
        return max(late * pp / (pp - 1) * rounds, 0.0)
    if rule[_ROUNDS]:
        stages = pp * virtual
        forward = whole.forward_total / stages
        shorter = min(forward, whole.total / stages - forward)
        longer = max(send / max(stages - 1, 1) - shorter, 0.0)
        return max((many - pp) * (virtual - 1) * longer, 0.0)
    return 0.0


@inner
def slow_links(
    rule: Index,
    pp: int,
    virtual: int,
    many: int,
    load: Work,
    whole: Work,
    sends: Array,
) -> float:
    """Least seconds of a pipeline whose links are what is slow.

    What is sent over a link queues. Where all forwards come before all backwards, each
    half takes as long as its rank or its link. Of 1F1B, each round of ``depth``
    microbatches makes a trip over some boundaries and back: a rank is one forward ahead
    of the next; see :func:`planner.simulate.closed_form.one_by_one_makespan`.
    """
    if pp == 1:
        return 0.0
    if rule[_FORWARDS_FIRST]:
        edge, backward_total = sends[SENDS.edge], load.total - load.forward_total
        if edge <= min(load.forward_total, backward_total):
            return 0.0
        there, back = max(load.forward_total, edge), max(backward_total, edge)
        fill = whole.total + 2 * sends[SENDS.way] - there - back
        return float(many * (there + back) + fill / virtual)
    # Before the first transfer and after the last: with one stage a rank and backwards
    # in one piece all of a microbatch, else a stage at least.
    all_of_it = virtual == 1 and rule[_TEXTBOOK]
    once = whole.total if all_of_it else whole.total / (pp * virtual)
    found = once + many * sends[SENDS.link]
    if rule[_ONE_BY_ONE]:
        trips = 1 + (many - 1) // int(sends[SENDS.depth])
        before = sends[SENDS.way] - sends[SENDS.tail]
        ways = 2 * (before + trips * sends[SENDS.tail])
        found = max(found, whole.total + (many - 1) * whole.total / pp + ways)
    return float(found)


def has_textbook_time(table: StrategyTable) -> NDArray[np.bool_]:
    """Rows whose makespan is a formula. Shape [n].

    The others are timed by chains of actions, which are found by simulating equal
    stages: milliseconds for each schedule, depth and number of microbatches that no
    row had before.
    """
    odd = (table.virtual_stages > 1) & (table.num_microbatches % table.pp > 0)
    return np.asarray((schedule_columns("textbook")[table.schedule, 0] > 0) & ~odd)


class _Parts(NamedTuple):
    """Parts of :data:`PARTS` that are filled in here, by name. Shapes [n]."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    pipeline_bubble: Array
    pipeline_transfer: Array
    shared_cores: Array


@inner
def _work(times: Array, recompute: int) -> Work:
    """Sum the times of a rank or of the model up, under one recompute kind.

    The forward has its share of communication: a half, of context a third.
    """
    forward, backward = times[TIMES.forward], times[TIMES.backward]
    tensor, expert, context = 2 * times[TIMES.tp], 2 * times[TIMES.ep], times[TIMES.cp]
    shared = tensor / 2 + expert / 2 + context / 3
    again = 0.0
    if recompute > 0:
        tensor += times[TIMES.tp_again]
    if recompute == 2:
        again, expert, context = times[TIMES.full], 1.5 * expert, context * (4 / 3)
    elif recompute == 1:
        again = times[TIMES.selective]
    return Work(
        forward,
        backward,
        times[TIMES.weight],
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
    rules: Index,
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
        rules: Columns :data:`RULES` of each schedule. Shape [codes, columns].
        load: Times of the slowest rank. Shape [pairs, TIMES].
        whole: Times of the model. Shape [pairs, TIMES].
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
        if rules[schedule, _TEXTBOOK] and not odd:
            continue
        pair, stages = rows.pair[row], pp * virtual
        all_of = _work(whole[pair], recompute)
        # A V turns on the last rank, where nothing is sent.
        boundaries = max(stages - 1 - rules[schedule, _FOLDED], 1)
        times[0, count] = all_of.forward_total / stages
        times[2, count] = all_of.weight / stages
        times[1, count] = all_of.total / stages - times[0, count] - times[2, count]
        times[3, count] = sends[pair, SENDS.way] / boundaries
        times[4, count] = _work(load[pair], recompute).total
        found[count], place[row] = row, count
        count += 1
    return count


@compiled
def _fill_parts(
    rows: Columns,
    rules: Index,
    load: Array,
    whole: Array,
    sends: Array,
    core_contention: Array,
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
    little too long; :func:`planner.simulate.closed_form.one_by_one_makespan` takes it
    off. Source: Narayanan et al. 2021, section 2.2.
    """
    for row in range(len(rows.pp)):
        pp, rule = rows.pp[row], rules[rows.schedule[row]]
        virtual, many = rows.virtual_stages[row], rows.num_microbatches[row]
        pair, recompute = rows.pair[row], rows.recompute[row]
        own, all_of = _work(load[pair], recompute), _work(whole[pair], recompute)
        if place[row] >= 0:
            plain, sent = by_chains[0, place[row]], by_chains[1, place[row]]
        else:
            send = sends[pair, SENDS.way]
            plain = many * own.total + (all_of.total - own.total) / virtual
            waits = transfer_waits(rule, pp, virtual, many, own, all_of, send)
            sent = plain + 2 * send + waits
        slow = slow_links(rule, pp, virtual, many, own, all_of, sends[pair])
        sent = max(sent, slow)
        crowd = core_contention[rows.place[row], 0]
        # Processes that share cores can at best keep all cores busy all the time.
        cores = many * all_of.total / pp * core_contention[rows.place[row], 1]
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


def _makespans(rows: Columns, found: Index, times: Array) -> Array:
    """Makespans of some rows without and with transfers. Shape [2, found]."""
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


class Flushed:
    """Pipelines that finish all microbatches before the weights are updated."""

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: Array
    ) -> RowTimes:
        """Times of a table's rows, see :class:`PipelinePricing`."""
        count = len(rows.pp)
        found, place = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        times = np.empty((5, count))
        of_pairs = summaries.load, summaries.whole, summaries.sends
        rules = schedule_columns(*RULES)
        chained = _by_chains(rows, rules, *of_pairs, found, place, times)
        result = RowTimes(
            parts_s=np.zeros((len(PARTS), count)),
            forward_s=np.empty(count),
            backward_s=np.empty(count),
        )
        _fill_parts(
            rows,
            rules,
            *of_pairs,
            core_contention,
            place,
            _makespans(rows, found[:chained], times[:, :chained]),
            _Parts(*(result.parts_s[PARTS.index(name)] for name in _Parts._fields)),
            result.forward_s,
            result.backward_s,
        )
        return result

    def run(
        self, stages: Stages, fidelity: Literal["analytic", "simulated"]
    ) -> Pipeline:
        """Times of all microbatches of one strategy."""
        times = stages.times
        work = stages.of_ranks(times.forward + times.backward)
        busy = stages.strategy.num_microbatches * work
        if stages.order is None:
            total = float(busy[0])
            return Pipeline(plain_s=total, sent_s=total, done_s=busy, busy_s=busy)
        if fidelity == "simulated":
            return _simulated(stages, stages.order, busy)
        plain, sent = _by_formula(stages)
        done = np.full(stages.pp, sent)
        return Pipeline(plain_s=plain, sent_s=sent, done_s=done, busy_s=busy)

    def memory(self, stages: Stages) -> PipelineMemory:
        """Bytes that the schedule's exact order holds."""
        costs, spec = stages.costs, stages.strategy.schedule_spec
        of, none = stages.context.scalar_bytes, np.zeros(1)
        kept = stages.sums(costs.saved_bytes[:, 0])
        kept = kept[stages.recompute, np.arange(len(stages.rank))]
        if stages.order is None:
            held, done = stages.of_ranks(kept), np.zeros(stages.pp)
            return PipelineMemory(
                activations=held,
                later=held if stages.strategy.num_microbatches > 1 else done,
                again=done,
                received=done,
            )
        cut, crossing = (
            part(costs.cut_bytes) for part in (stages.at_cuts, stages.crossing)
        )
        returned = np.concatenate([none, crossing])
        sent = np.concatenate([crossing, none])
        output = np.concatenate([np.zeros(len(cut)), costs.output_bytes])
        shared = np.concatenate([none, stages.at_cuts(costs.shared_bytes)])
        flying = np.maximum(kept + sent + output - shared, 0.0)
        split, after = flying, returned if of.keeps_graph else 0.0 * returned
        if spec.splits_backward:
            halves = stages.sums(costs.weight_grad_bytes[0]) + after
            halves -= 0.0 if of.keeps_graph else output
            halves[0] = 0.0
            split = np.maximum(flying + halves, 0.0)
        still = of.keeps_sent and not spec.waits_for_sends
        held = peak_held_bytes(
            stages.order,
            flying,
            split,
            after_split_bytes=returned + sent if still else after,
            after_whole_bytes=returned + sent if still else 0.0,
        )
        buffers = np.concatenate([none, cut]) + np.concatenate([cut, none])
        again, all_fly = held, np.zeros(stages.pp, dtype=bool)
        if stages.strategy.virtual_stages == 1:
            sent_on = returned + sent if still else 0.0
            again = held - flying + np.minimum(sent_on, flying)
            all_fly = peak_in_flight(stages.order) >= stages.strategy.num_microbatches
        return PipelineMemory(
            activations=held,
            later=np.where(all_fly, again, held),
            again=again,
            received=stages.of_ranks(buffers),
        )

    def traffic(self, stages: Stages) -> dict[str, Array]:
        """Activations that each rank sends ahead, and gradients that it sends back."""
        return {"send": stages.sent_bytes * stages.strategy.num_microbatches}

    def timeline(self, stages: Stages, times: StageTimes) -> Timeline:
        """Actions of one strategy whose stages take ``times``."""
        if stages.order is None:
            return _accumulation(stages.strategy.num_microbatches, times)
        return timeline(
            stages.order,
            times.forward,
            times.input_half,
            times.weight_half,
            times.send,
            times.send,
            sharing=queues(stages, times),
        )


PRICING = Flushed()


def with_a_flush(pricing: PipelinePricing, _: MethodDocument) -> PipelinePricing:
    """Return a schedule's own pricing, which is of flushed pipelines.

    Args:
        pricing: Of the schedule.
    """
    return pricing


def _accumulation(many: int, times: StageTimes) -> Timeline:
    """Microbatch after microbatch without a pipeline, all stages in one."""
    forward, backward = float(times.forward.sum()), float(times.backward.sum())
    microbatch = np.repeat(np.arange(many), 2)
    second = np.tile([0, 1], many)
    start = microbatch * (forward + backward) + second * forward
    end = start + np.where(second == 1, backward, forward)
    return Timeline(
        pp=1,
        rank=np.zeros(2 * many, dtype=np.int32),
        kind=np.where(second == 1, ActionKind.BACKWARD, ActionKind.FORWARD),
        stage=np.zeros(2 * many, dtype=np.int32),
        microbatch=microbatch,
        start_s=start,
        end_s=end,
    )


def _simulated(stages: Stages, table: ActionTable, busy: Array) -> Pipeline:
    times = stages.times
    work = times.forward, times.input_half, times.weight_half
    # Both at once: without transfers, and with them.
    sends = np.stack([np.zeros_like(times.send), times.send])
    timed = evaluate(table, *work, sends, sends)
    plain, sent = timed.makespan_s.tolist()
    ends = timed.backward_done_s[1]
    sharing = queues(stages, times)
    if sharing is not None:
        there, back = np.split(sharing.link_of[1:], 2)
        queued = simulate_shared(
            table,
            *work,
            times.send,
            times.send,
            link_of_forward=there,
            link_of_backward=back,
            latency_s=times.latency,
        )
        sent, ends = float(queued.makespan_s), queued.backward_done_s
    done = np.zeros(stages.pp)
    np.maximum.at(done, stages.rank, ends)
    return Pipeline(plain_s=plain, sent_s=sent, done_s=done, busy_s=busy)


def _by_formula(stages: Stages) -> tuple[float, float]:
    """Seconds without and with transfers."""
    strategy, times = stages.strategy, stages.times
    key = (
        strategy.schedule,
        stages.pp,
        strategy.virtual_stages,
        strategy.num_microbatches,
    )
    # Closed forms are of equal stages: the mean is of those that do split the backward.
    parts = (times.forward, times.backward - times.weight, times.weight)
    plain = float(closed_form_of_stages(*key, *parts))
    sent = float(closed_form_of_stages(*key, *parts, times.send, times.send))
    return plain, max(sent, _slow_links(stages))


def _slow_links(stages: Stages) -> float:
    """Seconds of one strategy whose links are what is slow, as :func:`slow_links`."""
    strategy, times = stages.strategy, stages.times
    there, back = _directions(stages)
    held = np.maximum(times.send - times.latency, 0.0)
    halves = [
        (stages.of_ranks(work), np.bincount(way, held).max())
        for work, way in ((times.forward, there), (times.backward, back))
    ]
    many, virtual = strategy.num_microbatches, strategy.virtual_stages
    whole = float((times.forward + times.backward).sum())
    if strategy.schedule_spec.forwards_first:
        if all(busy <= own.max() for own, busy in halves):
            return 0.0
        each = sum(max(float(own.max()), float(busy)) for own, busy in halves)
        fill = whole + 2 * float(times.send.sum()) - each
        return many * each + fill / virtual
    link = np.bincount(np.concatenate([there, back]), np.tile(held, 2)).max()
    split = strategy.schedule_spec.splits_backward
    once = whole / len(stages.rank) if split or virtual > 1 else whole
    return many * float(link) + once


def _directions(stages: Stages) -> tuple[Index, Index]:
    """Number of the way over each boundary, forward and back. Shapes [stages - 1].

    A way leads from one rank to another; what stays on a rank takes one, too.
    """
    here, there = stages.rank[:-1], stages.rank[1:]
    return here * stages.pp + there, there * stages.pp + here


def queues(stages: Stages, times: StageTimes) -> Sharing | None:
    """Links on which transfers wait for each other; None where none can meet another.

    A rank sends when an action ends, so that what it sends is at least as far apart
    as its shortest action that sends is long: shorter transfers never meet. (Ends of
    overlapped pairs send twice at once; where that is short, it is left out.)

    Args:
        stages: Of a pipeline.
        times: One microbatch on each of them.
    """
    if stages.order is None:
        return None
    there, back = _directions(stages)
    count = int(max(there.max(), back.max())) + 1
    apart = np.full(count, np.inf)
    np.minimum.at(apart, there, times.forward[:-1])
    np.minimum.at(apart, back, times.input_half[1:])
    held = np.maximum(times.send - times.latency, 0.0)
    if (held <= np.minimum(apart[there], apart[back])).all():
        return None
    _, number = np.unique(np.concatenate([there, back]), return_inverse=True)
    links = np.where(np.tile(times.send, 2) > 0, number, -1)
    return check_sharing(stages.order, *np.split(links, 2), latency_s=times.latency)
