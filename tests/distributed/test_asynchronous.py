"""Stages that update their weights behind each backward, on gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import planner
from executors import build_model, run
from executors.checkpoints.snapshot import full_gradients, full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.dryrun import dry_runs
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.replicas.asynchronous import AsynchronousReplicas, StashedWeights
from executors.replicas.gradient_means import GradientMeans
from executors.trainer import Trainer
from planner.errors import ExecutionError, NoFeasiblePlanError
from planner.schema import Mesh, Optimizer, Plan, Precision
from planner.schema.methods.asynchronous import Asynchronous
from planner.schema.methods.gossip import Gossip
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.verification import Verification
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, make_plan
from tests.distributed.planned import graph_of
from tests.distributed.pool import Pool

ROOT = Path(__file__).parents[2]
SGD = Optimizer(name="SGD", learning_rate=0.1)
MOMENTUM = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9, weight_decay=1e-3)
#: Whose memory is long enough for older gradients.
NADAM = Optimizer(name="NAdam", learning_rate=1e-2, betas=(0.99, 0.999))
MICROBATCHES = 4
#: Weights in float32, products in bfloat16.
MIXED = Precision(compute="bfloat16")


def _plan(stages: int, model: str = "llama", **changes: Any) -> Plan:
    return make_plan(
        model,
        pp=stages,
        schedule="1F1B",
        semantics="approximate",
        **{
            "num_microbatches": MICROBATCHES,
            "optimizer": MOMENTUM,
            "asynchrony": Asynchronous(drain_every=12),
            **changes,
        },
    )


def _trainer(plan: Plan) -> Trainer:
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: build(plan.model.name), small_bytes=0)
    return Trainer(plan, model, place, recording)


def _replicas(trainer: Trainer) -> AsynchronousReplicas:
    assert isinstance(trainer.replicas, AsynchronousReplicas)
    return trainer.replicas


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of all steps, weights of the model, and what was kept of older ones."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses: list[float] = []
    for step in range(steps):
        result = trainer.step(synthetic_batch(plan.workload, step))
        if trainer.waits and step + 1 == steps:
            result = trainer.finish()
        if not trainer.waits:
            losses += [*result.earlier, result.loss]
    kept = _replicas(trainer).weights
    return {
        "losses": losses,
        "weights": {
            name: weight.numpy().copy()
            for name, weight in full_parameters(trainer).items()
        },
        "staleness": dict(kept.staleness),
        "older": (kept.older, kept.most_older),
        "rate": trainer.optimizer.param_groups[0]["lr"],
    }


def _stage_of(plan: Plan, name: str) -> int:
    return next(
        index
        for index, stage in enumerate(plan.strategy.stages)
        for unit in stage.modules
        if name.startswith(f"{unit}.")
    )


def _rule(
    parameters: list[torch.nn.Parameter], spec: Optimizer, rate: float
) -> torch.optim.Optimizer:
    if spec.name == "SGD":
        return torch.optim.SGD(
            parameters,
            rate,
            momentum=spec.momentum,
            weight_decay=spec.used_weight_decay,
        )
    assert spec.betas is not None
    return torch.optim.NAdam(parameters, rate, betas=spec.betas)


def _narrow_floats(_: nn.Module, args: Any, kwargs: Any) -> Any:
    """Cast floats that enter a unit, as mixed precision does."""

    def cast(one: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(cast, one))
        floats = isinstance(one, torch.Tensor) and one.is_floating_point()
        return one.bfloat16() if floats else one

    return cast(args), {name: cast(value) for name, value in kwargs.items()}


class _Serial:
    """The rule in one process: all versions of each stage's weights.

    w[s, m + 1] = optimizer(w[s, m], grad f_m(w[., max(m - (S - 1 - .), 0)])), where the
    gradient is the mean of those of a microbatch of each replica.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stages = plan, plan.strategy.mesh.pp
        settings = plan.strategy.asynchrony
        assert isinstance(settings, Asynchronous)
        self.settings = settings
        self.model = build_model(lambda: build(plan.model.name))
        self.narrow = plan.strategy.precision.compute == "bfloat16"
        if self.narrow:
            for unit in ("", *(u for s in plan.strategy.stages for u in s.modules)):
                part = self.model.get_submodule(unit)
                part.register_forward_pre_hook(_narrow_floats, with_kwargs=True)
        self.named = dict(self.model.named_parameters())
        spec = plan.strategy.optimizer
        self.rules = [
            _rule(
                [p for n, p in self.named.items() if _stage_of(plan, n) == stage],
                spec,
                spec.learning_rate * settings.rate_scale(self.stages),
            )
            for stage in range(self.stages)
        ]
        self.begin()

    def begin(self) -> None:
        """Forget older versions: the pipeline is drained."""
        self.versions = [self._newest()]
        self.sums: dict[tuple[str, int], torch.Tensor] = {}
        self.done = 0

    def _newest(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.named.items()}

    def used(self, name: str) -> torch.Tensor:
        """Weight that the next microbatch computes with."""
        lag = self.stages - 1 - _stage_of(self.plan, name)
        updates = max(self.done - lag, 0) // self.settings.update_every
        weight = self.versions[updates][name].clone()
        return (weight.bfloat16() if self.narrow else weight).requires_grad_()

    def microbatch(self, *batches: dict[str, torch.Tensor], loss: LossFunction) -> Any:
        """Losses of replicas' microbatches, whose gradients may make an update."""
        found = [self._backward(*one, loss) for one in enumerate(batches)]
        self.done += 1
        if not self.done % self.settings.update_every:
            for name, p in self.named.items():
                sums = [self.sums.get((name, copy)) for copy in range(len(batches))]
                parts = [one / len(batches) for one in sums if one is not None]
                p.grad = torch.stack(parts).sum(0) if parts else None
            for rule in self.rules:
                rule.step()
            self.sums = {}
            self.versions.append(self._newest())
        return found

    def _backward(
        self, copy: int, batch: dict[str, torch.Tensor], loss: LossFunction
    ) -> torch.Tensor:
        """Add a replica's gradients to its sums."""
        weights = {name: self.used(name) for name in self.named}
        output = functional_call(self.model, weights, kwargs=batch)
        value = loss(output, loss.target(batch))
        many, every = self.plan.strategy.num_microbatches, self.settings.update_every
        (value * (many / every)).backward()
        for name, weight in weights.items():
            if weight.grad is not None:
                before, grad = self.sums.get((name, copy)), weight.grad.float()
                self.sums[name, copy] = grad if before is None else before + grad
        return value.detach()


