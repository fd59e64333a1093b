"""Copies that train a core of the neurons alone, and all of them in turn, on gloo."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model, run
from executors.data import synthetic_batch
from executors.dryrun import dry_runs
from executors.losses import LossFunction
from executors.measuring.measure import measure_phases
from executors.measuring.traffic import CollectiveCounter
from executors.replicas.masked import CoreOptimizer, CorePart
from executors.strategies.narrow import find_groups, narrow_layers
from planner import plan as plan_model
from planner.capture import capture
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.graph.neurons import count_outside, only_neurons
from planner.schema import (
    Optimizer,
    Plan,
    Precision,
    TensorSharding,
)
from planner.schema.methods import read_method
from planner.schema.methods.masked import Masked
from tests.distributed.cases import LLAMA_SHARDING, build, largest_gap, make_plan
from tests.distributed.planned import graph_of, planned
from tests.distributed.pool import Pool
from tests.distributed.rounds import (
    ADAMW,
    OTHER_AXES,
    SGD,
    axes_refused,
    local,
    loss_of,
    make,
    move,
    plan_of,
    train_planned,
    trainer_of,
)

MOMENTUM = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9, weight_decay=0.01)
LOSS = 4
PATTERNS: dict[str, Any] = {
    "perceptron": {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"},
    "llama": LLAMA_SHARDING,
    "gpt2": {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
}


def _plan(model: str, copies: int, **changes: Any) -> Plan:
    """Plan of a model with ``core``, ``every`` and ``weak_replicas`` among changes."""
    names = Masked.model_fields.keys() & changes.keys()
    settings = Masked(**{name: changes.pop(name) for name in names})
    changes = {"optimizer": SGD, "semantics": "approximate", **changes}
    changes |= {"dp_replicate": copies, "synchronisation": settings}
    return plan_of(model, PATTERNS[model], **changes)


def _cores(model: nn.Module, plan: Plan) -> dict[str, CorePart]:
    """Core of each parameter that has neurons outside of it."""
    settings = plan.strategy.synchronisation
    assert isinstance(settings, Masked)
    found = {}
    for group in find_groups(model, plan.strategy.sharding):
        core = settings.core_neurons(group.neurons)
        for part in group.parameters:
            length = model.get_parameter(part.name).shape[part.dim]
            found[part.name] = CorePart(part.dim, length // group.neurons * core)
    return found


def _outside_bytes(plan: Plan) -> int:
    model = build_model(lambda: build(plan.model.name))
    return sum(
        part.outside(model.get_parameter(name)).nbytes
        for name, part in _cores(model, plan).items()
    )


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of a copy; bytes, weights and optimizer states by step, without a rest."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)
    found: dict[str, list[Any]] = {
        name: [] for name in ("losses", "norms", "traffic", "weights", "states")
    }

    def look() -> None:
        named = dict(trainer.named_parameters())
        found["weights"].append({n: local(p).numpy().copy() for n, p in named.items()})
        states = {
            f"{key}.{name}": local(value).numpy().copy()
            for name, p in named.items()
            for key, value in trainer.optimizer.state.get(p, {}).items()
        }
        found["states"].append(states)

    look()
    for step in range(steps):
        with CollectiveCounter() as counter:
            result = trainer.step(synthetic_batch(plan.workload, step))
        found["losses"].append(result.loss)
        found["norms"].append(result.grad_norm)
        traffic = counter.traffic().items()
        found["traffic"].append({kind: each.bytes for kind, each in traffic})
        look()
    trainer.replicas.settle()
    look()
    return found


# -- Settings --------------------------------------------------------------------------


def test_the_core_is_a_share_of_neurons_and_never_empty() -> None:
    assert [Masked(core=0.5).core_neurons(n) for n in (1, 2, 12, 64)] == [1, 1, 6, 32]
    assert [Masked(core=0.01).core_neurons(n) for n in (2, 64, 1000)] == [1, 1, 10]
    assert Masked(core=1.0).core_neurons(48) == 48
    assert Masked(every=4).phases == {"core": 0.75, "full": 0.25}


def test_weak_replicas_are_read_from_a_pin() -> None:
    value = read_method("synchronisation", "masked:core=0.25,weak_replicas=1+3")
    assert value == Masked(core=0.25, weak_replicas=(1, 3))
    assert str(value) == "masked:core=0.25,weak_replicas=1+3"
    assert Masked(core=0.25, weak_replicas=(3, 1)) == value
    assert Masked.model_validate_json(value.model_dump_json()) == value  # type: ignore[union-attr]


# -- Training --------------------------------------------------------------------------


def _masked_gradient(
    plan: Plan, model: nn.Module, step: int, core: bool, copies: list[int]
) -> float:
    """Mean gradient over some copies, with features outside of the core at zero."""
    cores, handles = _cores(model, plan), []
    for group in find_groups(model, plan.strategy.sharding) if core else ():
        size = cores[f"{group.layer}.weight"].size

        def mask(_: nn.Module, args: Any, size: int = size) -> Any:
            kept = torch.arange(args[0].shape[-1]) < size
            return (args[0] * kept,)

        layer = model.get_submodule(group.layer)
        handles.append(layer.register_forward_pre_hook(mask))
    model.zero_grad()
    total, batch = 0.0, synthetic_batch(plan.workload, step)
    count = plan.strategy.mesh.dp_replicate
    for index in copies:
        own = {name: value.chunk(count)[index] for name, value in batch.items()}
        loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
        loss.prepare(own, 1)
        value = loss(model(**own), loss.target(own)) / len(copies)
        value.backward()  # type: ignore[no-untyped-call]
        total += value.item()
    for handle in handles:
        handle.remove()
    return total


class _Rule:
    """SGD with momentum, or AdamW, of some coordinates, by its formulas."""

    def __init__(self, spec: Optimizer) -> None:
        self.spec = spec
        self.kept: dict[str, list[torch.Tensor]] = {}

    def step(self, name: str, weight: torch.Tensor, mask: torch.Tensor) -> None:
        spec, grad = self.spec, weight.grad
        assert grad is not None
        zero = torch.zeros_like(weight)
        kept = self.kept.setdefault(name, [zero, zero.clone(), zero.clone()])
        first, second, steps = (one.clone() for one in kept)
        new = weight.detach().clone()
        if spec.name == "SGD":
            first = spec.momentum * first + grad + spec.used_weight_decay * new
            new = new - spec.learning_rate * first
        else:
            steps += 1
            new = new * (1 - spec.learning_rate * spec.used_weight_decay)
            first = 0.9 * first + 0.1 * grad
            second = 0.999 * second + 0.001 * grad**2
            root = (second / (1 - 0.999**steps)).sqrt() + 1e-8
            new = new - spec.learning_rate * first / (1 - 0.9**steps) / root
        with torch.no_grad():
            weight.copy_(torch.where(mask, new, weight))
            for one, other in zip(kept, (first, second, steps), strict=True):
                one.copy_(torch.where(mask, other, one))


def _serial(plan: Plan, steps: int) -> dict[str, Any]:
    """The same in one process, without views: features and coordinates are masked."""
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    assert isinstance(settings, Masked)
    model = build_model(lambda: build(plan.model.name))
    cores, rule = _cores(model, plan), _Rule(plan.strategy.optimizer)
    losses = []
    for step in range(steps):
        core = (step + 1) % settings.every != 0
        takers = [
            copy for copy in range(copies) if core or copy not in settings.weak_replicas
        ]
        losses.append(_masked_gradient(plan, model, step, core, takers))
        for name, weight in model.named_parameters():
            mask = torch.ones_like(weight, dtype=torch.bool)
            if core and name in cores:
                cores[name].outside(mask).fill_(False)
            rule.step(name, weight, mask)
    weights = {n: p.detach().numpy() for n, p in model.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("model", "copies", "changes"),
    [
        ("perceptron", 1, {"optimizer": MOMENTUM}),
        ("perceptron", 2, {"optimizer": MOMENTUM, "core": 0.25, "every": 3}),
        ("perceptron", 2, {"optimizer": ADAMW, "weak_replicas": (0,)}),
        ("perceptron", 4, {"optimizer": MOMENTUM, "weak_replicas": (1, 2)}),
        ("llama", 2, {"optimizer": MOMENTUM}),
        ("gpt2", 2, {"core": 0.75}),
    ],
    ids=str,
)
def test_steps_train_the_core_and_the_whole_model_in_turn(
    pool: Pool, model: str, copies: int, changes: dict[str, Any]
) -> None:
    """Compare with one process that sets features to zero, and keeps coordinates."""
    plan = _plan(model, copies, **changes)
    expected = _serial(plan, 6)
    for each in pool.run(train, copies, plan.to_json(), 6):
        assert each["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert largest_gap(each["weights"][-1], expected["weights"]) <= 3e-5


@pytest.mark.parametrize("model", ["perceptron", "llama"])
def test_core_steps_train_the_narrower_model(pool: Pool, model: str) -> None:
    """Half of the neurons, as a model that has no others, by torch's optimizer."""
    plan = _plan(model, 2, every=100, optimizer=MOMENTUM)
    narrow = build_model(lambda: build(model))
    narrow_layers(narrow, plan.strategy.sharding, 2, 0)
    rule = torch.optim.SGD(narrow.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(4):
        batch = synthetic_batch(plan.workload, step)
        loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
        loss.prepare(batch, 1)
        rule.zero_grad()
        loss(narrow(**batch), loss.target(batch)).backward()
        rule.step()
    expected = {name: p.detach().numpy() for name, p in narrow.named_parameters()}
    cores = _cores(build_model(lambda: build(model)), plan)
    for each in pool.run(train, 2, plan.to_json(), 4):
        found = {
            name: cores[name].inside(torch.from_numpy(weight)).numpy()
            if name in cores
            else weight
            for name, weight in each["weights"][-1].items()
        }
        assert largest_gap(found, expected) <= 1e-5


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("perceptron", {"optimizer": MOMENTUM}),
        ("llama", {"optimizer": ADAMW, "grad_clip_norm": 0.05}),
    ],
    ids=["perceptron", "llama"],
)
def test_a_core_of_all_neurons_is_plain_training(
    pool: Pool, model: str, changes: dict[str, Any]
) -> None:
    plan = _plan(model, 2, core=1.0, **changes)
    ours = pool.run(train, 2, plan.to_json(), 4)
    plain = make_plan(model, dp_replicate=2, **changes)
    theirs = pool.run(train, 2, plain.to_json(), 4)
    for one, other in zip(ours, theirs, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-6)
        assert largest_gap(one["weights"][-1], other["weights"][-1]) <= 1e-6
        weights = sum(weight.nbytes for weight in one["weights"][0].values())
        sent = [step["all_reduce"] for step in one["traffic"]]
        # The gradient's norm takes no message.
        assert sent == [weights + LOSS] * 4


