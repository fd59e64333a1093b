"""Copies that take turns at the stages of a model, on gloo ranks."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import planner
from executors import build_model, run
from executors.checkpoints.snapshot import full_gradients, full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.dryrun import dry_runs
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.parallelize import ParallelPart
from executors.replicas.cyclic import Turn
from executors.trainer import Trainer
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.schema import Mesh, Optimizer, Plan, Precision
from planner.schema.methods.all_reduce import AllReduce
from planner.schema.methods.cyclic import Cyclic
from planner.schema.verification import Verification
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan, reference
from tests.distributed.planned import graph_of
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
#: Of a copy in a step.
SAMPLES = 4
SGD = Optimizer(name="SGD", learning_rate=0.1)
MOMENTUM = Optimizer(name="SGD", learning_rate=0.05, momentum=0.9, weight_decay=1e-3)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3)


def _plan(copies: int, version: Any, model: str = "llama", **changes: Any) -> Plan:
    made = make_plan(
        model,
        dp_replicate=2,
        semantics="approximate",
        **{
            "optimizer": SGD,
            "synchronisation": Cyclic(version=version),
            **changes,
        },
    )
    size = {"mesh": Mesh(dp_replicate=copies), "microbatch_size": SAMPLES}
    return made.model_copy(
        update={
            "cluster": made.cluster.model_copy(update={"num_devices": copies}),
            "strategy": made.strategy.model_copy(update=size),
            "workload": made.workload.model_copy(
                update={"global_batch": SAMPLES * copies}
            ),
        }
    )


def _trainer(plan: Plan) -> Trainer:
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: build(plan.model.name), small_bytes=0)
    return Trainer(plan, model, place, recording)


def _numbers(trainer: Trainer) -> dict[str, np.ndarray]:
    return {n: w.detach().numpy().copy() for n, w in full_parameters(trainer).items()}


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of this copy, what it sent in each step, and its weights at the end."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses, traffic = [], []
    for step in range(steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.step(synthetic_batch(plan.workload, step)).loss)
        traffic.append({kind: t.bytes for kind, t in counter.traffic().items()})
    trainer.replicas.settle()
    return {"losses": losses, "traffic": traffic, "weights": _numbers(trainer)}


def _serial(plan: Plan, steps: int) -> dict[str, Any]:
    """The rule in one process: weights of two steps, and a model that is given them.

    theta[t+1] = theta[t] - optimizer(mean over i of grad f_i), where copy i of N, from
    1, has stage j, from 1, of theta[t] if j >= N - i + 1 (v2), else of theta[t-1].
    """
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    stage_of = {
        unit: index + 1
        for index, stage in enumerate(plan.strategy.run_stages)
        for unit in stage.modules
    }
    held = build_model(lambda: build(plan.model.name))
    model = build_model(lambda: build(plan.model.name))
    spec = plan.strategy.optimizer
    options = {"lr": spec.learning_rate, "weight_decay": spec.used_weight_decay}
    if spec.name == "SGD":
        options["momentum"] = spec.momentum
    else:
        options["fused"] = True
    rule = getattr(torch.optim, spec.name)(held.parameters(), **options)

    def stage(name: str) -> int:
        return next(n for unit, n in stage_of.items() if name.startswith(f"{unit}."))

    def fresh(copy: int, name: str) -> bool:
        return settings.version == "v2" and stage(name) >= copies - copy + 1

    older = {n: p.detach().clone() for n, p in held.named_parameters()}
    losses: list[list[float]] = [[] for _ in range(copies)]
    for step in range(steps):
        batch = synthetic_batch(plan.workload, step)
        sums: dict[str, torch.Tensor] = {}
        newest = {n: p.detach().clone() for n, p in held.named_parameters()}
        for copy in range(1, copies + 1):
            part = {n: value.chunk(copies)[copy - 1] for n, value in batch.items()}
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_((newest if fresh(copy, name) else older)[name])
            model.zero_grad()
            loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
            loss.prepare(part, 1)
            value = loss(model(**part), loss.target(part))
            value.backward()
            losses[copy - 1].append(value.item())
            for name, weight in model.named_parameters():
                assert weight.grad is not None
                total = sums.get(name)
                sums[name] = (
                    weight.grad.clone() if total is None else total + weight.grad
                )
        older = newest
        for name, weight in held.named_parameters():
            weight.grad = sums[name] / copies
        rule.step()
    weights = {n: p.detach().numpy() for n, p in held.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_weights_are_those_of_the_serial_rule(
    pool: Pool, copies: int, version: str
) -> None:
    """Bit for bit on every copy, and so are their losses."""
    plan = _plan(copies, version, optimizer=MOMENTUM)
    expected = _serial(plan, 5)
    for copy, found in enumerate(pool.run(train, copies, plan.to_json(), 5)):
        assert found["losses"] == expected["losses"][copy]
        assert sorted(found["weights"]) == sorted(expected["weights"])
        for name, weight in found["weights"].items():
            assert np.array_equal(weight, expected["weights"][name]), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": ADAMW}, id="AdamW"),
        pytest.param({"recompute": "full"}, id="full recomputation"),
        pytest.param({"recompute": "selective"}, id="selective recomputation"),
        pytest.param({"model": "nested"}, id="other loss"),
    ],
)
def test_the_rule_holds_with(pool: Pool, changes: dict[str, Any]) -> None:
    plan = _plan(2, "v2", **changes)
    expected = _serial(plan, 4)
    for copy, found in enumerate(pool.run(train, 2, plan.to_json(), 4)):
        assert found["losses"] == expected["losses"][copy]
        for name, weight in found["weights"].items():
            assert np.array_equal(weight, expected["weights"][name]), name


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"precision": Precision(compute="bfloat16")}, id="bfloat16"),
        pytest.param({"compile": True}, id="compiled"),
    ],
)
def test_other_arithmetic_trains_alike(pool: Pool, changes: dict[str, Any]) -> None:
    """To its rounding, by as many messages and no collective either."""
    found = pool.run(train, 2, _plan(2, "v2", **changes).to_json(), 4)
    plain = pool.run(train, 2, _plan(2, "v2").to_json(), 4)
    for one, other in zip(found, plain, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert one["traffic"] == other["traffic"]


def test_one_copy_of_v2_is_gradient_descent(pool: Pool) -> None:
    """Bit for bit; one copy of v1 has gradients one step late, as its rule says."""
    plan = _plan(1, "v2")
    (found,) = pool.run(train, 1, plan.to_json(), 4)
    plain = reference(plan, 4)
    assert found["losses"] == [each["loss"] for each in plain]
    for name, weight in plain[-1]["weights"].items():
        assert np.array_equal(found["weights"][name], weight.numpy()), name
    plan = _plan(1, "v1", optimizer=MOMENTUM)
    (found,) = pool.run(train, 1, plan.to_json(), 4)
    expected = _serial(plan, 4)
    assert found["losses"] == expected["losses"][0]
    for name, weight in expected["weights"].items():
        assert np.array_equal(found["weights"][name], weight), name


class _Outstanding:
    """Counts messages that this rank has begun to send and not waited for."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self._isend = dist.isend

    def isend(self, *args: Any, **kwargs: Any) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        work = self._isend(*args, **kwargs)
        counter = self

        class Waited:
            def wait(self) -> None:
                work.wait()
                counter.now -= 1

        return Waited()


