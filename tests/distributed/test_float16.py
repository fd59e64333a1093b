"""Training in float16: scaled gradients, skipped steps, the scale in checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from executors import prepare
from executors.data import synthetic_batch
from executors.dryrun import dry_run
from planner.schema import Optimizer, Plan, Precision
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan
from tests.distributed.compare import distance
from tests.distributed.planned import planned
from tests.distributed.pool import Pool
from tests.marked import cases
from tests.models.tiny import TINY

FLOAT16 = Precision(compute="float16")
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3, "loss_chunks": 4},
    "tp": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2, "num_microbatches": 2, "schedule": "1F1B"},
}


@pytest.mark.parametrize("mesh", cases(MESHES, further=set(MESHES) - {"zero3", "pp"}))
def test_float16_stays_within_its_rounding(pool: Pool, mesh: str) -> None:
    """An eighth of bfloat16's bounds: it has three bits more."""
    far = distance(
        pool, "llama", precision=FLOAT16, grad_clip_norm=10.0, **MESHES[mesh]
    )
    assert far.loss <= 2.5e-4
    assert 1e-5 <= far.first_gradients <= 7e-3
    assert far.norm <= 7e-3


def overflow(plan_json: str, folder: str, *, alone: bool = False) -> dict[str, Any]:
    """Train from a scale that begins too high; return weights and scale after.

    With ``alone`` the first rank's does, those of others begin as they do by default.
    """
    plan = Plan.from_json(plan_json)
    found: dict[str, Any] = {"scales": [], "moved": [], "norms": []}
    with prepare(plan, lambda: build(plan.model.name)) as training:
        scaler = training.trainer.loss.scaler
        assert scaler is not None
        # Rank 0 alone may see it in its shard.
        if not alone or training.trainer.place.rank == 0:
            scaler.state[0] = 2.0**40
        weights = [
            one.to_local() if isinstance(one, DTensor) else one
            for one in training.trainer.all_parameters()
        ]
        for step in range(26):
            before = [w.detach().clone() for w in weights]
            result = training.step(synthetic_batch(plan.workload, step))
            pairs = zip(weights, before, strict=True)
            found["scales"].append(scaler.scale)
            found["moved"].append(any(not torch.equal(w, b) for w, b in pairs))
            found["norms"].append(result.grad_norm)
        training.save(folder)
        kept = scaler.state.clone()
        scaler.state.zero_()
        training.load(folder)
        found["loaded"] = bool(torch.equal(scaler.state, kept))
    return found


@pytest.mark.parametrize("mesh", ["zero3", "pp"])
def test_an_overflow_skips_the_step_on_all_ranks(
    pool: Pool, mesh: str, tmp_path: Path
) -> None:
    plan = make_plan(
        "llama",
        precision=FLOAT16,
        optimizer=Optimizer(name="AdamW", learning_rate=1e-3),
        grad_clip_norm=1.0,
        **MESHES[mesh],
    )
    answers = pool.run(overflow, 2, plan.to_json(), str(tmp_path))
    assert all(one["scales"] == answers[0]["scales"] for one in answers)
    for found in answers:
        assert found["moved"][0] is False
        assert found["scales"][0] == 2.0**39
        assert found["norms"][0] is None
        # As soon as the scale fits, every step counts.
        first = found["moved"].index(True)
        assert all(found["moved"][first:])
        assert found["scales"][first:] == [2.0 ** (40 - first)] * (26 - first)
        assert 0 < found["norms"][-1] < 100
        assert found["loaded"]


def test_copies_apart_have_scales_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """One skips the steps that overflow, the other trains; both meet all the same."""
    plan = make_plan(
        "llama",
        precision=FLOAT16,
        optimizer=Optimizer(name="AdamW", learning_rate=1e-3),
        grad_clip_norm=1.0,
        dp_replicate=2,
        semantics="approximate",
        synchronisation=LocalSteps(period=2),
    )
    assert not executor_violations(plan.strategy)
    high, other = pool.run(
        partial(overflow, alone=True), 2, plan.to_json(), str(tmp_path)
    )
    skipped = high["norms"].index(next(filter(None, high["norms"])))
    assert skipped > 2
    assert high["scales"][:skipped] == [2.0 ** (39 - n) for n in range(skipped)]
    assert high["moved"][:2] == [False, True]
    assert other["scales"] == [2.0**16] * 26
    assert all(other["moved"])
    assert all(other["norms"])
    assert high["loaded"]
    assert other["loaded"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"precision": Precision(compute="float16", parameter="bfloat16")}, "weights"),
        (
            {
                "precision": FLOAT16,
                "dp_replicate": 2,
                "semantics": "approximate",
                "synchronisation": {"kind": "gossip"},
            },
            "do not scale the loss",
        ),
        (
            {
                "precision": FLOAT16,
                "dp_replicate": 2,
                "semantics": "approximate",
                "synchronisation": LocalSteps(period=2, warm_up_steps=2),
            },
            "each on its own, use warm_up_steps=0",
        ),
    ],
)
def test_what_scales_no_loss_is_refused(changes: dict[str, Any], reason: str) -> None:
    plan = make_plan("llama", **changes)
    assert any(reason in one for one in executor_violations(plan.strategy))


def test_memory_is_priced_and_counted_as_that_of_bfloat16() -> None:
    plans = [
        planned("tiny-llama", compute=compute, dp_shard=2, zero_stage=3)
        for compute in ("float16", "bfloat16")
    ]
    assert not plans[0].not_runnable
    narrow, wide = (one.prediction.memory[0].total_bytes for one in plans)
    assert narrow == wide
    narrow, wide = (
        dry_run(one, TINY["tiny-llama"].build, 0).peak_bytes for one in plans
    )
    assert narrow == pytest.approx(wide, rel=1e-3)
