"""Meshes, stages and devices of a strategy."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.schema import AXES, Mesh, Optimizer, Strategy
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.schedules import schedule_spec, schedules
from planner.schema.strategy_parts import matches_pattern
from tests.schema.documents import strategies

degrees = st.integers(1, 5)


@given(sizes=st.tuples(degrees, degrees, degrees, degrees, degrees))
def test_ranks_are_row_major_over_the_axes(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(**dict(zip(AXES, sizes, strict=True)))
    assert mesh.num_devices == np.prod(sizes)
    for rank in {0, mesh.num_devices // 2, mesh.num_devices - 1}:
        place = mesh.coordinates(rank)
        assert tuple(place) == AXES
        assert np.ravel_multi_index(tuple(place.values()), sizes) == rank
    strides = np.array(np.empty(sizes, np.int8).strides)
    assert [mesh.stride(axis) for axis in AXES] == strides.tolist()


@settings(max_examples=50, deadline=None)
@given(strategy=strategies())
def test_every_stage_has_one_rank_and_every_rank_its_stages(strategy: Strategy) -> None:
    if schedule_spec(strategy.schedule).folded and strategy.virtual_stages != 2:
        strategy = strategy.model_copy(update={"virtual_stages": 2})
    held = [strategy.stages_of_rank(rank) for rank in range(strategy.mesh.pp)]
    count = strategy.mesh.pp * strategy.virtual_stages
    assert sorted(itertools.chain(*held)) == list(range(count))
    assert {len(stages) for stages in held} == {strategy.virtual_stages}
    for rank, stages in enumerate(held):
        assert all(strategy.rank_of_stage(stage) == rank for stage in stages)


def test_a_v_comes_back_to_the_first_rank() -> None:
    v = Strategy(mesh=Mesh(pp=4), schedule="ZBVZeroBubble", virtual_stages=2)
    assert [v.rank_of_stage(i) for i in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    loop = Strategy(mesh=Mesh(pp=4), schedule="Interleaved1F1B", virtual_stages=2)
    assert [loop.rank_of_stage(i) for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_stage_on_the_wrong_rank_is_refused() -> None:
    stages = [{"rank": 1, "modules": []}, {"rank": 0, "modules": []}]
    with pytest.raises(ValidationError, match=r"stage 0 is on pp rank 1.* on rank 0"):
        Strategy.model_validate({"mesh": {"pp": 2}, "stages": stages})


def test_device_ids_follow_the_ranges_in_their_order() -> None:
    strategy = Strategy(mesh=Mesh(tp=4), device_ranges=((6, 8), (1, 3)))
    assert strategy.device_ids() == (6, 7, 1, 2)
    assert Strategy(mesh=Mesh(tp=4)).device_ids() == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("name", "momentum", "states"),
    [
        *(("AdamW", 0.0, 2), ("Adam", 0.0, 2), ("SGD", 0.0, 0), ("SGD", 0.9, 1)),
        *(("Adagrad", 0.0, 1), ("RMSprop", 0.0, 1), ("RMSprop", 0.9, 2)),
    ],
)
def test_states_of_optimizers(name: str, momentum: float, states: int) -> None:
    optimizer = Optimizer.model_validate({"name": name, "momentum": momentum})
    assert optimizer.states_per_parameter == states


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"momentum": 0.9}, "momentum=0.9 with optimizer AdamW, .*use SGD, RMSprop"),
        ({"name": "SGD", "betas": [0.9, 0.99]}, "with optimizer SGD, .*use AdamW"),
    ],
)
def test_settings_that_an_optimizer_lacks_are_refused(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        Optimizer.model_validate_json(json.dumps(given))


@pytest.mark.parametrize(
    "name", [n for n, kind in OPTIMIZERS.items() if kind.elementwise]
)
def test_torch_keeps_as_many_states_and_has_the_same_settings(name: str) -> None:
    kind = OPTIMIZERS[name]
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    momentum = 0.5 if kind.momentum else 0.0
    spec = Optimizer.model_validate({"name": name, "momentum": momentum})
    settings = {"momentum": momentum} if kind.momentum else {}
    made = getattr(torch.optim, name)([parameter], lr=1e-3, **settings)
    parameter.grad = torch.ones_like(parameter)
    made.step()
    large = [v for v in made.state[parameter].values() if v.shape == parameter.shape]
    assert len(large) == spec.states_per_parameter
    assert made.param_groups[0].get("betas") == kind.betas
    assert ("momentum" in made.param_groups[0]) == kind.momentum


def test_the_label_names_what_is_not_1() -> None:
    strategy = Strategy.model_validate(
        {
            "mesh": {"pp": 2, "dp_shard": 4, "tp": 8, "ep": 2},
            "zero_stage": 3,
            "schedule": "Interleaved1F1B",
            "virtual_stages": 2,
            "num_microbatches": 16,
            "stages": [
                {"rank": i % 2, "modules": ["a"], "recompute": kind}
                for i, kind in enumerate(["none", "full", "full", "full"])
            ],
        }
    )
    assert strategy.label() == (
        "pp2 dp_shard4 tp8 ep2 zero3 Interleaved1F1B/v2 mb1x16 full+none"
    )
    assert strategy.global_batch == 64
    assert Strategy().label() == "mb1x1"


def test_schedules_are_torchs() -> None:
    """Except LoopedBFS and GPipe under the names that torch accepts, too.

    Eager1F1B is torch's Interleaved1F1B of one stage a rank.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    for spec in schedules():
        name = {"Eager1F1B": "Interleaved1F1B"}.get(spec.name, spec.name)
        assert get_schedule_class(name).__name__ == spec.runs


def test_patterns_match_from_the_end() -> None:
    assert matches_pattern("layers.*.up", "model.layers.3.up")
    assert matches_pattern("lm_head", "lm_head")
    assert not matches_pattern("layers.*.up", "model.layers.3.mlp.up")
    assert not matches_pattern("a.b.c", "b.c")


def test_a_pattern_is_matched_by_those_that_mean_all_of_it() -> None:
    assert matches_pattern("layers.*.up", "model.layers.*.up")
    assert not matches_pattern("layers.0.up", "model.layers.*.up")
