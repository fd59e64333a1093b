"""Prefetch depths of a plan, as fully_shard has been told them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from executors.dryrun.world import fake_group
from executors.mesh import build_mesh
from executors.parallelize import parallelize
from planner.schema import Overlap
from tests.distributed.cases import UNITS, build, make_plan

BLOCKS = [f"model.layers.{index}" for index in range(4)]
#: The last norm has vectors alone, which the root gathers.
ORDER = ["model.embed_tokens", *BLOCKS, "lm_head"]


def _sharded(name: str, overlap: Overlap, **changes: Any) -> nn.Module:
    plan = make_plan(name, dp_shard=2, zero_stage=3, overlap=overlap, **changes)
    with fake_group(0, 2):
        place = build_mesh(plan.strategy, torch.device("cpu"))
        part = parallelize(build(name), plan.strategy, place, units=UNITS[name])
    return part.module


def _told(model: Any, unit: str, way: str) -> list[str]:
    """Names of the modules that a unit gathers for those after it."""
    names = {
        id(module._get_fsdp_state()): name
        for name, module in model.named_modules()
        if hasattr(module, "_get_fsdp_state")
    }
    state = model.get_submodule(unit)._get_fsdp_state()
    return [names[id(s)] for s in getattr(state, f"_states_to_{way}_prefetch")]


@pytest.mark.parametrize("depth", [1, 2, 64])
def test_each_unit_gathers_those_that_follow_it(depth: int) -> None:
    overlap = Overlap(forward_prefetch=depth, backward_prefetch=depth)
    model = _sharded("llama", overlap)
    for index, unit in enumerate(ORDER):
        ahead = ORDER[index + 1 : index + 1 + depth]
        behind = list(reversed(ORDER[:index]))[:depth]
        assert _told(model, unit, "forward") == ahead
        assert _told(model, unit, "backward") == behind


def test_nothing_is_told_by_default() -> None:
    model = _sharded("llama", Overlap())
    for unit in ORDER:
        assert not _told(model, unit, "forward")
        assert not _told(model, unit, "backward")


def test_experts_are_gathered_with_the_unit_around_them() -> None:
    model = _sharded("mixtral", Overlap(forward_prefetch=1), ep=2)
    assert _told(model, BLOCKS[0], "forward") == [BLOCKS[1], f"{BLOCKS[1]}.mlp.experts"]
    assert not _told(model, f"{BLOCKS[0]}.mlp.experts", "forward")


def test_weights_of_fewer_rows_than_ranks_are_cut_along_another_dimension() -> None:
    plan = make_plan("mixtral", dp_shard=8, zero_stage=3)
    with fake_group(0, 8):
        place = build_mesh(plan.strategy, torch.device("cpu"))
        model = parallelize(
            build("mixtral"), plan.strategy, place, units=UNITS["mixtral"]
        ).module
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        cut = 1 if parameter.shape[0] < 8 else 0
        assert parameter.placements == (Shard(cut),), name
        assert parameter.to_local().numel() * 8 == parameter.numel(), name
