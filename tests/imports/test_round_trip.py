"""Exported configs are read back as the strategies that they were written for."""

from __future__ import annotations

from typing import Any

import pytest

from planner.export import export_files
from planner.export.torchrun import case_of
from planner.imports import Imported, Wanted, detect_source, import_text, name_stages
from planner.schema import Plan
from planner.targets import get_target
from tests.export.config_plans import ACCELERATE, DEEPSPEED
from tests.export.framework_plans import framework_plans

MEGATRON = {
    name: plan
    for name, plan in framework_plans(1).items()
    if not get_target("megatron").violations(case_of(plan))
}
#: Fields that a config leaves to the training script.
SCRIPT: dict[str, set[str]] = {
    "megatron": set(),
    "accelerate": {"precision", "optimizer", "grad_clip_norm"},
    "deepspeed": {"compile", "stages"},
}


def _read(source: str, file: str, plan: Plan) -> Imported:
    text = export_files(plan, source)[file]
    assert detect_source(text, file) == source
    mesh, strategy = plan.strategy.mesh, plan.strategy
    wanted = Wanted(
        world_size=mesh.num_devices,
        global_batch=strategy.global_batch,
        microbatch_size=strategy.microbatch_size,
    )
    return import_text(source, text, wanted, file)


def _said(strategy: Any, left: set[str]) -> dict[str, Any]:
    """The strategy as a config states it: without the model's patterns and devices."""
    data: dict[str, Any] = strategy.to_data()
    data["stages"] = [stage["recompute"] for stage in data["stages"]] or ["none"]
    data["sharding"] = data["sharding"]["sequence_parallel"]
    if strategy.mesh.cp == 1:
        data["context_algorithm"] = None
    if strategy.mesh.shards == 1:
        data["zero_stage"] = None
    for key in ("device_ranges", "semantics", *left):
        data.pop(key, None)
    return data


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron(name: str) -> None:
    plan = MEGATRON[name]
    found = _read("megatron", "megatron.args", plan)
    assert _said(found.strategy, set()) == _said(plan.strategy, set())
    modules = [m for stage in plan.strategy.stages for m in stage.modules]
    cut = [stage.modules for stage in name_stages(found, modules).stages]
    if found.cut and plan.strategy.mesh.pp > 1:
        assert cut == [stage.modules for stage in plan.strategy.stages]


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate(name: str) -> None:
    plan, left = ACCELERATE[name], SCRIPT["accelerate"]
    found = _read("accelerate", "accelerate.yaml", plan)
    assert _said(found.strategy, left) == _said(plan.strategy, left)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(name: str) -> None:
    plan, left = DEEPSPEED[name], SCRIPT["deepspeed"]
    found = _read("deepspeed", "ds_config.json", plan)
    assert _said(found.strategy, left) == _said(plan.strategy, left)