def _apart(
    before: dict[str, Any], after: dict[str, Any], cores: dict[str, CorePart]
) -> tuple[list[str], list[str]]:
    """Names of what has changed outside of the core, and of what has within."""
    outside, inside = [], []
    for full, value in after.items():
        name = full if full in cores else full.partition(".")[2]
        old, new = (torch.from_numpy(one) for one in (before[full], value))
        if name not in cores or not new.ndim:
            continue
        part = cores[name]
        if not torch.equal(part.outside(old), part.outside(new)):
            outside.append(full)
        if not torch.equal(part.inside(old), part.inside(new)):
            inside.append(full)
    return outside, inside


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
@pytest.mark.parametrize("model", ["perceptron", "llama"])
def test_a_core_step_changes_nothing_outside_of_the_core(
    pool: Pool, model: str, optimizer: Optimizer
) -> None:
    """Bit for bit: weights, which decay, momenta and moments."""
    plan = _plan(model, 2, optimizer=optimizer, every=3)
    cores = _cores(build_model(lambda: build(model)), plan)
    for each in pool.run(train, 2, plan.to_json(), 6):
        for kind in ("weights", "states"):
            for step in range(6):
                before, after = each[kind][step], each[kind][step + 1]
                if not before:
                    # States are made by the first step.
                    continue
                outside, inside = _apart(before, after, cores)
                cut = [n for n in after if n in cores or n.partition(".")[2] in cores]
                moved = [name for name in cut if after[name].ndim]
                assert inside == moved
                assert outside == ([] if step % 3 != 2 else moved)
        for name in cores if optimizer is ADAMW else ():
            states = each["states"]
            counted = [float(one[f"step_outside.{name}"]) for one in states[1:7]]
            assert counted == [0, 0, 1, 1, 1, 2]
            assert float(states[-1][f"step.{name}"]) == 6


