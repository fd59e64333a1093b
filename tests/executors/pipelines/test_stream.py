"""Where the residual stream crosses a cut in shards, and what stages say of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from executors.pipelines.stages import LoweredStage, lower
from executors.pipelines.stream import cuts_inside_stream
from planner.schema import Plan, Stage
from tests.distributed.cases import SEQ, UNITS, VOCAB, build, make_plan

HIDDEN = 32


def _plan(cuts: list[tuple[str, ...]], **changes: Any) -> Plan:
    plan = make_plan("llama", pp=2, tp=2, **changes)
    stages = tuple(Stage(rank=i, modules=cut) for i, cut in enumerate(cuts))
    strategy = plan.strategy.model_copy(update={"stages": stages})
    return plan.model_copy(update={"strategy": strategy})


def _cut_at(*bounds: int) -> list[tuple[str, ...]]:
    units = UNITS["llama"]
    edges = (0, *bounds, len(units))
    return [units[a:b] for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize(
    ("bounds", "inside"),
    [
        # embed | 4 layers | norm, head: scattered by the second, gathered by it.
        ((1, 5), set()),
        ((2, 3, 4), {0, 1, 2}),
        # The stage that ends with the last layer gathers.
        ((1, 3, 5), {1}),
        ((2, 6), {0}),
    ],
)
def test_the_stream_is_divided_between_first_and_last_block(
    bounds: tuple[int, ...], inside: set[int]
) -> None:
    plan = _plan(_cut_at(*bounds), sequence_parallel=True)
    assert cuts_inside_stream(build("llama"), plan.strategy) == inside


def test_without_sequence_parallelism_the_stream_is_whole() -> None:
    assert not cuts_inside_stream(build("llama"), _plan(_cut_at(3)).strategy)


def _lowered(model: torch.nn.Module, cuts: Any, **changes: Any) -> list[LoweredStage]:
    ids = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    return lower(
        model,
        [Stage(rank=i, modules=cut) for i, cut in enumerate(cuts)],
        {"input_ids": ids},
        kind="cross_entropy",
        device=torch.device("cpu"),
        wire=(torch.float32, torch.float32),
        **changes,
    )


def test_stages_tell_the_shapes_of_shards() -> None:
    first, second, third = _lowered(
        build("llama"), _cut_at(3, 5), stream_shards=2, inside_stream={0}
    )
    assert [tuple(t.shape) for t in first.sends] == [(2, SEQ // 2, HIDDEN)]
    assert [tuple(t.shape) for t in second.receives] == [(2, SEQ // 2, HIDDEN)]
    assert [tuple(t.shape) for t in second.sends] == [(2, SEQ, HIDDEN)]
    flags = [(s.comes_sharded, s.leaves_sharded) for s in (first, second, third)]
    assert flags == [(False, True), (True, False), (False, False)]


def test_a_stream_that_cannot_be_dealt_out_crosses_whole() -> None:
    stages = _lowered(build("llama"), _cut_at(3), stream_shards=3, inside_stream={0})
    assert not stages[0].leaves_sharded
    assert [tuple(t.shape) for t in stages[1].receives] == [(2, SEQ, HIDDEN)]