def _serial(plan: Plan, steps: int, order: Any = slice(None)) -> dict[str, Any]:
    serial, many = _Serial(plan), plan.strategy.num_microbatches
    copies, losses = plan.strategy.mesh.dp_replicate, []
    for step in range(steps):
        if not step * many % serial.settings.drain_every:
            serial.begin()
        made = synthetic_batch(plan.workload, step)
        batch = {name: value[order] for name, value in made.items()}
        loss = LossFunction(kind=plan.workload.loss, data_parallel=copies)
        loss.prepare(batch, many)
        parts = []
        for index in range(many):
            micros = (
                {n: v.chunk(copies)[c].chunk(many)[index] for n, v in batch.items()}
                for c in range(copies)
            )
            parts.append(serial.microbatch(*micros, loss=loss))
        sums = [torch.stack(own).sum() / copies for own in zip(*parts, strict=True)]
        losses.append(sum(sums).item())
    weights = {n: p.detach().numpy() for n, p in serial.named.items()}
    return {"losses": losses, "weights": weights}


def _same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Losses and weights are those of the rule, bit for bit, on all ranks."""
    for stage in found:
        assert stage["losses"] == expected["losses"]
        assert sorted(stage["weights"]) == sorted(expected["weights"])
        for name, weight in stage["weights"].items():
            assert np.array_equal(weight, expected["weights"][name]), name


def test_averages_of_a_long_memory_take_older_gradients(pool: Pool) -> None:
    plan = _plan(3, optimizer=NADAM)
    found = pool.run(train, 3, plan.to_json(), 7)
    _same(found, _serial(plan, 7))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_weights_are_those_of_the_serial_rule(pool: Pool, stages: int) -> None:
    """Bit for bit, over two drains and the end of the run between two."""
    plan = _plan(stages)
    found = pool.run(train, stages, plan.to_json(), 7)
    _same(found, _serial(plan, 7))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"recompute": "full"}, id="full recomputation"),
        pytest.param({"recompute": "selective"}, id="selective recomputation"),
        pytest.param({"model": "nested"}, id="other loss"),
        pytest.param({"precision": MIXED}, id="bfloat16", marks=pytest.mark.further),
        pytest.param(
            {"asynchrony": Asynchronous(drain_every=12, update_every=2)},
            id="two microbatches an update",
        ),
        pytest.param({"asynchrony": Asynchronous(drain_every=4)}, id="drained steps"),
        pytest.param(
            {"stages": 2, "dp_replicate": 2},
            id="replicas",
            marks=pytest.mark.further,
        ),
        pytest.param(
            {
                "stages": 2,
                "dp_replicate": 2,
                "precision": MIXED,
                "recompute": "full",
                "asynchrony": Asynchronous(drain_every=12, update_every=2),
            },
            id="replicas, bfloat16, recomputed, two microbatches an update",
        ),
        pytest.param(
            {"asynchrony": Asynchronous(learning_rate_scale=0.7)}, id="own rate"
        ),
    ],
)
def test_the_rule_holds_with(pool: Pool, changes: dict[str, Any]) -> None:
    plan = _plan(**{"stages": 3, **changes})
    found = pool.run(train, plan.strategy.mesh.num_devices, plan.to_json(), 4)
    _same(found, _serial(plan, 4))


def test_replicas_on_halves_are_one_pipeline_on_the_whole() -> None:
    """Both are the rule's, bit for bit but for the order of sums."""
    halves = _serial(_plan(2, dp_replicate=2), 4)
    # A microbatch of the whole is one of each half.
    order = torch.arange(16).view(2, MICROBATCHES, 2).transpose(0, 1).flatten()
    whole = _serial(_plan(2), 4, order)
    assert halves["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    for name, weight in whole["weights"].items():
        assert np.allclose(halves["weights"][name], weight, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_are_of_as_many_updates_ago_as_stages_follow(
    pool: Pool, stages: int
) -> None:
    """Stage s of S: S - 1 - s, fewer behind a drain; no more versions are kept."""
    found = pool.run(train, stages, _plan(stages).to_json(), 6)
    for stage, each in enumerate(found):
        lag = stages - 1 - stage
        expected = [min(number, lag) for number in range(12)] * 2
        assert each["staleness"] == {n: expected.count(n) for n in set(expected)}
        assert each["older"] == (0, lag)
        assert each["rate"] == MOMENTUM.learning_rate / stages
    slow = Asynchronous(drain_every=12, update_every=2)
    found = pool.run(train, stages, _plan(stages, asynchrony=slow).to_json(), 6)
    for stage, each in enumerate(found):
        assert sum(each["staleness"].values()) == 12
        assert max(each["staleness"]) == each["older"][1]
        assert each["older"][1] == slow.older_versions(stage, stages)


def test_one_stage_is_gradient_descent(pool: Pool) -> None:
    """Bit for bit, on microbatches one after the other."""
    settings = Asynchronous(drain_every=8)
    plan = make_plan(
        num_microbatches=MICROBATCHES,
        asynchrony=settings,
        semantics="approximate",
        optimizer=MOMENTUM,
    )
    (found,) = pool.run(train, 1, plan.to_json(), 2)
    model = build_model(lambda: build(plan.model.name))
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
    for step in range(2):
        batch = synthetic_batch(plan.workload, step)
        loss.prepare(batch, MICROBATCHES)
        for index in range(MICROBATCHES):
            micro = {n: v.chunk(MICROBATCHES)[index] for n, v in batch.items()}
            rule.zero_grad()
            (loss(model(**micro), loss.target(micro)) * MICROBATCHES).backward()
            rule.step()
    for name, weight in model.named_parameters():
        assert np.array_equal(found["weights"][name], weight.detach().numpy()), name


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(value)) ** 2


def test_a_backward_is_of_the_weights_of_its_forward() -> None:
    """To autograd's own gradient, though weights have been updated in between."""
    torch.manual_seed(0)
    model, copy = _Layer(), _Layer()
    copy.load_state_dict(model.state_dict())
    kept = StashedWeights(model, torch.optim.SGD(model.parameters(), lr=0.5), 1)
    values = torch.randn(3, 4, 8)
    old = kept.begin()
    first = kept.run(old, lambda: model(values[0]).sum())
    for value in values[1:]:
        version = kept.begin()
        loss = kept.run(version, lambda one=value: model(one).sum())
        loss.backward()
        kept.end(version)
    assert kept.older == 1
    assert not torch.equal(model.inner.weight, copy.inner.weight)
    first.backward()
    copy(values[0]).sum().backward()
    for name, weight in copy.named_parameters():
        found = old.values[f"part.{name}"].grad
        assert found is not None
        assert torch.allclose(found, weight.grad, rtol=1e-6, atol=0)
    kept.end(old)
    assert kept.older == 0
    assert kept.staleness == {0: 2, 2: 1}


def test_means_are_of_what_any_replica_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros where one has no gradient; none where nobody has one."""
    weights = {name: torch.zeros(2, 3) for name in "abc"}
    first = {"a": torch.ones(2, 3)}
    second = {"a": torch.ones(2, 3), "b": torch.full((2, 3), 4.0)}
    group: Any = SimpleNamespace(size=lambda: 2)
    means = GradientMeans(group=group, dtype=torch.float32)
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda flat, group: sent.append(flat))
    means.of(first, weights)
    means.of(second, weights)
    for own, other in ((first, sent[1]), (second, sent[0])):
        monkeypatch.setattr(
            dist, "all_reduce", lambda flat, group, other=other: flat.add_(other)
        )
        found = means.of(own, weights)
        assert {name: mean.unique().item() for name, mean in found.items()} == {
            "a": 1.0,
            "b": 2.0,
        }


def drop(text: str) -> dict[str, np.ndarray]:
    """Weights of a model with dropout after three steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    plan = Plan.from_json(text)
    config = GPT2Config(
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        vocab_size=96,
        resid_pdrop=0.3,
        embd_pdrop=0.3,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    place = build_mesh(plan.strategy, torch.device("cpu"))
    torch.manual_seed(0)
    model, recording = record(lambda: GPT2LMHeadModel(config), small_bytes=0)
    trainer = Trainer(plan, model, place, recording)
    for step in range(3):
        trainer.step(synthetic_batch(plan.workload, step))
    return {n: w.numpy().copy() for n, w in full_parameters(trainer).items()}


def test_recomputation_repeats_the_random_numbers_of_the_forward(pool: Pool) -> None:
    """Bit for bit what is trained without it."""
    plain, again = (
        pool.run(drop, 2, _plan(2, "gpt2", recompute=how).to_json())
        for how in ("none", "full")
    )
    assert plain[0].keys() == again[0].keys()
    for name, weight in plain[0].items():
        assert np.array_equal(weight, again[0][name]), name


# -- Messages, memory, time ----------------------------------------------------------


def count(text: str, steps: int) -> list[dict[str, tuple[int, int]]]:
    """Kinds, calls and bytes of each step's messages."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    traffic = []
    for step in range(steps):
        with CollectiveCounter() as counter:
            trainer.step(synthetic_batch(plan.workload, step))
        traffic.append({k: (t.count, t.bytes) for k, t in counter.traffic().items()})
        dist.barrier()
    return traffic


def test_steps_between_drains_have_no_collective(pool: Pool) -> None:
    """A message a microbatch and direction; the loss is told when all is drained."""
    every = pool.run(count, 3, _plan(3).to_json(), 3)
    size = 4 * 16 * 32 * 4
    for stage, (first, second, third) in enumerate(every):
        ways = (stage > 0) + (stage < 2)
        for step in (first, second):
            assert set(step) <= {"send", "recv"}
        assert second["send"] == (4 * ways, 4 * ways * size)
        # Three losses.
        assert third["all_reduce"] == (1, 12)
        total = sum(step["send"][1] for step in (first, second, third))
        assert total == 12 * ways * size


def test_bytes_are_those_of_the_plan(pool: Pool) -> None:
    """Real processes' and a dry run's, whose peaks are those of the plan, too."""
    made = planner.plan(
        graph_of("tiny-llama"),
        "local:4",
        global_batch=16,
        pin={
            "asynchrony": "asynchronous:drain_every=16",
            "recompute": "none",
            "pp": 2,
            "dp_replicate": 2,
        },
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert made.not_runnable == ()
    predicted = made.prediction.collective_bytes
    measured, *_ = pool.run(measure, 4, made.to_json())
    ranks = dry_runs(made, lambda: build("tiny-llama"), range(4))
    for kind in ("send", "all_reduce"):
        assert max(one[kind] for one in measured) == predicted[kind]
        for dry, one in zip(ranks, measured, strict=True):
            assert dry.bytes_of(kind) == one[kind]
    found = Verification.of(made, ranks)
    assert not any(one.beyond(0.02) for one in found.deviations), found.deviations
    assert [one.predicted / one.found for one in found.deviations[:2]] == (
        pytest.approx([1, 1], rel=0.03)
    )


def measure(text: str) -> list[dict[str, float]]:
    plan = Plan.from_json(text)
    found = run(plan, lambda: build(plan.model.name), steps=3, measure=True)
    assert found.measurement is not None
    assert len(found.losses) == 3
    every = found.measurement.collectives
    return [{kind: sent.bytes for kind, sent in one.items()} for one in every]


# -- Runs ----------------------------------------------------------------------------


def resume(text: str, folder: str) -> dict[str, Any]:
    """Losses of a run without a break, and of one that is resumed twice."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: build(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 3}
    refused = []
    for steps, every in ((6, 2), (4, 3)):
        with pytest.raises(ExecutionError) as error:
            losses(steps, checkpoint_dir=folder, checkpoint_every=every)
        refused.append(str(error.value))
    return {
        "refused": refused,
        "straight": losses(9),
        "parts": losses(3, **kept)
        + losses(6, resume=True, **kept)
        + losses(9, resume=True, **kept),
    }


def test_a_resumed_run_is_one_without_a_break(pool: Pool, tmp_path: Path) -> None:
    """Bit for bit, from where the pipeline is drained; nowhere else is it saved."""
    plan = _plan(2, dp_replicate=2)
    for each in pool.run(resume, 4, plan.to_json(), str(tmp_path / "kept")):
        assert each["parts"] == each["straight"]
        every, steps = each["refused"]
        assert re.search(r"checkpoint_every=2 .*drained.* use .*every=3", every)
        assert re.search(r"steps=4 .*use steps=6 or another multiple of 3", steps)


def gradients(text: str) -> dict[str, np.ndarray]:
    """Gradient of a batch at the weights after two steps, and those weights."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    for step in range(2):
        trainer.step(synthetic_batch(plan.workload, step))
    trainer.backward(synthetic_batch(plan.workload, 2))
    found = {f"grad {n}": g.numpy() for n, g in full_gradients(trainer).items()}
    weights = full_parameters(trainer).items()
    return found | {name: weight.numpy().copy() for name, weight in weights}


def test_versions_in_bfloat16_are_copies_of_weights_in_float32() -> None:
    torch.manual_seed(0)
    model = _Layer()
    model.inner.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.inner.weight], lr=0.5)
    kept = StashedWeights(model, optimizer, 1, torch.bfloat16)
    version, before = kept.begin(), model.inner.weight.detach().clone()
    value = torch.randn(4, 8, dtype=torch.bfloat16)
    kept.run(version, lambda: model(value).sum()).backward()
    (held,) = version.values.values()
    assert held.dtype == held.grad.dtype == torch.bfloat16
    grad = held.grad.float()
    kept.end(version)
    assert model.inner.weight.dtype == model.inner.bias.dtype == torch.float32
    assert torch.equal(model.inner.weight, before - 0.5 * grad)
    assert torch.equal(held, before.bfloat16())


def test_backward_alone_is_of_the_newest_weights(pool: Pool) -> None:
    plan = _plan(2, dp_replicate=2)
    model = build_model(lambda: build(plan.model.name))
    found, *_ = pool.run(gradients, 4, plan.to_json())
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


# -- With copies that train apart ----------------------------------------------------


def apart(text: str, steps: int) -> dict[str, Any]:
    """Weights of this rank's copy of its stage."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    for step in range(steps):
        trainer.step(synthetic_batch(plan.workload, step))
    return {n: w.detach().numpy().copy() for n, w in trainer.named_parameters()}


def test_copies_exchange_weights_when_their_pipelines_are_drained(pool: Pool) -> None:
    """Each trains by the rule; the mean of both is what both go on with."""
    copies = LocalSteps(
        period=2, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False
    )
    plan = _plan(
        2,
        dp_replicate=2,
        num_microbatches=2,
        synchronisation=copies,
        asynchrony=Asynchronous(drain_every=4),
    )
    assert executor_violations(plan.strategy) == ()
    found = pool.run(apart, 4, plan.to_json(), 2)
    means: dict[str, list[np.ndarray]] = {}
    for copy in range(2):
        serial = _Serial(plan)
        for step in range(2):
            batch = synthetic_batch(plan.workload, step)
            own = {n: value.chunk(2)[copy] for n, value in batch.items()}
            loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
            loss.prepare(own, 2)
            for index in range(2):
                micro = {n: value.chunk(2)[index] for n, value in own.items()}
                serial.microbatch(micro, loss=loss)
        for name, weight in serial.named.items():
            means.setdefault(name, []).append(weight.detach().numpy())
    for weights in found:
        for name, weight in weights.items():
            one, other = means[name]
            assert not np.array_equal(one, other)
            assert np.allclose(weight, (one + other) / 2, rtol=1e-6, atol=1e-7), name
    for first, second in ((0, 1), (2, 3)):
        for name, weight in found[first].items():
            assert np.array_equal(weight, found[second][name])


# -- Training ------------------------------------------------------------------------


def _accuracy(scale: float | None, seed: int) -> float:
    """Percent of held-out digits that are told after 25,600 samples, by four stages.

    Args:
        scale: On the learning rate; None for a flushed pipeline, which updates once in
            four microbatches.
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
    named = dict(model.named_parameters())
    lag = {name: 3 - int(name.split(".")[0]) // 2 for name in named}
    rule = torch.optim.SGD(model.parameters(), lr=0.05 * (scale or 1), momentum=0.9)
    order, older = torch.Generator().manual_seed(seed), []
    for _ in range(400):
        chosen = torch.randint(1437, (64,), generator=order)
        for own in chosen.chunk(1 if scale is None else 4):
            older = [*older[-3:], {n: p.detach().clone() for n, p in named.items()}]
            # Those before the first update are all alike.
            used = {
                name: older[max(-1 - (0 if scale is None else n), -len(older))][name]
                for name, n in lag.items()
            }
            weights = {n: w.clone().requires_grad_() for n, w in used.items()}
            made = functional_call(model, weights, (values[own],))
            nn.functional.cross_entropy(made, labels[own]).backward()
            for name, p in named.items():
                p.grad = weights[name].grad
            rule.step()
    with torch.no_grad():
        told = model(values[1437:]).argmax(1) == labels[1437:]
    return 100 * float(told.float().mean())


@pytest.mark.further
def test_digits_are_told_at_a_rate_of_one_over_the_stages() -> None:
    """Exact training is no better; at its own rate this one diverges."""
    exact, scaled, same = (
        np.mean([_accuracy(scale, seed) for seed in range(3)])
        for scale in (None, 1 / 4, 1.0)
    )
    assert scaled >= exact - 0.5
    assert same < 50


# -- What is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh()}, "pp=1; .* use pp > 1 or asynchrony=flushed"),
        ({"schedule": "GPipe"}, "schedule=GPipe; .*use schedule=1F1B"),
        (
            {"schedule": "Interleaved1F1B", "virtual_stages": 2},
            "schedule=Interleaved1F1B, virtual_stages=2; .*use schedule=1F1B",
        ),
        ({"mesh": Mesh(pp=2, tp=2)}, "tp=2; .*use tp=1"),
        ({"mesh": Mesh(pp=2, cp=2)}, "cp=2; .*use cp=1"),
        ({"mesh": Mesh(pp=2, dp_shard=2)}, "dp_shard=2; .*use dp_shard=1"),
        (
            {"mesh": Mesh(pp=2, dp_replicate=2), "synchronisation": Gossip()},
            "dp_replicate=2 and synchronisation=gossip; .*use synchronisation=all_red",
        ),
        (
            {"mesh": Mesh(pp=2, dp_replicate=2), "synchronisation": LocalSteps()},
            "synchronisation=local_steps .*every 3 steps, use a period of as many",
        ),
        ({"num_microbatches": 5}, "num_microbatches=5; .*use drain_every=15"),
        (
            {"asynchrony": Asynchronous(update_every=8)},
            "num_microbatches=4; .*update_every that divides 4",
        ),
        ({"optimizer": Optimizer()}, "optimizer=AdamW .*; .*use SGD"),
        ({"optimizer": Optimizer(name="Adam")}, "optimizer=Adam .*; .*use SGD"),
        ({"optimizer": Optimizer(name="NAdam")}, "NAdam .betas .0.9, .*use SGD, NAdam"),
        ({"grad_clip_norm": 1.0}, "grad_clip_norm=1.0 .*; .*leave it out"),
        (
            {"asynchrony": Asynchronous(recompute="full")},
            "recompute=none; .*recompute=full, use that",
        ),
        ({"precision": Precision(compute="float16")}, "compute=float16; .*bfloat16"),
        ({"compile": True}, "compile=True; .*use compile=False"),
        ({"semantics": "exact"}, "semantics=exact; .*say semantics=approximate"),
    ],
)
def test_what_stages_cannot_do_apart_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    strategy = _plan(2).strategy.model_copy(update=changes)
    found = executor_violations(strategy)
    assert any(re.search(said, one) for one in found), found


def test_ties_are_refused_across_stages_alone() -> None:
    strategy = _plan(2).strategy
    assert executor_violations(strategy) == ()
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    (across,) = executor_violations(strategy, tied=(ends,))
    assert re.search(r"tied weights \(model.embed.*; .*untie them", across)
    inside = ("model.norm.weight", "lm_head.weight")
    assert executor_violations(strategy, tied=(inside,)) == ()
    with pytest.raises(NoFeasiblePlanError, match=r"tied weights .*untie them"):
        planner.plan(
            build("llama", tied=True),
            "local:2",
            example_inputs={"input_ids": torch.zeros(1, 16, dtype=torch.long)},
            global_batch=8,
            pin={"asynchrony": "pipedream"},
            precision=Precision(compute="float32"),
            optimizer=SGD,
        )


def test_the_planner_refuses_what_does_not_go_together() -> None:
    def asked(optimizer: Optimizer = SGD, **pins: Any) -> Plan:
        return planner.plan(
            graph_of("tiny-llama"),
            "local:2",
            global_batch=8,
            pin={"asynchrony": "ravnest", **pins},
            precision=Precision(compute="float32"),
            optimizer=optimizer,
        )

    made = asked()
    assert made.strategy.asynchrony == Asynchronous(recompute="full")
    assert {stage.recompute for stage in made.strategy.stages} == {"full"}
    for pins, said in (
        ({"recompute": "none"}, "recompute=none; .*recompute=full"),
        ({"pp": 1}, "pp=1; .*use pp > 1"),
        ({"optimizer": Optimizer()}, "optimizer=AdamW .*; .*use SGD"),
    ):
        with pytest.raises(NoFeasiblePlanError, match=said):
            asked(**pins)
    # Six microbatches, which no small pipeline stands for.
    pins = {"num_microbatches": 6, "asynchrony": "asynchronous:drain_every=6"}
    made = planner.plan(
        graph_of("tiny-llama"),
        "local:2",
        global_batch=12,
        pin=pins,
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert made.not_runnable == ()
