"""Exported configs are read back as the strategies that they were written for."""

from __future__ import annotations

from typing import Any

import pytest

from planner.export import export_files
from planner.export.torchrun import case_of
from planner.imports import Imported, Wanted, detect_source, import_text, name_stages
from planner.schema import Plan
from planner.targets import get_target
from tests.export.config_plans import ACCELERATE, DEEPSPEED, NANOTRON
from tests.export.framework_plans import framework_plans

MEGATRON = {
    name: plan
    for name, plan in framework_plans(1).items()
    if not get_target("megatron").violations(case_of(plan))
}
TORCHTITAN = {
    (target, name): plan
    for name, plan in framework_plans(2).items()
    for target in ("torchtitan", "torchtitan-0.2")
    if not get_target(target).violations(case_of(plan))
}
#: Fields that a config leaves to the training script.
SCRIPT: dict[str, set[str]] = {
    "megatron": set(),
    "accelerate": {"precision", "optimizer", "grad_clip_norm"},
    "deepspeed": {"compile", "stages"},
    "nanotron": {"stages"},
    "torchtitan": {"context_algorithm"},
}


def _read(source: str, file: str, plan: Plan, target: str = "") -> Imported:
    text = export_files(plan, target or source)[file]
    assert detect_source(text, file) == source
    mesh, strategy = plan.strategy.mesh, plan.strategy
    wanted = Wanted(
        world_size=mesh.num_devices,
        global_batch=strategy.global_batch,
        microbatch_size=strategy.microbatch_size,
    )
    return import_text(source, text, wanted, file)


def _said(strategy: Any, left: set[str], plan: Plan) -> dict[str, Any]:
    """The strategy as a config states it: without the model's patterns and devices.

    What the plan does not give is left to the launcher, which has an own default.
    """
    data: dict[str, Any] = strategy.to_data()
    given = plan.strategy.optimizer
    for key in ("weight_decay", "betas"):
        if getattr(given, key) is None:
            del data["optimizer"][key]
    if plan.strategy.grad_clip_norm is None:
        del data["grad_clip_norm"]
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
    assert _said(found.strategy, set(), plan) == _said(plan.strategy, set(), plan)
    modules = [m for stage in plan.strategy.stages for m in stage.modules]
    cut = [stage.modules for stage in name_stages(found, modules).stages]
    if found.cut and plan.strategy.mesh.pp > 1:
        assert cut == [stage.modules for stage in plan.strategy.stages]


@pytest.mark.parametrize("name", ACCELERATE)
def test_accelerate(name: str) -> None:
    plan, left = ACCELERATE[name], SCRIPT["accelerate"]
    found = _read("accelerate", "accelerate.yaml", plan)
    assert _said(found.strategy, left, plan) == _said(plan.strategy, left, plan)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_deepspeed(name: str) -> None:
    plan, left = DEEPSPEED[name], SCRIPT["deepspeed"]
    found = _read("deepspeed", "ds_config.json", plan)
    assert _said(found.strategy, left, plan) == _said(plan.strategy, left, plan)


@pytest.mark.parametrize("name", NANOTRON)
def test_nanotron(name: str) -> None:
    plan, left = NANOTRON[name], SCRIPT["nanotron"]
    found = _read("nanotron", "plan.nanotron.yaml", plan)
    assert _said(found.strategy, left, plan) == _said(plan.strategy, left, plan)


@pytest.mark.parametrize(("target", "name"), TORCHTITAN)
def test_torchtitan(target: str, name: str) -> None:
    plan, left = TORCHTITAN[target, name], SCRIPT["torchtitan"]
    old = target.endswith("0.2")
    file = "torchtitan.toml" if old else "meshwright_recipe.py"
    found = _read("torchtitan", file, plan, target)
    if not old:
        left = left | {"sharding"}
    assert _said(found.strategy, left, plan) == _said(plan.strategy, left, plan)
