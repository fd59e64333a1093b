"""The dry run against the truth: the same plans on real processes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from executors.data import synthetic_batch
from executors.dryrun import dry_run
from executors.measuring.measure import measure_step
from executors.measuring.memory import LiveMemory
from executors.mesh import arrange
from executors.trainer import Trainer
from planner.schema import Optimizer, Plan
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool
from tests.marked import cases

ADAM = Optimizer(name="AdamW", learning_rate=1e-3)

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"dp_replicate": 2},
    "accumulated replicas": {"dp_replicate": 2, "num_microbatches": 2},
    "zero2": {"dp_shard": 2, "zero_stage": 2, "num_microbatches": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3, "optimizer": ADAM},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    "clipped zero3": {"dp_shard": 2, "zero_stage": 3, "grad_clip_norm": 0.1},
    "tensor": {"tp": 2, "sequence_parallel": True, "grad_clip_norm": 0.1},
    "loss parallel": {"tp": 2, "sequence_parallel": True, "loss_parallel": True},
    "recomputed": {"tp": 2, "recompute": "full", "optimizer": ADAM},
    "pipeline": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
    "interleaved": {
        "pp": 2,
        "schedule": "Interleaved1F1B",
        "virtual_stages": 2,
        "num_microbatches": 4,
    },
    "zero bubble": {
        "pp": 2,
        "schedule": "ZBVZeroBubble",
        "virtual_stages": 2,
        "num_microbatches": 4,
    },
    "three axes": {
        "pp": 2,
        "dp_shard": 2,
        "tp": 2,
        "zero_stage": 2,
        "schedule": "1F1B",
        "num_microbatches": 4,
    },
    "ring": {"cp": 2, "context_algorithm": "ring"},
    "all-to-all": {"cp": 2, "dp_shard": 2, "zero_stage": 2},
}


#: A thread of gloo lets go of what it sent when it next gets the interpreter's lock. On
#: a busy machine that may be late, and the peak of a step higher, never lower.
MEASURED_STEPS = 3


def _measured(plan_json: str) -> tuple[int, int, dict[str, tuple[int, int]]]:
    """Lowest peak of some steps without what was there before; what this rank sent."""
    plan = Plan.from_json(plan_json)
    place = arrange(plan.strategy, torch.device("cpu"))
    gc.collect()
    with LiveMemory() as before:
        outside = before.current_bytes
    trainer = Trainer(plan, build(plan.model.name), place)
    for step in range(2):
        trainer.step(synthetic_batch(plan.workload, step))
    peaks = []
    for step in range(2, 2 + MEASURED_STEPS):
        # Weights of other stages are garbage in cycles until Python looks for it.
        gc.collect()
        counted = measure_step(trainer, synthetic_batch(plan.workload, step))
        peaks.append(counted.peak_memory_bytes[place.rank] - outside)
    traffic = counted.traffic[place.rank]
    return place.rank, min(peaks), {k: (t.count, t.bytes) for k, t in traffic.items()}


FURTHER = {"tensor", "ring", "all-to-all", "replicas"}
SLOW = {
    "three axes",
    "interleaved",
    "zero bubble",
    "hybrid",
    "accumulated replicas",
    "zero2",
    "clipped zero3",
    "loss parallel",
    "recomputed",
}


@pytest.mark.parametrize(
    "name",
    cases(PLANS, further=FURTHER, slow=SLOW),
)
def test_a_dry_run_counts_what_a_real_one_does(pool: Pool, name: str) -> None:
    plan = make_plan("llama", **PLANS[name])
    world = plan.strategy.mesh.num_devices
    real = pool.run(_measured, world, plan.to_json())
    for rank, peak, traffic in real:
        found = dry_run(plan, lambda: build("llama"), rank)
        assert found.failure is None
        counted: dict[str, tuple[int, int]] = {}
        for entry in found.collectives:
            count, size = counted.get(entry.kind, (0, 0))
            counted[entry.kind] = (count + entry.count, size + entry.bytes)
        assert counted == traffic
        assert found.peak_bytes == pytest.approx(peak, rel=0.05), rank
