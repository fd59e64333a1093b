"""Optimizers whose states are not of a parameter's shape, or that want whole ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from executors import build_model, prepare
from executors.checkpoints.eight_bit import decoded, is_eight_bit
from executors.data import synthetic_batch
from executors.dryrun import dry_run
from executors.losses import LossFunction
from executors.optimizers import build_optimizer
from planner.capture import load_model
from planner.errors import ExecutionError
from planner.schema import Offload, Optimizer, Plan
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan
from tests.distributed.planned import planned
from tests.distributed.pool import Pool
from tests.marked import cases
from tests.models.tiny import TINY
from tests.plans import TINY as EXAMPLE
from tests.plans import local_plan

STEPS = 4

with_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def train(plan_json: str, steps: int, folder: str) -> list[float]:
    """Losses of steps, from a checkpoint if there is one."""
    plan = Plan.from_json(plan_json)
    losses = []
    with prepare(plan, lambda: build(plan.model.name)) as training:
        training.load(folder)
        while training.done < steps:
            batch = synthetic_batch(plan.workload, training.done)
            losses.append(training.step(batch).loss)
        training.save(folder)
    return losses


def _alone(plan: Plan) -> list[float]:
    """Losses in one process: Muon has two-dimensional weights of the layers."""
    model = build_model(lambda: build(plan.model.name))
    named = dict(model.named_parameters())
    if plan.strategy.optimizer.name == "Muon":
        hidden = [p for n, p in named.items() if ".layers." in n and p.ndim == 2]
        rest = [p for n, p in named.items() if ".layers." not in n or p.ndim != 2]
        muon = torch.optim.Muon(
            hidden, lr=1e-2, weight_decay=0, adjust_lr_fn="match_rms_adamw"
        )
        optimizers = [muon, torch.optim.AdamW(rest, lr=1e-2, weight_decay=0)]
    else:
        optimizers = [torch.optim.Adafactor(named.values(), lr=1e-2)]
    loss, losses = LossFunction(kind="cross_entropy", data_parallel=1), []
    for step in range(STEPS):
        batch = synthetic_batch(plan.workload, step)
        loss.prepare(batch, 1)
        model.zero_grad()
        value = loss(model(**batch), loss.target(batch))
        value.backward()
        losses.append(float(value.detach()))
        for optimizer in optimizers:
            optimizer.step()
    return losses


MESHES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon-zero3-tp": ("Muon", {"dp_shard": 2, "tp": 2, "zero_stage": 3}),
    "muon-zero1": ("Muon", {"dp_shard": 2, "zero_stage": 1}),
    "muon-1f1b": ("Muon", {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"}),
    "adafactor-ddp": ("Adafactor", {"dp_replicate": 2}),
    "adafactor-1f1b": (
        "Adafactor",
        {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"},
    ),
}


@pytest.mark.parametrize(
    "mesh", cases(MESHES, slow={"muon-zero3-tp", "muon-1f1b", "adafactor-1f1b"})
)
def test_steps_are_those_of_one_process_also_when_resumed(
    pool: Pool, tmp_path: Path, mesh: str
) -> None:
    name, changes = MESHES[mesh]
    optimizer = Optimizer.model_validate({"name": name, "learning_rate": 1e-2})
    plan = make_plan("llama", optimizer=optimizer, **changes)
    world, text = plan.strategy.mesh.num_devices, plan.to_json()
    found = pool.run(train, world, text, STEPS, str(tmp_path / "whole"))[0]
    # Muon's products are of bfloat16.
    assert found == pytest.approx(_alone(plan), rel=2e-3 if name == "Muon" else 1e-5)
    assert abs(found[0] - found[-1]) > 1e-3 * found[0]
    first = pool.run(train, world, text, 2, str(tmp_path / "kept"))[0]
    rest = pool.run(train, world, text, STEPS, str(tmp_path / "kept"))[0]
    assert [*first, *rest] == found


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize("pins", [{"dp_replicate": 2}, {"pp": 2}])
def test_states_are_as_large_as_predicted(name: str, pins: dict[str, Any]) -> None:
    optimizer = Optimizer.model_validate({"name": name, "learning_rate": 1e-2})
    plan = planned("tiny-llama", optimizer=optimizer, **pins)
    for stage in plan.prediction.memory:
        rank = stage.rank * plan.strategy.mesh.num_devices // plan.strategy.mesh.pp
        counted = dry_run(plan, TINY["tiny-llama"].build, rank)
        assert counted.failure is None
        states = counted.memory_bytes["optimizer"]
        assert stage.optimizer_bytes == pytest.approx(states, rel=0.05)
    plain = planned("tiny-llama", optimizer=Optimizer(), **pins)
    assert plan.prediction.memory[0].optimizer_bytes < (
        plain.prediction.memory[0].optimizer_bytes
    )


@pytest.mark.parametrize(
    ("optimizer", "changes", "reason"),
    [
        ("Adafactor", {"dp_shard": 2, "zero_stage": 2}, "Adafactor with ZeRO"),
        ("Adafactor", {"tp": 2}, "Adafactor with tp=2"),
        ("Muon", {"offload": Offload(states="optimizer")}, "use AdamW"),
        ("Muon", {"dp_replicate": 2, "gradient_compression": "powersgd"}, "knows"),
    ],
)
def test_what_an_optimizer_cannot_update_is_refused(
    optimizer: str, changes: dict[str, Any], reason: str
) -> None:
    spec = Optimizer.model_validate({"name": optimizer})
    plan = make_plan("llama", optimizer=spec, semantics="approximate", **changes)
    assert any(reason in one for one in executor_violations(plan.strategy))


def train_in_8_bits(plan_json: str, steps: int, folder: str, into: str) -> list[Any]:
    """Losses of steps, then the kinds of states that have 8 bits in some parameters.

    Not compiled: that takes a minute a shape.
    """
    torch.compiler.set_stance("force_eager")
    plan = Plan.from_json(plan_json)
    losses: list[Any] = []
    model = load_model(f"hf:{EXAMPLE}", seq_len=32)
    with prepare(plan, model.build) as training:
        training.load(folder)
        while training.done < steps:
            batch = synthetic_batch(plan.workload, training.done)
            losses.append(training.step(batch).loss)
        training.save(into)
        states = training.optimizer.state.values()
        losses.append({k for one in states for k, v in one.items() if is_eight_bit(v)})
    return losses


@with_torchao
def test_states_of_8_bits_are_kept_to_the_bit(pool: Pool, tmp_path: Path) -> None:
    spec = Optimizer(name="AdamW8bit", learning_rate=1e-2)
    plans = [
        local_plan(optimizer=spec, **pins).to_json()
        for pins in ({"dp_shard": 2, "zero_stage": 3}, {"tp": 2})
    ]
    whole, kept, other = (str(tmp_path / name) for name in ("whole", "kept", "other"))
    *found, kinds = pool.run(train_in_8_bits, 2, plans[0], 4, whole, whole)[0]
    assert kinds == {"exp_avg", "exp_avg_sq"}
    *first, _ = pool.run(train_in_8_bits, 2, plans[0], 2, kept, kept)[0]
    *moved, kinds = pool.run(train_in_8_bits, 2, plans[1], 4, kept, other)[0]
    assert kinds == {"exp_avg", "exp_avg_sq"}
    *rest, _ = pool.run(train_in_8_bits, 2, plans[0], 4, kept, kept)[0]
    assert [*first, *rest] == found
    # Blocks of other numbers have other scales.
    assert moved == pytest.approx(rest, rel=1e-3)


@with_torchao
def test_numbers_in_checkpoints_encode_to_the_same_codes() -> None:
    from torchao.optim.subclass_8bit import OptimState8bit

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 256, generator=generator)
    values *= 10 ** torch.randint(-18, 4, (64, 1), generator=generator)
    values[0], values[1] = 0, -values[1].abs()
    for signed in (True, False):
        state = OptimState8bit.zeros((64, 256), signed)
        state.copy_(values if signed else values.abs())
        again = OptimState8bit.zeros((64, 256), signed)
        again.copy_(decoded(state))
        assert torch.equal(again.codes, state.codes)
        assert torch.equal(again.scale, state.scale)


@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is not None, reason="torchao is installed"
)
def test_a_package_that_is_missing_is_named() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ExecutionError, match="pip install torchao"):
        build_optimizer([("weight", weight)], Optimizer(name="AdamW8bit"))
