"""Activations of a unit under each recipe, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.cost.context import Combinations
from planner.cost.recipes import Recipe
from planner.cost.units import UnitCosts, price_units
from planner.graph import Kernel, ModelGraph
from planner.schema import Precision
from tests.cost.made import HIDDEN, TOKENS, device, hosts, setting_for, uniform_graph

STREAM = 2.0 * TOKENS * HIDDEN
VOCAB = 4 * HIDDEN
LOGITS = 2.0 * TOKENS * VOCAB
CLUSTER = hosts((1, 8, device()))
#: Kinds of recomputation, first axis of saved and transient bytes.
NONE, SELECTIVE, FULL = range(3)


def priced(
    graph: ModelGraph, recipe: Recipe, tp: int = 1, split: int = 0, **more: Any
) -> UnitCosts:
    one = np.ones(1, dtype=np.int64)
    context = setting_for(graph, CLUSTER, recipe=recipe, **more)
    combos = Combinations(
        tp=tp * one, cp=one, ep=one, microbatch=one, sequence_parallel=split * one
    )
    return price_units(context, combos, context.layer_lines(combos))


def with_head() -> ModelGraph:
    """Two layers and a head, whose fp32 log-softmax is kept: twice the logits."""
    graph = uniform_graph(3)
    product = Kernel(
        kind="matmul",
        m=TOKENS,
        n=VOCAB,
        k=HIDDEN,
        forward_bytes=STREAM + LOGITS,
        weight_bytes=2.0 * HIDDEN * VOCAB,
        style="colwise",
    )
    head = replace(
        graph.blocks[2],
        kind="head",
        repeat="head",
        kernels=(product,),
        tp_collectives=0,
        saved_bytes=STREAM + 2 * LOGITS,
        saved_tensor_bytes=2 * LOGITS,
        saved_selective_bytes=STREAM + LOGITS,
        saved_selective_tensor_bytes=LOGITS,
        transient_bytes=4 * LOGITS,
    )
    return replace(graph, blocks=(*graph.blocks[:2], head))


def head_bytes(recipe: Recipe, tp: int = 1) -> tuple[float, float]:
    """Kept without recomputation, and the working set with full recomputation."""
    costs = priced(with_head(), recipe, tp)
    return costs.saved_bytes[NONE, 0, 2], costs.transient_bytes[FULL, 0, 2]


def test_a_head_that_is_not_recomputed_is_not_kept_twice() -> None:
    kept, working = head_bytes(Recipe(name="x", recompute_ends=False))
    assert (kept, working) == (STREAM + 2 * LOGITS, 4 * LOGITS)
    _, again = head_bytes(Recipe(name="x"))
    # The input and the loss's log-softmax are kept.
    assert again == 4 * LOGITS + kept - STREAM - 2 * LOGITS


def test_tp_divides_all_of_a_parallel_loss() -> None:
    recipe = Recipe(name="x", recompute_ends=False, loss_parallel=True)
    whole, part = head_bytes(recipe), head_bytes(recipe, tp=4)
    assert part[0] - STREAM == pytest.approx((whole[0] - STREAM) / 4)
    assert part[1] == pytest.approx(whole[1] / 4)


def test_a_loss_over_gathered_logits_is_whole_on_every_rank() -> None:
    recipe = Recipe(name="x", recompute_ends=False)
    assert head_bytes(recipe, tp=4) == head_bytes(recipe)


def test_gathering_again_keeps_shards_alone() -> None:
    graph = uniform_graph(4, saved_gathered_bytes=STREAM)
    kept, again = (
        priced(graph, Recipe(name="x", regathers=flag), tp=4, split=1)
        for flag in (False, True)
    )
    assert kept.saved_bytes[NONE, 0, 1] == pytest.approx((5 / 4 + 1) * STREAM)
    assert again.saved_bytes[NONE, 0, 1] == pytest.approx(6 / 4 * STREAM)


@pytest.mark.parametrize(("tp", "split"), [(1, 0), (4, 0), (4, 1)])
def test_dropout_keeps_a_byte_of_each_element_of_the_stream(
    tp: int, split: int
) -> None:
    graph = uniform_graph(4)
    without, masks = (
        priced(graph, Recipe(name="x", dropout=flag), tp, split)
        for flag in (False, True)
    )
    more = masks.saved_bytes - without.saved_bytes
    one = TOKENS * HIDDEN / (tp if split else 1)
    assert more[NONE, 0] == pytest.approx([one] * 4)
    assert more[FULL, 0] == pytest.approx([0.0] * 4)


@pytest.mark.parametrize(("tp", "split"), [(1, 0), (4, 0), (4, 1)])
def test_alternate_recomputation_keeps_half_of_what_products_put_out(
    tp: int, split: int
) -> None:
    graph = uniform_graph(4)
    light, half = (
        priced(graph, Recipe(name="x", selective=kind), tp, split)
        for kind in ("light", "alternate")
    )
    # One colwise product, which tp divides; one rowwise, whose output is the stream.
    less = (STREAM / tp + STREAM / (tp if split else 1)) / 2
    found = light.saved_bytes - half.saved_bytes
    kept = light.saved_bytes[SELECTIVE, 0] - light.saved_bytes[FULL, 0]
    assert found[SELECTIVE, 0] == pytest.approx(np.minimum(less, kept))
    assert found[[NONE, FULL]] == pytest.approx(0.0)
    # What is not kept is made again, so that the peak of one unit stays.
    total = [c.saved_bytes + c.transient_bytes for c in (light, half)]
    assert total[1][SELECTIVE, 0] == pytest.approx(total[0][SELECTIVE, 0])


def _replayed(
    costs: UnitCosts,
    kind: int,
    *,
    head: int,
    gradients: bool = False,
    weights: bool = False,
    released: bool = False,
) -> float:
    """Most bytes of one backward beside all that was saved, event by event."""
    saved = costs.saved_bytes[kind, 0]
    working = costs.transient_bytes[kind, 0]
    scalars = costs.dense_parameters[0]
    alive, most, copied = float(saved.sum()), 0.0, 0.0
    for unit in reversed(range(len(saved))):
        before = scalars[unit - 1] if unit else 0.0
        gathered = 2 * (scalars[unit] + before) if weights else 0.0
        # A loss is done with before its head's weights are wanted.
        early = 0.0 if unit == head else gathered
        most = max(most, alive + working[unit] + early + copied)
        alive -= saved[unit]
        if gradients:
            copied = 4 * scalars[unit]
            # A unit's weights go before its gradients are copied.
            room = 2 * scalars[unit] if released else 0.0
            wide = max(copied - room, LOGITS if unit == head else 0.0)
            most = max(most, alive + gathered + 2 * scalars[unit] + wide)
    return most - float(saved.sum())


@pytest.mark.parametrize("kind", [NONE, SELECTIVE, FULL])
@pytest.mark.parametrize("width", [1.0, 100.0])
def test_weights_of_a_unit_are_in_flight_while_it_is_computed(
    kind: int, width: float
) -> None:
    graph = with_head()
    parameters = [
        replace(one, shape=(int(width * one.shape[0]), *one.shape[1:]))
        for one in graph.parameters
    ]
    costs = priced(replace(graph, parameters=tuple(parameters)), Recipe(name="x"))
    for index, flying in enumerate(
        (
            {},
            {"gradients": True},
            {"gradients": True, "weights": True},
            {"gradients": True, "released": True},
        )
    ):
        found = costs.whole_bytes[0, index, kind, 0]
        assert found == pytest.approx(_replayed(costs, kind, head=2, **flying))


def test_a_root_group_stays_gathered_to_the_end() -> None:
    graph = with_head()
    ends, last = [
        priced(graph, Recipe(name="x", recompute_ends=False, root_stays=flag))
        for flag in (False, True)
    ]
    head = 2.0 * ends.dense_parameters[0, 2]
    assert head > 0
    # The first two units are the last to be done: the head is there beside them.
    more = last.whole_bytes[1] - ends.whole_bytes[1]
    weights = 2
    assert more[weights, NONE, 0] == pytest.approx(head)
    assert (np.delete(more, weights, axis=0) == 0).all()


def _alone(costs: UnitCosts, kind: int, *, casts: bool, head: int) -> float:
    """Most bytes of the only device's backward, event by event."""
    saved, working = costs.saved_bytes[kind, 0], costs.transient_bytes[kind, 0]
    scalars = costs.dense_parameters[0]
    narrow = 2 * scalars if casts else 0 * scalars
    alive, weights, most = float(saved.sum()), float(narrow.sum()), 0.0
    reduced = copied = 0.0
    for unit in reversed(range(len(saved))):
        most = max(most, alive + weights + reduced + copied + working[unit])
        alive -= saved[unit]
        made = (2 if casts else 4) * scalars[unit] + (LOGITS if unit == head else 0)
        most = max(most, alive + weights + reduced + copied + made)
        weights -= narrow[unit]
        reduced += 4 * scalars[unit]
        copied = 4 * scalars[unit] if casts else 0.0
        most = max(most, alive + weights + reduced + copied)
    return most