def count(text: str, steps: int) -> dict[str, Any]:
    """Kinds, calls and bytes of each step's messages; most outstanding at once.

    All ranks meet after each step: no step waits for what another rank does in its
    next.
    """
    plan, outstanding = Plan.from_json(text), _Outstanding()
    trainer = _trainer(plan)
    traffic = []
    with mock.patch.object(dist, "isend", outstanding.isend):
        for step in range(steps):
            with CollectiveCounter() as counter:
                trainer.step(synthetic_batch(plan.workload, step))
            traffic.append(
                {kind: (t.count, t.bytes) for kind, t in counter.traffic().items()}
            )
            dist.barrier()
        trainer.replicas.settle()
    parts = [
        sum(p.nbytes for p in part.inner.parameters() if p.requires_grad)
        for part in trainer.parts.values()
    ]
    return {"traffic": traffic, "parts": parts, "most": outstanding.most}


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("copies", [2, 3, 4])
def test_messages_go_from_copy_to_copy_one_at_a_time(
    pool: Pool, copies: int, version: str
) -> None:
    """No collective; a partial sum of each stage and at most one sum, 2 W together."""
    plan = _plan(copies, version)
    settings = plan.strategy.synchronisation
    every = pool.run(count, copies, plan.to_json(), 5)
    weights = sum(every[0]["parts"])
    for copy, found in enumerate(every):
        assert found["most"] == 1
        wanted: list[int] = []
        for stage, size in enumerate(found["parts"]):
            route = [copies - 1, *settings.route(stage, copies)]
            wanted += [size] * (copy < copies - 1)
            wanted += [size] * (route.index(copy) + 1 < len(route))
        assert len(wanted) <= 2 * copies
        assert sum(wanted) <= 2 * weights
        for step in found["traffic"]:
            assert set(step) <= {"send", "recv"}
            assert step.get("send", (0, 0)) <= (len(wanted), sum(wanted))
        # The first steps have no sums of steps before.
        for step in found["traffic"][2:]:
            assert step["send"] == (len(wanted), sum(wanted))


