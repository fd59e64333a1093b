"""Compiled blocks train as plain ones do, in every kind of strategy that takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from executors.launching.launcher import launch
from executors.launching.process_group import process_group
from planner.schema import Plan, Precision
from tests.distributed.cases import make_plan, reference, train
from tests.distributed.compare import Distance

#: A compiler takes its time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXACT = 1e-5
#: Of bfloat16, which has 8 bits.
NARROW_LOSS = 2e-3

PIPELINE = {"pp": 2, "num_microbatches": 4}
CASES: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": 2, "num_microbatches": 2},
    "ZeRO 2": {"dp_shard": 2, "zero_stage": 2, "num_microbatches": 4},
    "ZeRO 3 clipping": {"dp_shard": 2, "zero_stage": 3, "grad_clip_norm": 0.1},
    "ZeRO 3 selective": {"dp_shard": 2, "zero_stage": 3, "recompute": "selective"},
    "ZeRO 3 full": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "cp all_to_all": {"cp": 2},
    "cp ring": {"cp": 2, "zero_stage": 3, "context_algorithm": "ring"},
    "1F1B full": {**PIPELINE, "schedule": "1F1B", "recompute": "full"},
    "Interleaved1F1B": {
        **PIPELINE,
        "schedule": "Interleaved1F1B",
        "virtual_stages": 2,
    },
    "1F1B ZeRO 3": {
        **PIPELINE,
        "schedule": "1F1B",
        "dp_shard": 2,
        "zero_stage": 3,
    },
}


def train_rank(arguments: dict[str, Any], _: Any) -> dict[str, Any]:
    """Train as one rank, in a process of its own: code is kept for its lifetime."""
    plan = Plan.from_json(arguments["plan"])
    with process_group(torch.device("cpu"), timeout_s=700):
        history = train(arguments["plan"], 3)
    found: dict[str, Any] = {"graphs": counters["stats"]["unique_graphs"]}
    if "grads" in history[0]:
        far = Distance(history, reference(plan, 3))
        found |= {"largest": far.largest, "loss": far.loss}
    return found


def _run(**changes: Any) -> dict[str, Any]:
    plan = make_plan("llama", compile=True, **changes)
    found: dict[str, Any] = launch(
        "tests.distributed.test_compile:train_rank",
        {"plan": plan.to_json()},
        processes=plan.strategy.mesh.num_devices,
        env={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
        timeout_s=800,
    )[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_compiled_blocks_train_as_one_process_does(case: str) -> None:
    found = _run(**CASES[case])
    assert found["graphs"] >= 1
    assert found["largest"] <= EXACT


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_take_mixed_precision(ranks: int, recompute: str) -> None:
    shards = {"dp_shard": ranks, "zero_stage": 3} if ranks > 1 else {}
    precision = Precision(compute="bfloat16")
    found = _run(**shards, recompute=recompute, precision=precision)
    assert found["graphs"] >= 1
    assert found["loss"] <= NARROW_LOSS