def test_states_of_one_counter_are_taken_over() -> None:
    """A run by another plan has counted all steps of a parameter as one."""
    weight = nn.Parameter(torch.ones(4, 2))
    plain = torch.optim.AdamW([weight], lr=0.1)
    parted = CoreOptimizer(plain.param_groups, ADAMW, {weight: CorePart(0, 2)})
    other = nn.Parameter(torch.ones(4, 2))
    whole = torch.optim.AdamW([other], lr=1e-3, weight_decay=0.1)
    for step in range(3):
        weight.grad = other.grad = torch.full((4, 2), 0.5 + step)
        whole.step()
        if step == 0:
            parted.state[weight] = {
                key: value.clone() for key, value in whole.state[other].items()
            }
            with torch.no_grad():
                weight.copy_(other)
        else:
            parted.step()
    assert torch.equal(weight, other)
    assert parted.state[weight]["step_outside"] == 3


# -- Bytes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "copies", "core"), [("perceptron", 4, 0.25), ("llama", 2, 0.5)]
)
def test_core_steps_send_the_core_and_full_steps_all(
    pool: Pool, model: str, copies: int, core: float
) -> None:
    plan = _plan(model, copies, core=core, every=3)
    outside = _outside_bytes(plan)
    assert outside > 0
    for each in pool.run(train, copies, plan.to_json(), 6):
        weights = sum(weight.nbytes for weight in each["weights"][0].values())
        sent = [step.pop("all_reduce") for step in each["traffic"]]
        assert not any(each["traffic"])
        assert (
            sent
            == [
                weights - outside + LOSS,
                weights - outside + LOSS,
                weights + LOSS,
            ]
            * 2
        )
        expected = plan.strategy.synchronisation.expected_traffic(
            gradients=weights, weights=weights, divided=outside
        )
        assert expected == {
            "all_reduce": pytest.approx(np.mean(sent) - LOSS, rel=1e-12)
        }