def test_bytes_are_those_of_the_plan(pool: Pool) -> None:
    """Measured by a run, found by a dry run, and predicted: the first copy's."""
    for preset in ("cyclic-v1", "cyclic-v2"):
        made = planner.plan(
            graph_of("tiny-llama"),
            "local:4",
            global_batch=8,
            pin={"synchronisation": preset, "dp_replicate": 4, "recompute": "none"},
            precision=Precision(compute="float32"),
            optimizer=SGD,
        )
        (dry,) = dry_runs(made, lambda: build("tiny-llama"), [0])
        assert dry.failure is None
        predicted = made.prediction.collective_bytes["send"]
        assert dry.bytes_of("send") == predicted
        measured = pool.run(measure, 4, made.to_json())[0]
        assert measured["send"] == predicted
        assert set(measured) == {"send", "recv"}


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("preset", ["cyclic-v1", "cyclic-v2"])
def test_memory_is_that_of_the_plan(preset: str, compute: Any) -> None:
    """Within a tenth of what dry runs find of the fullest copy."""
    made = planner.plan(
        graph_of("tiny-llama"),
        "local:4",
        global_batch=8,
        pin={"synchronisation": preset, "dp_replicate": 4, "recompute": "none"},
        precision=Precision(compute=compute),
        optimizer=ADAMW,
    )
    found = dry_runs(made, lambda: build("tiny-llama"), range(4))
    memory = Verification.of(made, found).deviations[0]
    fullest = max(sum(one.memory_bytes.values()) for one in found)
    assert memory.predicted == pytest.approx(fullest, rel=0.1)


def measure(text: str) -> dict[str, int]:
    plan = Plan.from_json(text)
    found = run(plan, lambda: build(plan.model.name), steps=3, measure=True)
    assert found.measurement is not None
    return {k: t.bytes for k, t in found.measurement.collectives[0].items()}


def resume(text: str, folder: str) -> dict[str, list[float]]:
    """Losses of a run without a break, and of one that is resumed twice."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: build(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 2}
    return {
        "straight": losses(7),
        "parts": losses(3, **kept)
        + losses(4, resume=True, **kept)
        + losses(7, resume=True, **kept),
    }


@pytest.mark.parametrize(("copies", "version"), [(2, "v1"), (4, "v1"), (4, "v2")])
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, copies: int, version: str
) -> None:
    """Bit for bit on every copy, wherever it is broken."""
    plan = _plan(copies, version, optimizer=ADAMW)
    for each in pool.run(resume, copies, plan.to_json(), str(tmp_path / "kept")):
        assert each["parts"] == each["straight"]


def move(text: str, other: str, folder: str) -> float:
    """Train by one plan; the first loss under another that goes on from there."""
    first, second = Plan.from_json(text), Plan.from_json(other)
    run(first, lambda: build(first.model.name), steps=3, checkpoint_dir=folder)
    rest = run(
        second,
        lambda: build(second.model.name),
        steps=4,
        checkpoint_dir=folder,
        resume=True,
    )
    return rest.losses[0]


def test_another_plan_goes_on_from_the_newest_weights(
    pool: Pool, tmp_path: Path
) -> None:
    plan = _plan(2, "v1", optimizer=ADAMW)
    exact = plan.model_copy(
        update={
            "strategy": plan.strategy.model_copy(
                update={"synchronisation": AllReduce(), "semantics": "exact"}
            )
        }
    )
    model = build_model(lambda: build(plan.model.name))
    newest = _serial(plan, 3)["weights"]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(newest[name]))
    batch = synthetic_batch(plan.workload, 3)
    loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
    loss.prepare(batch, 1)
    expected = loss(model(**batch), loss.target(batch)).item()
    texts = plan.to_json(), exact.to_json()
    for found in pool.run(move, 2, *texts, str(tmp_path / "kept")):
        assert found == pytest.approx(expected, rel=1e-6)


def gradients(text: str) -> dict[str, np.ndarray]:
    """Gradient of a batch at the weights after two steps, and those weights."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    for step in range(2):
        trainer.step(synthetic_batch(plan.workload, step))
    trainer.backward(synthetic_batch(plan.workload, 2))
    found = {f"grad {n}": g.numpy() for n, g in full_gradients(trainer).items()}
    return found | _numbers(trainer)


