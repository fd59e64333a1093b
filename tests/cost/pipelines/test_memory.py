"""Memory of pipelines, against counts by hand on a pipeline of two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import CostModel, Recipe
from planner.cost.pipelines import PipelineMemory, pipeline_pricing
from planner.cost.strategy.stages import Stages
from planner.schema.methods.flushed import Flushed
from planner.schema.schedules import schedule_spec
from planner.space import build_strategy
from tests.cost.made import (
    HIDDEN,
    TOKENS,
    device,
    hosts,
    row,
    setting_for,
    uniform_graph,
)

#: One tensor of the residual stream; a unit saves six, and has two products, whose
#: outputs have a gradient each.
STREAM = 2.0 * TOKENS * HIDDEN
SAVED, HALVES = 6 * STREAM, 2 * STREAM


def pipeline(
    schedule: str,
    virtual: int,
    many: int = 4,
    *,
    keeps_graph: bool = True,
    keeps_sent: bool = False,
) -> Stages:
    """Two ranks, one unit a stage."""
    stages = 2 * virtual
    graph = uniform_graph(stages)
    strategy = build_strategy(
        row(
            pp=2,
            schedule=schedule_spec(schedule).code,  # type: ignore[arg-type]
            virtual_stages=virtual,
            num_microbatches=many,
        ),
        unit_names=graph.unit_names,
        bounds=list(range(stages + 1)),
        sharding={},
    )
    recipe = Recipe(name="made", keeps_graph=keeps_graph)
    kind = device(backend="gloo" if keeps_sent else "nccl")
    setting = setting_for(graph, hosts((1, 2, kind)), recipe=recipe)
    return CostModel(setting).stages(strategy)


def held(schedule: str, virtual: int, **changes: Any) -> PipelineMemory:
    stages = pipeline(schedule, virtual, **changes)
    return pipeline_pricing(schedule, Flushed()).memory(stages)


@pytest.mark.parametrize("keeps_sent", [False, True])
def test_a_stage_holds_what_it_saved_and_sent(keeps_sent: bool) -> None:
    # Rank 0 has two in flight, each with the output it sent; rank 1 has one, whose
    # input is a receive buffer. 1F1B waits for what it sends, whatever the backend.
    found = held("1F1B", 1, keeps_sent=keeps_sent)
    assert found.activations.tolist() == [2 * (SAVED + STREAM), SAVED - STREAM]
    # Activations come into stage 1, gradients into stage 0.
    assert found.received.tolist() == [STREAM, STREAM]


def test_gloo_keeps_what_was_sent_until_the_step_ends() -> None:
    without, with_it = (
        held("LoopedBFS", 2, keeps_sent=keeps).activations for keeps in (False, True)
    )
    # All four microbatches are in flight on both stages; whoever is done has sent
    # less than it saved.
    rank_0 = 4 * (SAVED + STREAM) + 4 * SAVED
    assert without.tolist() == [rank_0, 4 * SAVED + 4 * (SAVED - STREAM)]
    assert with_it.tolist() == without.tolist()
    # Interleaved microbatches are done while others are still to come.
    without, with_it = (
        held("Interleaved1F1B", 2, keeps_sent=keeps, many=16).activations
        for keeps in (False, True)
    )
    assert (with_it > without + 8 * STREAM).all()


def test_between_halves_weight_gradients_wait() -> None:
    # pp 2, one stage each: rank 1 holds a forward and up to two whose weight gradient
    # is due, or two of them and what is returned of the rest; rank 0 never splits.
    found = held("InterleavedZeroBubble", 1, keeps_sent=False)
    assert found.activations[0] == 2 * (SAVED + STREAM)
    last = SAVED - STREAM
    waiting = last + HALVES + STREAM
    # The last forward meets one that waits, and two whose gradients were sent back.
    assert found.activations[1] >= last + waiting
    assert found.activations[1] <= 2 * waiting + 2 * STREAM


def test_what_the_first_half_is_done_with_makes_room_for_gradients() -> None:
    # On every rank as many as 1F1B has on its first, and nothing of those that are
    # done: rank 1 sends back what nobody keeps.
    for many in (4, 16):
        found = held(
            "InterleavedZeroBubble", 1, keeps_sent=False, keeps_graph=False, many=many
        )
        assert found.activations.tolist() == [
            2 * (SAVED + STREAM),
            2 * (SAVED - STREAM),
        ]


def test_a_fold_sends_nothing_but_has_buffers() -> None:
    assert pipeline("ZBVZeroBubble", 2).rank.tolist() == [0, 1, 1, 0]
    found = held("ZBVZeroBubble", 2, keeps_sent=False)
    # Stages 1 and 2 pass one on within rank 1: two boundaries each, both ways.
    assert found.received.tolist() == [2 * STREAM, 4 * STREAM]


@pytest.mark.parametrize("schedule", ["InterleavedZeroBubble", "1F1B"])
def test_stage_0_leaves_its_backward_to_the_second_half(schedule: str) -> None:
    times = pipeline(schedule, 1).times
    into, weight = times.input_half, times.weight_half
    assert into + weight == pytest.approx(times.backward)
    if schedule == "1F1B":
        assert weight == pytest.approx(times.weight)
    else:
        assert (into[0], weight[1]) == (0.0, pytest.approx(times.weight[1]))