def test_weak_replicas_send_the_core_alone(pool: Pool) -> None:
    plan = _plan("perceptron", 4, weak_replicas=(1,))
    outside = _outside_bytes(plan)
    for rank, each in enumerate(pool.run(train, 4, plan.to_json(), 4)):
        weights = sum(weight.nbytes for weight in each["weights"][0].values())
        core = weights - outside
        full = core if rank == 1 else weights
        sent = [step["all_reduce"] for step in each["traffic"]]
        assert sent == [core + LOSS, full + LOSS] * 2


def test_a_dry_run_follows_both_phases() -> None:
    """Weak replicas are no members of the second group either."""
    made = plan_model(
        graph_of("tiny-llama"),
        "local:4",
        global_batch=8,
        pin={"dp_replicate": 4, "synchronisation": "masked:every=4,weak_replicas=3"},
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    model = build("tiny-llama")
    outside = sum(
        part.outside(model.get_parameter(name)).nbytes
        for name, part in _cores(model, made).items()
    )
    weights = 4 * made.model.parameters
    strong, weak = dry_runs(made, lambda: build("tiny-llama"), [0, 3])
    for rank in (strong, weak):
        assert rank.failure is None
        assert [(one.name, one.share) for one in rank.phases] == [
            ("core", 0.75),
            ("full", 0.25),
        ]
    core, full = (
        {one.group_size: one.bytes for one in phase.collectives}
        for phase in strong.phases
    )
    assert core == {4: weights - outside + LOSS}
    assert full == {3: outside, 4: weights - outside + LOSS}
    mean = sum(one.bytes for one in strong.collectives) - LOSS
    assert made.prediction.collective_bytes["all_reduce"] == pytest.approx(mean)
    assert mean == pytest.approx(weights - 0.75 * outside)
    assert sum(one.bytes for one in weak.collectives) == weights - outside + LOSS
    # The core computes less, a weak replica least.
    assert weak.flops < strong.flops


def measure(text: str) -> dict[str, Any]:
    """Bytes of each rank in a measured step of each phase, and losses behind it."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)
    trainer.step(synthetic_batch(plan.workload, 0))
    counted = measure_phases(trainer, synthetic_batch(plan.workload, 1))
    result = trainer.step(synthetic_batch(plan.workload, 2))
    return {
        "loss": result.loss,
        "bytes": {
            name: [each["all_reduce"].bytes for each in step.traffic]
            for name, step in counted.items()
        },
    }


def test_phases_are_measured_one_by_one(pool: Pool) -> None:
    plan = _plan("perceptron", 4, weak_replicas=(3,))
    model = build_model(lambda: build("perceptron"))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    core = weights - _outside_bytes(plan) + LOSS
    for each in pool.run(measure, 4, plan.to_json()):
        assert each["bytes"] == {
            "core": [core] * 4,
            "full": [weights + LOSS] * 3 + [core],
        }
        assert math.isfinite(each["loss"])


# -- Copies ----------------------------------------------------------------------------


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[name]) for name, value in one.items()
    )


def test_strong_replicas_are_equal_after_each_step(pool: Pool) -> None:
    plan = _plan("llama", 2, optimizer=ADAMW, grad_clip_norm=0.05)
    first, *others = pool.run(train, 2, plan.to_json(), 4)
    for other in others:
        for kind in ("weights", "states"):
            for one, two in zip(first[kind], other[kind], strict=True):
                assert _equal(one, two)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAMW], ids=["momentum", "adamw"])
def test_weak_replicas_have_the_core_and_take_the_rest_to_be_saved(
    pool: Pool, optimizer: Optimizer
) -> None:
    plan = _plan(
        "perceptron", 4, weak_replicas=(0, 2), optimizer=optimizer, grad_clip_norm=0.5
    )
    cores = _cores(build_model(lambda: build("perceptron")), plan)
    found = pool.run(train, 4, plan.to_json(), 4)
    strong = found[1]
    assert _equal(strong["weights"][-1], found[3]["weights"][-1])
    for weak in (found[0], found[2]):
        assert weak["losses"] == strong["losses"]
        assert weak["norms"] == strong["norms"]
        for step in range(5):
            ours, theirs = weak["weights"][step], strong["weights"][step]
            outside, inside = _apart(theirs, ours, cores)
            assert inside == []
            assert outside == ([] if step < 2 else [*cores])
            others = ours.keys() - cores.keys()
            assert all(np.array_equal(ours[n], theirs[n]) for n in others)
            # It has what it began with.
            assert _apart(weak["weights"][0], ours, cores)[0] == []
        for kind in ("weights", "states"):
            assert _equal(weak[kind][-1], strong[kind][-1])


# -- Checkpoints -----------------------------------------------------------------------


def resume(text: str, folder: str) -> dict[str, Any]:
    """Losses of a run without a break, and of one that is resumed twice."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: build(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 3}
    return {
        "straight": losses(7),
        "parts": [
            losses(3, **kept),
            losses(4, resume=True, **kept),
            losses(7, resume=True, **kept),
        ],
    }


@pytest.mark.parametrize(
    ("model", "copies", "changes"),
    [
        ("perceptron", 2, {"optimizer": MOMENTUM}),
        ("perceptron", 2, {"optimizer": ADAMW, "weak_replicas": (0,)}),
        ("llama", 2, {"optimizer": ADAMW, "grad_clip_norm": 0.05, "every": 3}),
        ("llama", 2, {"precision": Precision(compute="bfloat16")}),
        (
            "llama",
            2,
            {"precision": Precision(compute="bfloat16"), "weak_replicas": (1,)},
        ),
    ],
    ids=str,
)
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, model: str, copies: int, changes: dict[str, Any]
) -> None:
    """Bit for bit on every rank, within a cycle and at its end."""
    plan = _plan(model, copies, **changes)
    found = pool.run(resume, copies, plan.to_json(), str(tmp_path / "kept"))
    for each in found:
        assert [len(part) for part in each["parts"]] == [3, 1, 3]
        assert [*chain(*each["parts"])] == each["straight"]
    assert len({tuple(each["straight"]) for each in found}) == 1