def test_backward_alone_is_of_the_newest_weights(pool: Pool) -> None:
    plan = _plan(2, "v2")
    model = build_model(lambda: build(plan.model.name))
    (found, _) = pool.run(gradients, 2, plan.to_json())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(found[name]))
    batch = synthetic_batch(plan.workload, 2)
    loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
    loss.prepare(batch, 1)
    loss(model(**batch), loss.target(batch)).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        far = np.abs(found[f"grad {name}"] - weight.grad.numpy()).max()
        assert far <= 1e-5 * np.abs(weight.grad.numpy()).max(), name


class _Saved:
    """Bytes that autograd keeps for backward, but for those of some tensors."""

    def __init__(self, others: list[torch.Tensor]) -> None:
        self._others = {one.untyped_storage().data_ptr() for one in others}
        self._alive: dict[int, int] = {}
        self.most = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._others and key not in self._alive:
            self._alive[key] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, key, None)
            self.most = max(self.most, sum(self._alive.values()))
        return tensor


class _Stage(nn.Module):
    """Eight equal layers, whose activations are kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return (value,)


def _most_kept(copies: int, *, shift: int) -> int:
    """Most bytes kept for the backwards of N microbatches at N stages, in one process.

    Args:
        copies: N.
        shift: Slots by which each begins later than the one before it.
    """
    stages = [_Stage() for _ in range(copies)]
    parts = [
        ParallelPart(module=one, inner=one, units=(), partial=frozenset(), zero_stage=0)
        for one in stages
    ]
    saved = _Saved([p for stage in stages for p in stage.parameters()])
    turns = [
        [Turn(index, part, last=False) for index, part in enumerate(parts)]
        for _ in range(copies)
    ]
    flow: list[Any] = [()] * copies
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one):
        for now in range(2 * copies * 3):
            for copy in range(copies):
                slot = (now - shift * copy) % (2 * copies)
                if now < shift * copy:
                    continue
                stage = min(slot, 2 * copies - 1 - slot)
                if slot < copies:
                    given = flow[copy] if slot else (torch.randn(64, 32),)
                    flow[copy] = turns[copy][stage].forward(given, {})
                else:
                    if slot == copies:
                        flow[copy] = [torch.ones(64, 32)]
                    flow[copy] = turns[copy][stage].backward(flow[copy], None)
    return saved.most


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_a_cycle_keeps_half_of_what_copies_at_once_do(copies: int) -> None:
    """(N + 1)/2N of N microbatches that are all at the same stage."""
    cycle, together = (_most_kept(copies, shift=shift) for shift in (2, 0))
    assert cycle <= 1.05 * (copies + 1) / (2 * copies) * together
    # The stages that the microbatches of a cycle hold are as many in every slot.
    held = [*range(1, copies + 1), *range(copies, 0, -1)]
    for now in range(2 * copies):
        alive = [held[(now - 2 * copy) % (2 * copies)] for copy in range(copies)]
        assert sum(alive) == copies * (copies + 1) / 2
    # Parts of a batch one after the other, as gradient accumulation has them.
    assert together == pytest.approx(copies * _most_kept_by_one(copies), rel=0.01)


def _most_kept_by_one(stages: int) -> int:
    """The same of one microbatch."""
    modules = nn.Sequential(*(_Stage() for _ in range(stages)))
    saved = _Saved(list(modules.parameters()))
    value = torch.randn(64, 32)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one):
        for module in modules:
            (value,) = module(value)
        value.sum().backward()
    return saved.most


def _accuracy(version: str | None, seed: int) -> float:
    """Percent of held-out digits that are told after training by the rule, 4 copies.

    Args:
        version: None for the mean of all copies' gradients at the newest weights.
        seed: Of weights and samples.
    """
    digits = np.load(ROOT / "benchmarks" / "data" / "digits.npz")["a"]
    rows = torch.from_numpy(np.random.default_rng(0).permutation(digits))
    values, labels = rows[:, :64].float() / 16, rows[:, 64].long()
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for width in (64, 128, 128):
        layers += [nn.Linear(width, 128), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    stages = {
        name: int(name.split(".")[0]) // 2 for name, _ in model.named_parameters()
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.Generator().manual_seed(seed)

    def used(copy: int, newest: Any, older: Any) -> dict[str, torch.Tensor]:
        late = {
            name
            for name, stage in stages.items()
            if version and not Cyclic(version=version).is_fresh(copy, stage, 4)  # type: ignore[arg-type]
        }
        return {n: (older if n in late else newest)[n].requires_grad_() for n in newest}

    older = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(1600):
        newest = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        chosen = torch.randint(1437, (64,), generator=order)
        for copy, own in enumerate(chosen.chunk(4)):
            weights = used(copy, newest, older)
            made = torch.func.functional_call(model, weights, (values[own],))
            loss = nn.functional.cross_entropy(made, labels[own]) / 4
            grads = torch.autograd.grad(loss, list(weights.values()))
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight.grad = grad if weight.grad is None else weight.grad + grad
        optimizer.step()
        older = newest
    with torch.no_grad():
        told = model(values[1437:]).argmax(1) == labels[1437:]
    return 100 * float(told.float().mean())


@pytest.mark.further
def test_digits_are_told_as_well_as_by_exact_training() -> None:
    """Within half a percentage point, mean of three seeds."""
    exact, *found = (
        np.mean([_accuracy(version, seed) for seed in range(3)])
        for version in (None, "v1", "v2")
    )
    assert min(found) >= exact - 0.5


# -- What is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh()}, "dp_replicate=1; .* use dp_replicate > 1"),
        ({"mesh": Mesh(dp_replicate=2, tp=2)}, "tp=2; .*use tp=1"),
        ({"mesh": Mesh(dp_replicate=2, pp=2)}, "pp=2; .*use pp=1"),
        ({"mesh": Mesh(dp_replicate=2, cp=2)}, "cp=2; .*use cp=1"),
        ({"mesh": Mesh(dp_replicate=2, dp_shard=2)}, "dp_shard=2; .*use dp_shard=1"),
        ({"num_microbatches": 2}, "num_microbatches=2; .*use num_microbatches=1"),
        ({"grad_clip_norm": 1.0}, "grad_clip_norm=1.0 .*; .*leave it out"),
        ({"semantics": "exact"}, "semantics=exact; .*say semantics=approximate"),
    ],
)
def test_what_stages_cannot_do_apart_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    strategy = _plan(2, "v2").strategy.model_copy(update=changes)
    found = executor_violations(strategy)
    assert any(re.search(said, one) for one in found), found


def test_ties_other_backends_and_few_modules_are_refused() -> None:
    strategy = _plan(2, "v2").strategy
    assert executor_violations(strategy) == ()
    (tied,) = executor_violations(strategy, tied=(("embed.weight", "head.weight"),))
    assert re.search(r"tied weights \(embed.weight.*; .*untie them", tied)
    (backend,) = executor_violations(strategy, backend="nccl")
    assert re.search("on nccl; .*plan for CPUs", backend)
    wide = strategy.model_copy(update={"mesh": Mesh(dp_replicate=8)})
    with pytest.raises(StrategyError, match=r"7 modules into 8 .*; use dp_replicate=7"):
        _ = wide.run_stages
    with pytest.raises(NoFeasiblePlanError, match="7 units into 8 parts; use"):
        planner.plan(
            graph_of("tiny-llama"),
            "local:8",
            global_batch=8,
            pin={"synchronisation": "cyclic-v2", "dp_replicate": 8},
        )
