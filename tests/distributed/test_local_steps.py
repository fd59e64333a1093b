"""Copies that average their weights every few steps, on gloo ranks."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executors import build_model, run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema import Optimizer, Plan
from planner.schema.methods.local_steps import LocalSteps
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool

#: Meshes of two copies, by what is inside of a copy.
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "zero 3": {"dp_shard": 2, "zero_stage": 3},
    "zero 1": {"dp_shard": 2, "zero_stage": 1},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
}
LEFT_OUT = {"zero 1", "pp"}
SGD = Optimizer(name="SGD", learning_rate=0.1)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3)


def _cases(*names: str) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.further] if name in LEFT_OUT else [])
        for name in names
    ]


def _plan(mesh: str, period: int, model: str = "llama", **changes: Any) -> Plan:
    return make_plan(
        model,
        dp_replicate=2,
        synchronisation=LocalSteps(period=period),
        semantics="approximate",
        **MESHES[mesh],
        **{"optimizer": SGD, **changes},
    )


def _trainer(plan: Plan) -> Trainer:
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: build(plan.model.name), small_bytes=0)
    return Trainer(plan, model, place, recording)


def _digest(trainer: Trainer) -> str:
    """Hash of the weights that this rank holds."""
    found = hashlib.sha256()
    for name, parameter in trainer.named_parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        found.update(name.encode() + local.detach().numpy().tobytes())
    return found.hexdigest()


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses, weights at the end, and for each step: a digest and what was sent."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses, digests, traffic = [], [], []
    for step in range(steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.step(synthetic_batch(plan.workload, step)).loss)
        traffic.append({kind: t.bytes for kind, t in counter.traffic().items()})
        digests.append(_digest(trainer))
    place = trainer.place
    held = [place.index(axis) for axis in ("pp", "shard", "tp")]
    return {
        "losses": losses,
        "digests": digests,
        "traffic": traffic,
        "held": tuple(held),
        "weight_bytes": sum(
            getattr(p, "to_local", lambda p=p: p)().nbytes
            for p in trainer.all_parameters()
        ),
        "weights": {n: w.numpy() for n, w in full_parameters(trainer).items()},
    }


def _serial(plan: Plan, steps: int) -> dict[str, Any]:
    """The same in one process: a model a copy, each on its own samples."""
    copies = [build_model(lambda: build(plan.model.name)) for _ in range(2)]
    spec, period = plan.strategy.optimizer, plan.strategy.synchronisation.period
    kind = getattr(torch.optim, spec.name)
    options: dict[str, Any] = {
        "lr": spec.learning_rate,
        "weight_decay": spec.weight_decay,
    }
    rules = [kind(copy.parameters(), **options) for copy in copies]
    losses: list[list[float]] = [[], []]
    for step in range(steps):
        batch = synthetic_batch(plan.workload, step)
        for index, (copy, rule) in enumerate(zip(copies, rules, strict=True)):
            own = {name: value.chunk(2)[index] for name, value in batch.items()}
            loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
            loss.prepare(own, 1)
            rule.zero_grad()
            value = loss(copy(**own), loss.target(own))
            value.backward()
            limit = plan.strategy.grad_clip_norm
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(copy.parameters(), limit)
            rule.step()
            losses[index].append(value.item())
        if (step + 1) % period == 0:
            pairs = zip(*(copy.parameters() for copy in copies), strict=True)
            for pair in pairs:
                mean = torch.stack([p.detach() for p in pair]).mean(0)
                for parameter in pair:
                    parameter.data.copy_(mean)
    weights = {n: p.detach().numpy() for n, p in copies[0].named_parameters()}
    return {"losses": losses, "weights": weights}


def _far(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert sorted(ours) == sorted(theirs)
    return max(
        float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max())
        for n in theirs
    )


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "zero 1", "tp", "pp"))
def test_a_period_of_one_step_of_sgd_is_an_all_reduce(pool: Pool, mesh: str) -> None:
    plan = _plan(mesh, 1)
    plain = make_plan("llama", dp_replicate=2, optimizer=SGD, **MESHES[mesh])
    world = plan.strategy.mesh.num_devices
    ours = pool.run(train, world, plan.to_json(), 3)[0]
    theirs = pool.run(train, world, plain.to_json(), 3)[0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert _far(ours["weights"], theirs["weights"]) <= 1e-6


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "tp", "pp"))
def test_copies_train_on_their_own_and_then_are_equal(pool: Pool, mesh: str) -> None:
    """Compare with one process that holds a model a copy, AdamW and a clip each.

    Between exchanges the copies differ, after one they are equal bit for bit.
    """
    plan = _plan(mesh, 2, optimizer=ADAMW, grad_clip_norm=0.05)
    world = plan.strategy.mesh.num_devices
    found = pool.run(train, world, plan.to_json(), 4)
    expected = _serial(plan, 4)
    half = world // 2 if mesh != "pp" else 1
    for rank, each in enumerate(found):
        copy = expected["losses"][rank // half % 2]
        both = np.mean(expected["losses"], axis=0)
        wanted = [copy[0], both[1], copy[2], both[3]]
        assert each["losses"] == pytest.approx(wanted, rel=1e-5)
    assert _far(found[0]["weights"], expected["weights"]) <= 1e-5
    shards: dict[Any, list[list[str]]] = {}
    for each in found:
        shards.setdefault(each["held"], []).append(each["digests"])
    assert len(shards) == world // 2
    for one, other in shards.values():
        assert [a == b for a, b in zip(one, other, strict=True)] == [
            *(False, True, False, True)
        ]


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3"))
def test_a_period_sends_the_weights_once(pool: Pool, mesh: str) -> None:
    """2 (R - 1)/R W/H on the wire of an all-reduce: a payload of W every H steps."""
    period = 3
    plan = _plan(mesh, period)
    world = plan.strategy.mesh.num_devices
    (*plain, exchange) = pool.run(train, world, plan.to_json(), period)[0]["traffic"]
    found = pool.run(train, world, plan.to_json(), 1)[0]
    weights = found["weight_bytes"]
    loss = 4
    assert exchange["all_reduce"] == weights + loss
    for step in plain:
        # A copy of one rank has nobody to talk to.
        assert step.get("all_reduce", 0) == (0 if mesh == "one rank" else loss)
    method = plan.strategy.synchronisation
    payload = method.expected_traffic(gradients=0.0, weights=float(weights))
    assert payload == (exchange["all_reduce"] - loss) / period


def resume(text: str, folder: str) -> dict[str, list[float]]:
    """Losses of a run without a break, and of one that is resumed halfway."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: build(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 2}
    return {
        "straight": losses(6),
        "first": losses(2, **kept),
        "rest": losses(6, resume=True, **kept),
    }


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "pp"))
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, mesh: str
) -> None:
    """Bit for bit on every rank: each copy gets its own optimizer states again."""
    plan = _plan(mesh, 2, optimizer=ADAMW)
    world = plan.strategy.mesh.num_devices
    for each in pool.run(resume, world, plan.to_json(), str(tmp_path / "kept")):
        assert each["first"] + each["rest"] == each["straight"]