def test_another_plan_goes_on_from_the_strong_replicas(
    pool: Pool, tmp_path: Path
) -> None:
    """The first replica, whose optimizer states others take, is a weak one here."""
    plan = _plan("perceptron", 2, weak_replicas=(0,), optimizer=ADAMW)
    exact = make_plan("perceptron", dp_shard=2, zero_stage=3, optimizer=ADAMW)
    found = pool.run(move, 2, plan.to_json(), exact.to_json(), str(tmp_path / "a"))
    expected = _serial(plan, 4)["weights"]
    for each in found:
        assert largest_gap(each["weights"], expected) <= 3e-5
    value = loss_of(plan, found[0]["weights"], 4)
    for each in found:
        assert each["losses"][0] == pytest.approx(value, rel=1e-5)
    for each in pool.run(move, 2, exact.to_json(), plan.to_json(), str(tmp_path / "b")):
        assert np.isfinite(each["losses"]).all()
        assert len(each["losses"]) == 2


# -- Refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("masked:core=0", "core: Input should be greater than 0"),
        ("masked:core=1.5", "core: Input should be less than or equal to 1"),
        ("masked:every=1", "every: Input should be greater than or equal to 2"),
        ("masked:weak_replicas=1+1", "names a replica twice; name each once"),
        ("masked:weak_replicas=-1", "Input should be greater than or equal to 0"),
    ],
)
def test_settings_out_of_range_are_refused(pin: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said) as caught:
        plan_model(
            graph_of("tiny-llama"),
            "local:2",
            global_batch=8,
            pin={"dp_replicate": 2, "synchronisation": pin},
        )
    assert f"synchronisation={pin}: " in str(caught.value)