def _casting(costs: UnitCosts, kind: int, *, head: int) -> float:
    """The same where each unit casts its two weights of equal size."""
    saved, working = costs.saved_bytes[kind, 0], costs.transient_bytes[kind, 0]
    scalars = costs.dense_parameters[0]
    alive, most, wide = float(saved.sum()), 0.0, 0.0
    for unit in reversed(range(len(saved))):
        # Units that are computed again cast again.
        casts = 2 * (scalars[unit] if kind == FULL else scalars[: unit + 1].sum())
        most = max(most, alive + casts + wide + working[unit])
        alive -= saved[unit]
        # A product's gradient takes the place of its cast, but beside the logits.
        made = 2 * scalars[unit] + LOGITS if unit == head else 0.0
        most = max(most, alive + casts + wide + made)
        wide += 4 * scalars[unit]
        # That of the second weight is widened first, and gone.
        most = max(most, alive + casts - scalars[unit] + wide)
    return most


@pytest.mark.parametrize("kind", [NONE, FULL])
@pytest.mark.parametrize("width", [1.0, 1000.0])
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_gradients_of_a_lone_device_come_as_its_weights_and_activations_go(
    kind: int, width: float, compute: Any
) -> None:
    graph = with_head()
    parameters = [
        replace(one, shape=(int(width * one.shape[0]), *one.shape[1:]))
        for one in graph.parameters
    ]
    graph = replace(graph, parameters=tuple(parameters), dtype=compute)
    costs = priced(graph, Recipe(name="x"), precision=Precision(compute=compute))
    wrapped, own = costs.alone_bytes[..., kind, 0]
    saved = costs.saved_bytes[kind, 0].sum()
    casts = compute == "bfloat16"
    expected = _alone(costs, kind, casts=casts, head=2)
    assert wrapped.sum() + saved == pytest.approx(expected)
    if casts:
        expected = _casting(costs, kind, head=2)
    assert own.sum() + saved == pytest.approx(expected)
    scalars = costs.dense_parameters[0].sum()
    weights, gradients, _ = wrapped
    if width == 1:
        # All that was saved is there: the beginning is the worst.
        assert (weights, gradients) == (2 * scalars * casts, 0)
    else:
        assert gradients > 2 * scalars > weights
