"""Tensors in the host memory change no bit of training, and are priced as found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from executors import prepare
from executors.data import synthetic_batch
from executors.dryrun import dry_run
from planner.schema import Offload, Optimizer, Plan, Precision
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan
from tests.distributed.planned import planned
from tests.distributed.pool import Pool
from tests.marked import cases
from tests.models.tiny import TINY

STEPS = 3

#: What is offloaded, and the rest of the strategy.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": (
        "parameters+activations",
        {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    ),
    "zero2": (
        "parameters",
        {"dp_shard": 2, "zero_stage": 2, "num_microbatches": 2},
    ),
    "bfloat16": (
        "parameters+activations",
        {"dp_shard": 2, "zero_stage": 3, "recompute": "full", "precision": Precision()},
    ),
    "ddp": ("optimizer+activations", {"dp_replicate": 2, "recompute": "full"}),
    "tp": (
        "optimizer+activations",
        {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    ),
    "1f1b": (
        "optimizer+activations",
        {
            "pp": 2,
            "num_microbatches": 4,
            "schedule": "1F1B",
            "grad_clip_norm": 0.5,
            "recompute": "full",
        },
    ),
    "zero3-tp": (
        "parameters+activations",
        {"dp_shard": 2, "tp": 2, "zero_stage": 3, "recompute": "full"},
    ),
}


def train(plan_json: str, steps: int, folder: str) -> list[float]:
    """Losses of steps, from a checkpoint if there is one."""
    plan = Plan.from_json(plan_json)
    losses = []
    with prepare(plan, lambda: build(plan.model.name)) as training:
        training.load(folder)
        while training.done < steps:
            losses.append(
                training.step(synthetic_batch(plan.workload, training.done)).loss
            )
        training.save(folder)
        losses.append(training.evaluate(synthetic_batch(plan.workload, 1000)))
    return losses


@pytest.mark.parametrize("case", cases(CASES, slow={"zero2", "bfloat16", "zero3-tp"}))
def test_losses_are_the_same_bit_for_bit_also_when_resumed(
    pool: Pool, tmp_path: Path, case: str
) -> None:
    name, changes = CASES[case]
    changes = {"optimizer": Optimizer(learning_rate=1e-2), **changes}
    plain = make_plan("llama", **changes)
    there = make_plan("llama", offload=Offload.from_name(name), **changes)
    world = plain.strategy.mesh.num_devices
    wanted = pool.run(train, world, plain.to_json(), STEPS, str(tmp_path / "plain"))[0]
    assert len(set(wanted)) == STEPS + 1
    folder = str(tmp_path / "there")
    first = pool.run(train, world, there.to_json(), 2, folder)[0]
    rest = pool.run(train, world, there.to_json(), STEPS, folder)[0]
    assert [*first[:2], *rest] == wanted


def _parts(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on a device by part: predicted, and counted."""
    stage = plan.prediction.memory[0]
    names = ("parameters", "gradients", "optimizer", "activations", "buffers")
    counted = dry_run(plan, TINY["tiny-llama"].build, 0)
    assert counted.failure is None
    predicted = {name: int(getattr(stage, f"{name}_bytes")) for name in names}
    return predicted, counted.memory_bytes


OFFLOADED = {
    "optimizer": {"dp_replicate": 2},
    "parameters": {"dp_shard": 2, "zero_stage": 1},
    "activations": {"dp_replicate": 2, "recompute": "full", "microbatch_size": 4},
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_what_devices_are_rid_of_is_what_hosts_hold_and_as_counted(name: str) -> None:
    adam = Optimizer(learning_rate=1e-2)
    plain, there = (
        planned("tiny-llama", optimizer=adam, offload=offload, **OFFLOADED[name])
        for offload in ("none", name)
    )
    predicted, counted = _parts(there)
    assert sum(predicted.values()) == pytest.approx(sum(counted.values()), rel=0.05)
    before, _ = _parts(plain)
    freed = sum(before.values()) - sum(predicted.values())
    assert freed > 0.02 * sum(before.values())
    wanted = {
        # Two states, and a copy of weights and gradients beside them.
        "optimizer": 2 * before["optimizer"],
        "parameters": 2 * before["optimizer"],
        # What four layers, the last norm and the head are given: float32 of 4 samples
        # of 16 tokens of 32 features.
        "activations": 6 * 4 * 4 * 16 * 32,
    }[name]
    found = there.prediction.memory[0].offloaded_bytes
    assert found == pytest.approx(wanted, rel=0.02)
    # ``fully_shard`` copies nothing on CPUs.
    slower = there.prediction.step_time_s - plain.prediction.step_time_s
    assert slower > 0 or (name == "parameters" and slower == 0)
    assert there.prediction.host_memory_bytes > plain.prediction.host_memory_bytes


@pytest.mark.parametrize(
    ("offload", "changes", "reason"),
    [
        ("parameters", {"dp_replicate": 2}, "use optimizer"),
        ("parameters", {"pp": 2, "dp_shard": 2, "zero_stage": 3}, "or pp=1"),
        ("activations", {"dp_replicate": 2}, "use recompute=full"),
        (
            "optimizer",
            {"dp_replicate": 2, "gradient_compression": "powersgd"},
            "was not tried",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    offload: str, changes: dict[str, Any], reason: str
) -> None:
    plan = make_plan(
        "llama", offload=Offload.from_name(offload), semantics="approximate", **changes
    )
    assert any(reason in one for one in executor_violations(plan.strategy))
