"""The dry run against the truth: the same plans on real processes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from executors.data import synthetic_batch
from executors.dryrun import dry_run
from executors.measuring.measure import measure_phases
from executors.measuring.memory import LiveMemory
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.schema import Optimizer, Plan
from planner.schema.methods.gossip import Gossip
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.verification import RankVerification, VerifiedPhase
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
    "local steps": {
        "dp_replicate": 2,
        "synchronisation": LocalSteps(period=4),
        "semantics": "approximate",
    },
    "gossip": {
        "dp_replicate": 2,
        "synchronisation": Gossip(commit_every=2),
        "optimizer": Optimizer(name="AdamW"),
        "semantics": "approximate",
    },
    "chunked loss": {
        "pp": 2,
        "tp": 2,
        "schedule": "1F1B",
        "num_microbatches": 4,
        "loss_chunks": 4,
    },
    "average": {
        "dp_shard": 2,
        "zero_stage": 3,
        "loss_chunks": 4,
        "optimizer": Optimizer(name="AdamW", ema=0.9),
    },
    "ring": {"cp": 2, "context_algorithm": "ring"},
    "all-to-all": {"cp": 2, "dp_shard": 2, "zero_stage": 2},
    "ring zero3": {"cp": 2, "zero_stage": 3, "context_algorithm": "ring"},
}


#: A thread of gloo lets go of what it sent when it next gets the interpreter's lock. On
#: a busy machine that may be late, and the peak of a step higher, never lower.
MEASURED_STEPS = 3


#: What a phase was found to take: peak in bytes, calls and bytes by kind of collective.
Phase = tuple[float, dict[str, tuple[float, float]]]


def _measured(plan_json: str) -> tuple[int, dict[str, Phase]]:
    """By phase the lowest peak of some steps without what was there before; traffic."""
    plan = Plan.from_json(plan_json)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    gc.collect()
    with LiveMemory() as before:
        outside = before.current_bytes
    trainer = Trainer(plan, build(plan.model.name), place)
    for step in range(2):
        trainer.step(synthetic_batch(plan.workload, step))
    found: dict[str, Phase] = {}
    for step in range(2, 2 + MEASURED_STEPS):
        # Weights of other stages are garbage in cycles until Python looks for it.
        gc.collect()
        steps = measure_phases(trainer, synthetic_batch(plan.workload, step))
        for phase, counted in steps.items():
            peak = counted.peak_memory_bytes[place.rank] - outside
            lowest = min(peak, found[phase][0]) if phase in found else peak
            traffic = counted.traffic[place.rank].items()
            found[phase] = (lowest, {k: (t.count, t.bytes) for k, t in traffic})
    return place.rank, found


def _found(step: RankVerification | VerifiedPhase) -> Phase:
    counted: dict[str, tuple[float, float]] = {}
    for entry in step.collectives:
        count, size = counted.get(entry.kind, (0, 0))
        counted[entry.kind] = (count + entry.count, size + entry.bytes)
    return sum(step.memory_bytes.values()), counted


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
    for rank, phases in real:
        found = dry_run(plan, lambda: build("llama"), rank)
        assert found.failure is None
        steps = {phase.name: _found(phase) for phase in found.phases}
        steps = steps or {"step": _found(found)}
        assert list(steps) == list(phases)
        for name, (peak, traffic) in phases.items():
            assert steps[name][1] == traffic
            assert steps[name][0] == pytest.approx(peak, rel=0.05), rank


def test_phases_are_weighed_by_their_shares() -> None:
    plan = make_plan("llama", **PLANS["local steps"])
    found = dry_run(plan, lambda: build("llama"), 1)
    plain, exchange = found.phases
    assert (plain.share, exchange.share) == (0.75, 0.25)
    # A copy on one device has nothing to send but once a period.
    assert plain.collectives == ()
    assert found.bytes_of("all_reduce") == exchange.collectives[0].bytes / 4
    peaks = [sum(phase.memory_bytes.values()) for phase in found.phases]
    assert found.peak_bytes == max(peaks)