def refused(text: str, folder: str, steps: int, every: int | None) -> str:
    plan = Plan.from_json(text)
    try:
        run(
            plan,
            lambda: build(plan.model.name),
            steps=steps,
            checkpoint_dir=folder,
            checkpoint_every=every,
        )
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_checkpoint_between_exchanges_is_refused(pool: Pool, tmp_path: Path) -> None:
    text = _plan("one rank", 4).to_json()
    for steps, every, remedy in (
        (8, 6, "checkpoint_every=6 .* every 4 steps .* use checkpoint_every=8"),
        (6, 4, "steps=6 .* use steps=8"),
    ):
        for said in pool.run(refused, 2, text, str(tmp_path), steps, every):
            assert re.search(remedy, said), said


def diverge(text: str) -> str:
    """Train on samples of which one, of the second copy's, is infinite."""
    plan = Plan.from_json(text)

    def data(step: int) -> dict[str, torch.Tensor]:
        batch = synthetic_batch(plan.workload, step)
        if step == 0:
            for value in batch.values():
                value[-1] = float("inf")
        return batch

    try:
        run(plan, lambda: build(plan.model.name), data, steps=3)
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_copy_that_diverges_is_seen_at_the_next_exchange(pool: Pool) -> None:
    plan = _plan("one rank", 3, model="perceptron")
    for said in pool.run(diverge, 2, plan.to_json()):
        assert said.startswith("the loss of step 3 is nan on rank 1;")
