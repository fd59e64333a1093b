"""Sums over ranks against sums over units by hand, and what equal cuts share."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from planner.cost.kernels.blocks import Ties
from planner.cost.table.cuts import balanced_bounds
from planner.cost.table.ranks import CROSSING, KEPT, PEAKS
from planner.cost.table.stages import TIMES, Pairs, summarize
from planner.cost.units import UnitCosts

UNITS, COMBOS = 13, 2
#: One weight that units 0, 5 and 12 read, and one that 6 and 7 do.
TIES = Ties(
    first=np.array([0, 5, 6]),
    second=np.array([5, 12, 7]),
    split=np.zeros(3, dtype=np.int64),
    scalars=np.ones(3),
    trained=np.ones(3),
)
#: pp, virtual stages, folded, combination.
CUTS = [(1, 1, 0, 0), (3, 1, 0, 1), (2, 3, 0, 0), (3, 2, 1, 0), (6, 1, 0, 0)]


def random_costs(types: int) -> UnitCosts:
    random = np.random.default_rng(11)

    def draw(*shape: int) -> np.ndarray:
        return random.uniform(1.0, 2.0, shape)

    combined = {
        name: draw(COMBOS, UNITS)
        for name in (
            "tp_s",
            "tp_again_s",
            "cp_s",
            "ep_s",
            "dense_parameters",
            "expert_parameters",
            "trained_dense",
            "trained_experts",
            "weight_grad_bytes",
            "tp_bytes",
            "cp_bytes",
            "ep_bytes",
            "ep_payload",
            "cp_payload",
        )
    }
    names = ("forward_s", "backward_s", "weight_s", "selective_s", "full_s", "hooks_s")
    return UnitCosts(
        **{name: draw(types, COMBOS, UNITS) for name in names},
        **combined,
        saved_bytes=draw(3, COMBOS, UNITS),
        offloaded_bytes=np.zeros((3, COMBOS, UNITS)),
        transient_bytes=draw(3, COMBOS, UNITS),
        whole_bytes=draw(2, 3, 3, COMBOS),
        alone_bytes=draw(3, 3, COMBOS),
        summed_parameters=draw(2, COMBOS, UNITS),
        tensors=draw(UNITS),
        cut_bytes=draw(COMBOS, UNITS - 1),
        sent_bytes=draw(COMBOS, UNITS - 1),
        gathered_bytes=draw(COMBOS, UNITS - 1),
        gather_s=draw(COMBOS, UNITS - 1),
        output_bytes=draw(COMBOS),
        shared_bytes=draw(COMBOS, UNITS - 1),
        tp_payload=draw(3, 2, COMBOS, UNITS),
        cp_forward=1 / 3,
        ties=TIES,
        tied_parameters=draw(COMBOS, len(TIES)),
        tied_trained=draw(COMBOS, len(TIES)),
    )


def pairs_of(types_of_rank: list[int]) -> Pairs:
    """All of CUTS, on the first ranks of a list of device types."""
    degrees = sorted({pp for pp, *_ in CUTS})
    types = np.array(
        [types_of_rank[:pp] + [types_of_rank[0]] * (degrees[-1] - pp) for pp in degrees]
    )
    pp, virtual, folded, combo = np.array(CUTS).T
    each = np.array(degrees)
    ranks = [0 * each, np.minimum(1, each - 1), each - 1, np.minimum(2, each - 1)]
    return Pairs(
        combo=combo,
        pp=pp,
        virtual=virtual,
        folded=folded,
        place=np.searchsorted(degrees, pp),
        types=types,
        bandwidth=np.full(types.shape, 4.0),
        latency=np.full(types.shape, 0.5),
        ranks=np.stack(ranks, axis=1),
    )


def stages_of(rank: int, pp: int, virtual: int, folded: int) -> list[int]:
    if folded:
        return sorted({rank, 2 * pp - 1 - rank})
    return [rank + turn * pp for turn in range(virtual)]


def cut_of(costs: UnitCosts, row: int, types: list[int]) -> tuple[int, ...]:
    """Where the stages of a row start, cut on its own."""
    pp, virtual, folded, combo = CUTS[row]
    shared = 2 * costs.tp_s + costs.cp_s + 2 * costs.ep_s
    kinds = [0] * (pp * virtual)
    for rank in range(pp):
        for stage in stages_of(rank, pp, virtual, folded):
            kinds[stage] = types[rank]
    bounds = balanced_bounds(
        costs.forward_s + costs.backward_s + shared,
        np.array([combo]),
        np.array([kinds]),
        np.array([pp * virtual]),
    )
    return tuple(bounds[0].tolist())


@pytest.mark.parametrize("types", [[0] * 6, [0, 1, 0, 1, 1, 0]], ids=["one", "two"])
@pytest.mark.parametrize("row", range(len(CUTS)))
def test_ranks_are_the_sums_of_their_units(types: list[int], row: int) -> None:
    costs = random_costs(2)
    found = summarize(costs, pairs_of(types))
    pp, virtual, folded, combo = CUTS[row]
    shared = (costs.tp_s, costs.tp_again_s, costs.cp_s, costs.ep_s)
    typed = (
        costs.forward_s,
        costs.backward_s,
        costs.weight_s,
        costs.selective_s,
        costs.full_s,
    )

    def times(rank: int, units: list[int]) -> np.ndarray:
        own = [part[types[rank], combo, units].sum() for part in typed]
        own += [part[combo, units].sum() for part in shared]
        return np.array([*own, costs.hooks_s[types[rank], combo, units].sum()])

    bounds = cut_of(costs, row, types)
    ranks = []
    for rank in range(pp):
        stages = stages_of(rank, pp, virtual, folded)
        ranks.append([u for s in stages for u in range(bounds[s], bounds[s + 1])])
    loads = np.array([times(rank, units) for rank, units in enumerate(ranks)])
    work = loads @ np.array([1, 1, 0, 0, 0, 2, 0, 1, 2, 0])
    assert len(TIMES) == loads.shape[1]
    assert found.load[row] == pytest.approx(loads[work.argmax()])
    assert found.whole[row] == pytest.approx(loads.sum(axis=0))
    alone = costs.whole_bytes[..., combo]
    assert found.memory.whole[row] == pytest.approx(alone)
    assert found.memory.first[row] == pytest.approx(costs.reduced_last[combo])
    for place, rank in enumerate((0, min(1, pp - 1), pp - 1, min(2, pp - 1))):
        units = ranks[rank]
        kept, peaks = found.memory.kept[row, place], found.memory.peaks[row, place]
        experts = costs.expert_parameters[combo, units].sum()
        assert kept[KEPT.index("expert")] == pytest.approx(experts)
        saved = costs.saved_bytes[:, combo, units].sum(axis=1)
        assert kept[-3:] == pytest.approx(saved)
        # Stage 0 never waits between halves.
        later = [u for u in units if u >= bounds[1]]
        halves = costs.weight_grad_bytes[combo, later].sum()
        assert kept[KEPT.index("weight_grad")] == pytest.approx(halves)
        transient = costs.transient_bytes[:, combo, units].max(axis=1)
        assert peaks[: len(PEAKS)] == pytest.approx(transient)


@pytest.mark.parametrize("row", range(len(CUTS)))
def test_each_stage_has_one_copy_of_a_tied_weight(row: int) -> None:
    costs = random_costs(1)
    found = summarize(costs, pairs_of([0] * 6)).memory
    pp, virtual, folded, combo = CUTS[row]
    bounds = cut_of(costs, row, [0] * 6)
    stages = [set(range(*pair)) for pair in itertools.pairwise(bounds)]
    ranks = [stages_of(rank, pp, virtual, folded) for rank in range(pp)]
    summed, calls = 0.0, 0
    copies: dict[str, list[float]] = {"dense": [0.0] * pp, "trained_dense": [0.0] * pp}
    for link, (first, second) in enumerate(zip(TIES.first, TIES.second, strict=True)):
        holder = next(s for s, units in enumerate(stages) if int(second) in units)
        maker = next(s for s, units in enumerate(stages) if int(first) in units)
        if holder == maker:
            continue
        rank, other = (
            next(r for r, own in enumerate(ranks) if s in own) for s in (holder, maker)
        )
        copies["dense"][rank] += costs.tied_parameters[combo, link]
        copies["trained_dense"][rank] += costs.tied_trained[combo, link]
        if rank != other:
            summed += costs.tied_trained[combo, link]
            calls += 1
    assert found.tied[row] == pytest.approx([summed, calls])
    for place, rank in enumerate((0, min(1, pp - 1), pp - 1, min(2, pp - 1))):
        units = [u for s in ranks[rank] for u in stages[s]]
        for name, field in (
            ("dense", costs.dense_parameters),
            ("trained_dense", costs.trained_dense),
        ):
            want = field[combo, units].sum() + copies[name][rank]
            assert found.kept[row, place, KEPT.index(name)] == pytest.approx(want)


@pytest.mark.parametrize("row", range(len(CUTS)))
def test_what_crosses_the_cuts_is_sent_and_received(row: int) -> None:
    costs = random_costs(1)
    found = summarize(costs, pairs_of([0] * 6))
    pp, virtual, folded, combo = CUTS[row]
    bounds = cut_of(costs, row, [0] * 6)
    inner = [costs.sent_bytes[combo, b - 1] for b in bounds[1:-1]]
    cut = [costs.cut_bytes[combo, b - 1] for b in bounds[1:-1]]
    saved = [0.0, *(costs.shared_bytes[combo, b - 1] for b in bounds[1:-1])]
    turn = {pp - 1} if folded else set()
    crossing = [c for s, c in enumerate(inner) if s not in turn and pp > 1]
    sent = sum(0.5 + c / 4.0 for c in crossing)
    assert found.sends[row, 0] == pytest.approx(sent)
    last = pp * virtual - 1
    local = {pp - 1} if folded else set()
    for place, rank in enumerate((0, min(1, pp - 1), pp - 1, min(2, pp - 1))):
        own = stages_of(rank, pp, virtual, folded)
        before, after = [0.0, *cut], [*cut, 0.0]
        want = {
            "received": sum(before[s] + after[s] for s in own),
            "shared": sum(saved[s] for s in own),
            "returned": sum(before[s] for s in own if s - 1 not in local and pp > 1),
            "sent": sum(after[s] for s in own if s not in local and pp > 1),
            "output": costs.output_bytes[combo] * (last in own and pp > 1),
        }
        crossing = found.memory.crossing[row, place]
        assert dict(zip(CROSSING, crossing, strict=True)) == pytest.approx(want)


def test_on_one_device_type_a_cut_depends_on_the_number_of_stages_alone() -> None:
    found = summarize(random_costs(1), pairs_of([0] * 6))
    # Six stages each: the model's sums agree, and so does what ranks of one stage send.
    looped, flat = (CUTS.index(cut) for cut in ((2, 3, 0, 0), (6, 1, 0, 0)))
    assert found.whole[looped] == pytest.approx(found.whole[flat])
    assert found.sends[looped, 0] == pytest.approx(found.sends[flat, 0])