@pytest.mark.parametrize(
    ("model", "weak", "said"),
    [
        ("tiny-llama", "2", "no replica 2, name some of 0 to 1 as weak_replicas"),
        ("tiny-llama", "0+1", "all replicas are weak.*, leave at least one out"),
        ("tiny-resnet", "1", "with dp_replicate=2, but no module.*; use another"),
    ],
)
def test_what_cannot_be_trained_is_not_planned(
    model: str, weak: str, said: str
) -> None:
    with pytest.raises(NoFeasiblePlanError, match=said) as caught:
        plan_model(
            graph_of(model),
            "local:2",
            global_batch=8,
            pin={
                "dp_replicate": 2,
                "synchronisation": f"masked:weak_replicas={weak}",
            },
        )
    assert f"synchronisation=masked:weak_replicas={weak} with" in str(caught.value)


@pytest.mark.parametrize(("fields", "said"), OTHER_AXES, ids=str)
def test_other_axes_are_refused(fields: dict[str, int], said: str) -> None:
    reason = axes_refused(Masked(), fields)
    assert said in reason
    assert reason.endswith("each mask neurons, use dp_replicate alone")


def build_without_neurons(text: str) -> str:
    """Message of a model whose patterns name no layers between which neurons lie."""
    with pytest.raises(StrategyError) as caught:
        trainer_of(Plan.from_json(text))
    return str(caught.value)


def test_patterns_without_neurons_are_refused(pool: Pool) -> None:
    plan = _plan("perceptron", 2)
    sharding = TensorSharding(patterns={"8": "colwise"})
    strategy = plan.strategy.model_copy(update={"sharding": sharding})
    plan = plan.model_copy(update={"strategy": strategy})
    for said in pool.run(build_without_neurons, 2, plan.to_json()):
        assert "no colwise layers with a rowwise one behind them" in said
        assert "give patterns, or use" in said


# -- Plans -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        *("tiny-llama", "tiny-qwen3", "tiny-gpt2", "tiny-mixtral", "tiny-bert"),
        *("tiny-t5", "tiny-vit", "tiny-whisper", "tiny-recommender"),
    ],
)
def test_planner_and_executors_count_one_core(model: str) -> None:
    """Whole neurons and heads count: 0.3 of 2 heads is one."""
    graph, settings = only_neurons(graph_of(model)), Masked(core=0.3)
    whole = build(model)
    found = sum(
        whole.get_parameter(part.name).numel()
        // group.neurons
        * (group.neurons - settings.core_neurons(group.neurons))
        for group in find_groups(whole, TensorSharding(patterns=dict(graph.sharding)))  # type: ignore[arg-type]
        for part in group.parameters
    )
    assert count_outside(graph, settings.core_neurons) == found > 0


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5"])
def test_what_is_planned_runs(pool: Pool, model: str) -> None:
    made = planned(model, dp_replicate=2, synchronisation="masked")
    assert "rowwise" in made.strategy.sharding.patterns.values()
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()


def test_one_device_alternates_too(pool: Pool) -> None:
    made = plan_model(
        graph_of("tiny-llama"),
        "local:1",
        global_batch=4,
        pin={"synchronisation": "masked:core=0.25,every=4"},
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert made.prediction.collective_bytes == {}
    (losses,) = pool.run(train_planned, 1, made.to_json())
    assert np.isfinite(losses).all()


def test_a_plain_sequential_is_planned_across_its_units() -> None:
    """Half of 48 neurons between two layers that are units of their own."""

    graph = capture(
        lambda: make("hidden"),
        {"input": ((8, 6), "float32")},
        dtype="float32",
        name="hidden",
    )
    made = plan_model(
        graph,
        "local:2",
        global_batch=8,
        pin={"dp_replicate": 2, "synchronisation": "masked"},
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert made.strategy.sharding.patterns == {"0": "colwise", "2": "rowwise"}
    weights = 4 * 48 * (6 + 5)
    assert made.prediction.collective_bytes == {
        "all_reduce": pytest.approx(weights * 3 / 4)
    }
    assert math.isfinite(made.prediction.step_time_s)
