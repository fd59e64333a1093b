"""Copies that exchange their weights every few steps, on gloo ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from executors import build_model, run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.replicas.local_steps import LocalStepsReplicas
from executors.trainer import Trainer
from planner.errors import ExecutionError, StrategyError
from planner.schema import Optimizer, Plan
from planner.schema.methods import read_method
from planner.schema.methods.local_steps import LocalSteps
from tests.distributed.cases import build, largest_gap, make_plan
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
        semantics="approximate",
        **MESHES[mesh],
        **{
            "optimizer": SGD,
            "synchronisation": LocalSteps(period=period),
            **changes,
        },
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
    """The same in one process: a model a copy, and torch's SGD between them."""
    settings = plan.strategy.synchronisation
    whole = build_model(lambda: build(plan.model.name))
    outer = torch.optim.SGD(
        whole.parameters(),
        lr=settings.outer_learning_rate,
        momentum=settings.outer_momentum,
        nesterov=settings.nesterov,
    )
    copies = [build_model(lambda: build(plan.model.name)) for _ in range(2)]
    spec = plan.strategy.optimizer
    kind = getattr(torch.optim, spec.name)
    options: dict[str, Any] = {
        "lr": spec.learning_rate,
        "weight_decay": spec.used_weight_decay,
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
        if (step + 1) % settings.period == 0:
            own_weights = zip(*(copy.parameters() for copy in copies), strict=True)
            for weight, pair in zip(whole.parameters(), own_weights, strict=True):
                mean = torch.stack([p.detach() for p in pair]).mean(0)
                weight.grad = weight.detach() - mean
            outer.step()
            for copy in copies:
                copy.load_state_dict(whole.state_dict())
    weights = {n: p.detach().numpy() for n, p in copies[0].named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "zero 1", "tp", "pp"))
def test_a_period_of_one_step_of_sgd_is_an_all_reduce(pool: Pool, mesh: str) -> None:
    plan = _plan(mesh, 1)
    plain = make_plan("llama", dp_replicate=2, optimizer=SGD, **MESHES[mesh])
    world = plan.strategy.mesh.num_devices
    ours = pool.run(train, world, plan.to_json(), 3)[0]
    theirs = pool.run(train, world, plain.to_json(), 3)[0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert largest_gap(ours["weights"], theirs["weights"]) <= 1e-6


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
    # The reference rounds once more: it takes the mean as a step of SGD.
    assert largest_gap(found[0]["weights"], expected["weights"]) <= 3e-5
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
    assert payload == {"all_reduce": (exchange["all_reduce"] - loss) / period}


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


# -- An outer optimizer ----------------------------------------------------------------


class _Place:
    """The whole group, as copies of one rank each."""

    membership = None

    def group(self, axis: str) -> dist.ProcessGroup | None:
        assert axis == "replicate"
        return dist.group.WORLD


class _Weights:
    """Two weights of 1, as a trainer holds them."""

    def __init__(self) -> None:
        self.place = _Place()
        self.weights = [torch.nn.Parameter(torch.ones(1, 1)) for _ in range(2)]

    def all_parameters(self) -> list[torch.nn.Parameter]:
        return self.weights


def history(pin: str, steps: int) -> list[list[list[float]]]:
    """Local and global weights after each step, each of which goes down by 2."""
    trainer = _Weights()
    replicas = LocalStepsReplicas(read_method("synchronisation", pin))
    replicas.attach(trainer)
    found = []
    with torch.no_grad():
        for step in range(steps + 1):
            kept = replicas.state()["global"]
            found.append(
                [
                    [float(weight) for weight in trainer.weights],
                    [float(kept[weight]) for weight in trainer.weights],
                ]
            )
            for weight in trainer.weights:
                weight -= 2
            replicas.after_update(step)
    return found


@pytest.mark.parametrize("number", range(6))
def test_histories_are_those_of_torchft(pool: Pool, number: int) -> None:
    """Six of its regression tests: two fragments, delay 0 and 1, mix 0, 1/2 and 1.

    Local weights after each step, global ones after each exchange, equal on both ranks.
    """
    folder = os.environ.get("MESHWRIGHT_DATA")
    if not folder:
        pytest.skip("MESHWRIGHT_DATA is not set; see docs/data.md")
    delay, mix = number // 3, (0.0, 0.5, 1.0)[number % 3]
    name = f"DiLoCoMockedUpdateTest.test_diloco_mocked_updates_{number}.json"
    (path,) = (Path(folder) / "torchft").glob(f"*{name}")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    pin = (
        f"local_steps:period=6,fragments=2,outer_learning_rate=2,delay={delay},"
        f"mix={mix}"
    )
    for found, (theirs,) in zip(pool.run(history, 2, pin, 15), recorded, strict=True):
        for kind, key in enumerate(("history", "global_parameter_history")):
            for step, weights in theirs[key].items():
                expected = [value[0][0] for value in weights.values()]
                assert found[int(step)][kind] == expected, (key, step)


OUTER = "diloco:period=2,outer_learning_rate=0.5"


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "tp", "pp"))
def test_the_outer_optimizer_is_torchs_sgd(pool: Pool, mesh: str) -> None:
    method = read_method("synchronisation", OUTER)
    plan = _plan(mesh, 2, synchronisation=method)
    world = plan.strategy.mesh.num_devices
    found = pool.run(train, world, plan.to_json(), 6)
    assert largest_gap(found[0]["weights"], _serial(plan, 6)["weights"]) <= 1e-5
    shards: dict[Any, set[str]] = {}
    for each in found:
        shards.setdefault(each["held"], set()).add(each["digests"][-1])
    assert all(len(digests) == 1 for digests in shards.values())


