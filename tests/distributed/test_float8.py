"""Training with linear layers that multiply in float8, by torchao.

Tests that need it are skipped without: ``pip install 'meshwright[float8]'``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from executors import prepare, run
from executors.data import synthetic_batch
from executors.strategies.low_precision import multiply_in_float8
from planner import plan
from planner.errors import ExecutionError, StrategyError
from planner.schema import Plan, Precision
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan
from tests.distributed.compare import distance
from tests.distributed.planned import graph_of
from tests.distributed.pool import Pool

with_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)

FLOAT8 = Precision(compute="float8")
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3, "recompute": "selective"},
    "pp": {"pp": 2, "num_microbatches": 2, "schedule": "1F1B"},
    "cp": {"cp": 2, "zero_stage": 2},
}


@with_torchao
@pytest.mark.parametrize("mesh", MESHES)
def test_float8_stays_within_its_rounding(pool: Pool, mesh: str) -> None:
    """Operands have 3 bits behind the first, gradients 2; bfloat16 has 7."""
    far = distance(pool, "llama", precision=FLOAT8, **MESHES[mesh])
    narrow = distance(pool, "llama", precision=Precision(), **MESHES[mesh])
    assert far.loss <= 2e-2
    assert 2 * narrow.first_gradients <= far.first_gradients <= 0.5


def steps(plan_json: str, folder: str) -> dict[str, Any]:
    """Train, save, train on; then load and train on again."""
    made = Plan.from_json(plan_json)
    with prepare(made, lambda: build(made.model.name)) as training:
        (inner,) = (part.inner for part in training.trainer.parts.values())
        # FSDP puts its name before the class of a unit.
        kinds = {
            name: type(one).__name__.removeprefix("FSDP")
            for name, one in inner.named_modules()
        }
        for step in range(2):
            training.step(synthetic_batch(made.workload, step))
        training.save(folder)
        later = [synthetic_batch(made.workload, step) for step in (2, 3)]
        on = [training.step(batch).loss for batch in later]
        training.load(folder)
        again = [training.step(batch).loss for batch in later]
    return {"kinds": kinds, "on": on, "again": again}


@with_torchao
def test_all_but_the_head_is_cast_and_a_checkpoint_goes_on(
    pool: Pool, tmp_path: Path
) -> None:
    made = make_plan("llama", precision=FLOAT8, dp_shard=2, zero_stage=3)
    found = pool.run(steps, 2, made.to_json(), str(tmp_path))[0]
    cast = {name for name, kind in found["kinds"].items() if kind == "Float8Linear"}
    plain = {name for name, kind in found["kinds"].items() if kind == "Linear"}
    assert plain == {"lm_head"}
    assert {name.rsplit(".", 1)[1] for name in cast} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert found["again"] == found["on"]


def checked(plan_json: str) -> list[float]:
    """Train after comparing the first step with one process, which casts as well."""
    made = Plan.from_json(plan_json)
    result = run(made, lambda: build(made.model.name), steps=2, check_first_step=True)
    return list(result.losses)


@with_torchao
def test_the_first_step_is_that_of_one_process(pool: Pool) -> None:
    made = make_plan("llama", precision=FLOAT8, dp_shard=2, zero_stage=2)
    losses = pool.run(checked, 2, made.to_json())[0]
    assert len(losses) == 2


@with_torchao
def test_sizes_that_16_does_not_divide_keep_their_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 20), nn.Linear(20, 32))
    count = multiply_in_float8(model, ["0", "1", "2"], "", torch.device("cpu"))
    assert count == 1
    assert [type(one).__name__ for one in model] == ["Float8Linear", "Linear", "Linear"]


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    model = nn.Sequential(nn.Linear(32, 48))
    with pytest.raises(ExecutionError, match=r"pip install 'meshwright\[float8\]'"):
        multiply_in_float8(model, ["0"], "", torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": 2}, "casts whole; use tp=1"),
        (
            {
                "dp_replicate": 2,
                "semantics": "approximate",
                "synchronisation": {"kind": "local_steps", "period": 2},
            },
            "not those that torchao casts",
        ),
    ],
)
def test_what_torchao_does_not_cast_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    strategy = make_plan("llama", precision=FLOAT8, **changes).strategy
    assert any(reason in one for one in executor_violations(strategy))


def test_experts_are_refused_when_the_plan_is_made() -> None:
    strategy = make_plan("llama", precision=FLOAT8).strategy
    assert not executor_violations(strategy)
    (reason,) = executor_violations(strategy, experts=8)
    assert "compute=float8 of 8 experts" in reason


def test_devices_without_float8_are_refused() -> None:
    graph = graph_of("tiny-llama")
    with pytest.raises(StrategyError, match="a100-80, which has no float8"):
        plan(graph, "dgx-a100:1", global_batch=8, precision=FLOAT8)
    found = plan(graph, "dgx-h100:1", global_batch=8, precision=FLOAT8)
    assert not found.not_runnable