def test_copies_of_a_warm_up_are_those_of_an_all_reduce(pool: Pool) -> None:
    method = read_method("synchronisation", "post-local-sgd:period=2,warm_up_steps=2")
    plan = _plan("zero 3", 2, optimizer=ADAMW, synchronisation=method)
    plain = make_plan("llama", dp_replicate=2, optimizer=ADAMW, **MESHES["zero 3"])
    world = plan.strategy.mesh.num_devices
    ours = pool.run(train, world, plan.to_json(), 4)
    theirs = pool.run(train, world, plain.to_json(), 4)[0]
    assert ours[0]["losses"][:2] == pytest.approx(theirs["losses"][:2], rel=1e-6)
    digests = [
        [each["digests"] for each in ours if each["held"] == held]
        for held in {each["held"] for each in ours}
    ]
    for one, other in digests:
        # Apart behind the third step alone.
        assert [a == b for a, b in zip(one, other, strict=True)] == [
            *(True, True, False, True)
        ]


STREAMING = "streaming-diloco:period=4,fragments=2,delay=1,mix=0.5"


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "pp"))
@pytest.mark.parametrize("pin", [OUTER, STREAMING], ids=["diloco", "streaming"])
def test_outer_state_is_resumed(
    pool: Pool, tmp_path: Path, mesh: str, pin: str
) -> None:
    """Bit for bit: global weights, momentum, and under mix each copy's own weights."""
    method = read_method("synchronisation", pin)
    plan = _plan(mesh, 2, optimizer=ADAMW, synchronisation=method)
    world = plan.strategy.mesh.num_devices
    for each in pool.run(resume, world, plan.to_json(), str(tmp_path / "kept")):
        assert each["first"] + each["rest"] == each["straight"]


def move(text: str, other: str, folder: str) -> dict[str, Any]:
    """Train by one plan, go on by another; weights that the first left, and loss."""
    first, second = Plan.from_json(text), Plan.from_json(other)
    run(first, lambda: build(first.model.name), steps=4, checkpoint_dir=folder)
    rest = run(
        second,
        lambda: build(second.model.name),
        steps=8,
        checkpoint_dir=folder,
        resume=True,
    )
    return {"losses": list(rest.losses)}


def test_another_plan_goes_on_from_the_mean_of_copies(
    pool: Pool, tmp_path: Path
) -> None:
    method = read_method("synchronisation", STREAMING)
    plan = _plan("one rank", 2, optimizer=ADAMW, synchronisation=method)
    exact = make_plan("llama", dp_shard=2, zero_stage=3, optimizer=ADAMW)
    texts = plan.to_json(), exact.to_json()
    for order in (texts, texts[::-1]):
        folder = str(tmp_path / hashlib.sha256(order[0].encode()).hexdigest())
        for each in pool.run(move, 2, *order, folder):
            assert np.isfinite(each["losses"]).all()
            assert len(each["losses"]) == 4


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("local_steps:period=5,fragments=2", "no multiple of fragments=2.* period=6"),
        ("local_steps:period=4,delay=4", "delay=4 is not less .*use delay=3"),
        ("local_steps:period=8,warm_up_steps=4", "warm_up_steps=4 is no multiple"),
        ("local_steps:nesterov=true", "nesterov=True without momentum"),
        ("local_steps:offload=true", "keeps nothing between exchanges"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(pin: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        read_method("synchronisation", pin)
