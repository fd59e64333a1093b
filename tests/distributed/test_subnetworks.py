"""Copies that train shares of the neurons, dealt out every round, on gloo ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model, run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.replicas.subnetworks import SubnetworksReplicas, deal_neurons
from executors.strategies.narrow import NeuronGroup, find_groups, narrow_layers
from executors.trainer import Trainer
from planner import plan as plan_model
from planner.capture import capture
from planner.errors import ExecutionError, NoFeasiblePlanError, StrategyError
from planner.schema import (
    InputSpec,
    Mesh,
    Optimizer,
    Plan,
    Precision,
    Stage,
    Strategy,
    TensorSharding,
    Workload,
)
from planner.schema.methods.subnetworks import Subnetworks
from planner.schema.violations import executor_violations
from tests.distributed.cases import BATCH, LLAMA_SHARDING, build, largest_gap, make_plan
from tests.distributed.planned import graph_of, planned
from tests.distributed.pool import Pool

SGD = Optimizer(name="SGD", learning_rate=0.1)
MOMENTUM = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3, weight_decay=0.1)
PATTERNS = {
    "perceptron": {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"},
    "llama": LLAMA_SHARDING,
    "gpt2": {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
}
INPUTS, HIDDEN, OUTPUTS = 6, 48, 5


def hidden() -> nn.Module:
    """One hidden layer, whose weights are all of the model's."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN, bias=False),
        nn.ReLU(),
        nn.Linear(HIDDEN, OUTPUTS, bias=False),
    )


def make(name: str) -> nn.Module:
    """A model by name."""
    return hidden() if name == "hidden" else build(name)


def _plan(model: str, copies: int, steps: int, **changes: Any) -> Plan:
    changes = {"optimizer": SGD, "semantics": "approximate", **changes}
    changes["synchronisation"] = Subnetworks(
        local_steps=steps, seed=changes.pop("seed", 0)
    )
    base = "perceptron" if model == "hidden" else model
    made = make_plan(base, dp_replicate=copies, **changes)
    patterns: Any = PATTERNS.get(model, {"0": "colwise", "2": "rowwise"})
    update: dict[str, Any] = {"sharding": TensorSharding(patterns=patterns)}
    if model != "hidden":
        strategy = made.strategy.model_copy(update=update)
        return made.model_copy(update={"strategy": strategy})
    update["stages"] = (Stage(rank=0, modules=("0", "2")),)
    inputs = (InputSpec(name="input", shape=(INPUTS,), dtype="float32"),)
    return made.model_copy(
        update={
            "strategy": made.strategy.model_copy(update=update),
            "model": made.model.model_copy(update={"name": model}),
            "workload": Workload(global_batch=BATCH, inputs=inputs, loss="mean_square"),
        }
    )


def _trainer(plan: Plan) -> Trainer:
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: make(plan.model.name), small_bytes=0)
    return Trainer(plan, model, place, recording)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "to_local", lambda: parameter)()


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of a copy, bytes by step, the whole model after each step."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses, traffic, weights = [], [], [full_parameters(trainer)]
    for step in range(steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.step(synthetic_batch(plan.workload, step)).loss)
        traffic.append({kind: t.bytes for kind, t in counter.traffic().items()})
        weights.append(full_parameters(trainer))
    return {
        "losses": losses,
        "traffic": traffic,
        "weights": [{n: w.numpy() for n, w in each.items()} for each in weights],
        "held": sum(_local(p).numel() for p in trainer.all_parameters()),
    }


# -- Deals -----------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_each_neuron_has_one_owner_in_every_round(copies: int) -> None:
    seen = np.zeros((copies, 48), dtype=bool)
    for turn in range(60):
        owned = deal_neurons(48, copies, seed=3, turn=turn, group=1)
        assert owned.shape == (copies, 48 // copies)
        assert sorted(owned.flatten().tolist()) == [*range(48)]
        assert (np.diff(owned, axis=1) > 0).all()
        seen[np.arange(copies)[:, None], owned] = True
    # All copies have had all neurons.
    assert seen.all()


def test_deals_differ_by_seed_round_and_group() -> None:
    first = deal_neurons(64, 4, seed=0, turn=0, group=0)
    others = [
        deal_neurons(64, 4, **({"seed": 0, "turn": 0, "group": 0} | one))  # type: ignore[arg-type]
        for one in ({"seed": 1}, {"turn": 1}, {"group": 1}, {"turn": None})
    ]
    assert all((first != other).any() for other in others)
    assert (first == deal_neurons(64, 4, seed=0, turn=0, group=0)).all()


# -- Cutting ---------------------------------------------------------------------------


def _groups(name: str) -> tuple[nn.Module, tuple[NeuronGroup, ...]]:
    model = build_model(lambda: make(name))
    patterns: Any = PATTERNS.get(name, {"0": "colwise", "2": "rowwise"})
    return model, find_groups(model, TensorSharding(patterns=patterns))


def test_groups_are_heads_of_attention_and_features_of_mlps() -> None:
    _, llama = _groups("llama")
    # 2 heads of keys and values, 64 features between.
    assert [group.neurons for group in llama] == [2, 64] * 4
    assert len(llama[0].parameters) == 4
    _, perceptron = _groups("perceptron")
    assert [group.neurons for group in perceptron] == [12, 12]
    assert [one.name for one in perceptron[1].parameters] == [
        *("4.weight", "4.bias", "6.weight")
    ]
    _, gpt2 = _groups("gpt2")
    # Conv1D has its features in the second dimension.
    assert [one.dim for one in gpt2[0].parameters] == [1, 0, 0]


@pytest.mark.parametrize(
    ("patterns", "copies", "said"),
    [
        ({}, 2, "no colwise layers .*; give patterns, or use"),
        ({"8": "colwise"}, 2, "no colwise layers .*; give patterns, or use"),
        ({"0": "colwise", "2": "rowwise"}, 5, "does not divide the 12 .*; use 1, 2, 3"),
        (
            {"8": "colwise", "2": "rowwise"},
            2,
            "takes 12 features, no layer .*; neurons",
        ),
        ({"1": "colwise", "2": "rowwise"}, 2, "1 is ReLU, neurons .*; leave it out"),
        ({"0": "colwise", "8": "rowwise"}, 2, None),
    ],
)
def test_layers_without_neurons_are_refused(
    patterns: Any, copies: int, said: str | None
) -> None:
    model = make("perceptron")
    sharding = TensorSharding(patterns=patterns)
    if said is None:
        narrow_layers(model, sharding, copies, 0)
        return
    with pytest.raises(StrategyError, match=said):
        narrow_layers(model, sharding, copies, 0)


# -- Training --------------------------------------------------------------------------


def _owned(
    group: NeuronGroup, plan: Plan, number: int, turn: int, size: int
) -> np.ndarray:
    """Mask of the features of each copy. Shape [copies, size]."""
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    assert isinstance(settings, Subnetworks)
    dealt = deal_neurons(
        group.neurons, copies, seed=settings.seed, turn=turn, group=number
    )
    owned = np.zeros((copies, group.neurons), dtype=bool)
    owned[np.arange(copies)[:, None], dealt] = True
    return owned.repeat(size // group.neurons, axis=1)


def _train_masked(
    plan: Plan, model: nn.Module, masks: dict[str, Any], index: int, turn: int
) -> list[float]:
    """A round of one copy: the whole model with other copies' features at zero."""
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    assert isinstance(settings, Subnetworks)

    def mask_input(layer: str) -> Any:
        mask = torch.from_numpy(masks[layer][index])
        return model.get_submodule(layer).register_forward_pre_hook(
            lambda _, args: (args[0] * mask,)
        )

    handles = [mask_input(layer) for layer in masks]
    spec = plan.strategy.optimizer
    options: dict[str, Any] = {"lr": spec.learning_rate}
    options["weight_decay"] = spec.weight_decay
    options |= {"momentum": spec.momentum} if spec.name == "SGD" else {}
    rule = getattr(torch.optim, spec.name)(model.parameters(), **options)
    losses = []
    for step in range(turn * settings.local_steps, (turn + 1) * settings.local_steps):
        batch = synthetic_batch(plan.workload, step)
        own = {name: value.chunk(copies)[index] for name, value in batch.items()}
        loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
        loss.prepare(own, 1)
        rule.zero_grad()
        value = loss(model(**own), loss.target(own))
        value.backward()  # type: ignore[no-untyped-call]
        rule.step()
        losses.append(value.item())
    for handle in handles:
        handle.remove()
    return losses


def _serial(plan: Plan, rounds: int) -> dict[str, Any]:
    """The same in one process, without cutting anything."""
    whole = build_model(lambda: make(plan.model.name))
    groups = find_groups(whole, plan.strategy.sharding)
    copies = plan.strategy.mesh.dp_replicate
    losses: list[list[float]] = [[] for _ in range(copies)]
    for turn in range(rounds):
        masks, parts = {}, {}
        for number, group in enumerate(groups):
            for part in group.parameters:
                size = whole.get_parameter(part.name).shape[part.dim]
                owned = _owned(group, plan, number, turn, size)
                shape = [copies, *(1,) * whole.get_parameter(part.name).ndim]
                shape[part.dim + 1] = size
                parts[part.name] = torch.from_numpy(owned.reshape(shape))
            masks[group.layer] = owned
        models = [copy.deepcopy(whole) for _ in range(copies)]
        for index, model in enumerate(models):
            losses[index] += _train_masked(plan, model, masks, index, turn)
        with torch.no_grad():
            for name, weight in whole.named_parameters():
                of_copies = torch.stack([m.get_parameter(name) for m in models])
                if name in parts:
                    weight.copy_((of_copies * parts[name]).sum(0))
                else:
                    weight.copy_(of_copies.mean(0))
    weights = {n: p.detach().numpy() for n, p in whole.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("model", "copies", "optimizer"),
    [
        ("hidden", 4, SGD),
        ("perceptron", 2, MOMENTUM),
        ("llama", 2, SGD),
        ("gpt2", 2, SGD),
    ],
)
def test_copies_train_narrower_models(
    pool: Pool, model: str, copies: int, optimizer: Optimizer
) -> None:
    """Compare with one process that holds whole models and sets features to zero."""
    plan = _plan(model, copies, 2, optimizer=optimizer)
    found = pool.run(train, copies, plan.to_json(), 6)
    expected = _serial(plan, 3)
    for each, own in zip(found, expected["losses"], strict=True):
        # At the end of a round copies share their loss.
        assert each["losses"][::2] == pytest.approx(own[::2], rel=2e-5)
    shared = np.mean(expected["losses"], axis=0)
    assert found[0]["losses"][1::2] == pytest.approx(shared[1::2], rel=2e-5)
    assert largest_gap(found[0]["weights"][-1], expected["weights"]) <= 3e-5


def deal_without_training(text: str, turns: int) -> list[dict[str, Any]]:
    """The whole model before and after some rounds without a step of training."""
    trainer = _trainer(Plan.from_json(text))
    replicas = trainer.replicas
    assert isinstance(replicas, SubnetworksReplicas)
    found = [full_parameters(trainer)]
    for turn in range(turns):
        replicas.before_forward(turn)
        replicas.after_update(turn)
        found.append(full_parameters(trainer))
    return [{n: w.numpy() for n, w in each.items()} for each in found]


@pytest.mark.parametrize(
    ("model", "copies"), [("hidden", 4), ("perceptron", 4), ("llama", 2), ("gpt2", 2)]
)
def test_rounds_without_steps_leave_the_model_bit_for_bit(
    pool: Pool, model: str, copies: int
) -> None:
    whole = build_model(lambda: make(model)).named_parameters()
    expected = {name: p.detach().numpy() for name, p in whole}
    plan = _plan(model, copies, 1)
    for each in pool.run(deal_without_training, copies, plan.to_json(), 3):
        for weights in each:
            assert sorted(weights) == sorted(expected)
            for name, value in weights.items():
                assert np.array_equal(value, expected[name]), name


@pytest.mark.parametrize("model", ["hidden", "perceptron", "llama"])
def test_one_copy_is_plain_training_bit_for_bit(pool: Pool, model: str) -> None:
    plan = _plan(model, 1, 2)
    plain = plan.strategy.model_copy(
        update={
            "synchronisation": make_plan("perceptron").strategy.synchronisation,
            "sharding": TensorSharding(),
        }
    )
    (ours,) = pool.run(train, 1, plan.to_json(), 4)
    other = plan.model_copy(update={"strategy": plain})
    (theirs,) = pool.run(train, 1, other.to_json(), 4)
    assert ours["losses"] == theirs["losses"]
    for name, value in theirs["weights"][-1].items():
        assert np.array_equal(ours["weights"][-1][name], value), name
    assert not any(step.get("all_to_all") for step in ours["traffic"])


# -- Bytes and memory ------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 4])
def test_a_round_sends_a_copy_its_weights_once(pool: Pool, copies: int) -> None:
    """|W|/n a round from owner to owner; a server would collect, then send: 2 |W|/n."""
    plan = _plan("hidden", copies, 2)
    weights = 4 * HIDDEN * (INPUTS + OUTPUTS)
    loss = 4
    for each in pool.run(train, copies, plan.to_json(), 6):
        assert each["held"] * 4 == weights / copies
        first, *later = each["traffic"]
        assert first == {"all_to_all": weights / copies}
        assert later[1::2] == [{}] * 2
        exchange = {"all_reduce": loss, "all_to_all": weights / copies}
        assert later[::2] == [exchange] * 3
    expected = plan.strategy.synchronisation.expected_traffic(
        gradients=0.0, weights=weights / copies, divided=weights / copies
    )
    assert expected == {"all_reduce": 0.0, "all_to_all": weights / copies / 2}


def test_what_has_no_neurons_is_averaged(pool: Pool) -> None:
    plan = _plan("llama", 2, 2)
    model, groups = _groups("llama")
    divided = sum(
        model.get_parameter(part.name).nbytes // 2
        for group in groups
        for part in group.parameters
    )
    common = sum(p.nbytes for p in model.parameters()) - 2 * divided
    for each in pool.run(train, 2, plan.to_json(), 2):
        assert each["held"] * 4 == divided + common
        assert each["traffic"][1] == {"all_to_all": divided, "all_reduce": common + 4}


def test_bytes_are_a_240th_of_data_parallel_training() -> None:
    """n = 4, J = 80, one hidden layer; with a server's two ways of the same weights."""
    method, copies, weights = Subnetworks(), 4, 4096.0 * 4096
    part = weights / copies
    ours = method.expected_traffic(gradients=part, weights=part, divided=part)
    all_reduce = 2 * (copies - 1) / copies * weights
    assert 2 * ours["all_to_all"] / all_reduce == pytest.approx(1 / 240)
    assert ours["all_to_all"] / all_reduce == pytest.approx(1 / 480)


def peak(text: str) -> int:
    """Most scalars of parameters alive at once while training, on this rank."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    most = 0
    for step in range(4):
        trainer.step(synthetic_batch(plan.workload, step))
        most = max(most, sum(_local(p).numel() for p in trainer.all_parameters()))
    return most


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_a_copy_holds_an_nth_of_the_weights(pool: Pool, copies: int) -> None:
    plan = _plan("hidden", copies, 2)
    whole = HIDDEN * (INPUTS + OUTPUTS)
    assert pool.run(peak, copies, plan.to_json()) == [whole // copies] * copies


# -- Checkpoints -----------------------------------------------------------------------


def resume(text: str, folder: str) -> dict[str, list[float]]:
    """Losses of a run without a break, and of one that is resumed halfway."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: make(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 2}
    return {
        "straight": losses(6),
        "first": losses(2, **kept),
        "rest": losses(6, resume=True, **kept),
    }


@pytest.mark.parametrize(
    ("model", "copies", "changes"),
    [
        ("perceptron", 2, {"optimizer": MOMENTUM}),
        ("llama", 2, {"optimizer": ADAMW, "grad_clip_norm": 0.05}),
        ("llama", 2, {"precision": Precision(compute="bfloat16")}),
    ],
    ids=["perceptron", "llama", "bfloat16"],
)
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, model: str, copies: int, changes: dict[str, Any]
) -> None:
    """Bit for bit on every rank."""
    plan = _plan(model, copies, 2, **changes)
    found = pool.run(resume, copies, plan.to_json(), str(tmp_path / "kept"))
    for each in found:
        assert each["first"] + each["rest"] == each["straight"]
    assert len({tuple(each["straight"]) for each in found}) == copies


def save_between(text: str, folder: str) -> str:
    """Message of a run that is to be saved within a round."""
    plan = Plan.from_json(text)
    with pytest.raises(ExecutionError) as caught:
        run(plan, lambda: make(plan.model.name), steps=3, checkpoint_dir=folder)
    return str(caught.value)


def test_a_run_is_saved_at_the_end_of_a_round_alone(pool: Pool, tmp_path: Path) -> None:
    plan = _plan("perceptron", 2, 2)
    for said in pool.run(save_between, 2, plan.to_json(), str(tmp_path / "kept")):
        assert "steps=3" in said
        assert "use steps=4" in said


def move(text: str, other: str, folder: str) -> dict[str, Any]:
    """Train by one plan, go on by another; and the model where they meet."""
    first, second = Plan.from_json(text), Plan.from_json(other)
    begun = train(text, 4)
    run(first, lambda: make(first.model.name), steps=4, checkpoint_dir=folder)
    rest = run(
        second,
        lambda: make(second.model.name),
        steps=6,
        checkpoint_dir=folder,
        resume=True,
    )
    return {"weights": begun["weights"][-1], "losses": list(rest.losses)}


def test_another_plan_goes_on_from_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    """Its first loss is that of the weights which the rounds have led to."""
    plan = _plan("perceptron", 2, 2)
    exact = make_plan("perceptron", dp_shard=2, zero_stage=3, optimizer=SGD)
    found = pool.run(move, 2, plan.to_json(), exact.to_json(), str(tmp_path / "a"))
    model = build_model(lambda: make("perceptron"))
    model.load_state_dict(
        {name: torch.from_numpy(w) for name, w in found[0]["weights"].items()}
    )
    batch = synthetic_batch(plan.workload, 4)
    loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
    loss.prepare(batch, 1)
    value = loss(model(**batch), loss.target(batch)).item()
    for each in found:
        assert each["losses"][0] == pytest.approx(value, rel=1e-5)
    for each in pool.run(move, 2, exact.to_json(), plan.to_json(), str(tmp_path / "b")):
        assert np.isfinite(each["losses"]).all()
        assert len(each["losses"]) == 2


# -- Refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tp": 2}, "with tp=2; "),
        ({"pp": 2}, "with pp=2; "),
        ({"cp": 2}, "with cp=2; "),
        ({"dp_shard": 2, "zero_stage": 3}, "with dp_shard=2 and zero_stage=3; "),
        ({"dp_shard": 2, "ep": 2, "zero_stage": 1}, "dp_shard=2 and ep=2 and zero_"),
    ],
    ids=str,
)
def test_other_axes_are_refused(fields: dict[str, int], said: str) -> None:
    degrees = {name: value for name, value in fields.items() if name != "zero_stage"}
    strategy = Strategy(
        mesh=Mesh(dp_replicate=2, **degrees),
        zero_stage=fields.get("zero_stage", 0),  # type: ignore[arg-type]
        semantics="approximate",
        synchronisation=Subnetworks(),
    )
    (reason,) = (
        one
        for one in executor_violations(strategy)
        if one.startswith("synchronisation=subnetworks ")
    )
    assert said in reason
    assert reason.endswith("have parts of the layers, use dp_replicate alone")


@pytest.mark.parametrize(
    ("model", "copies", "said"),
    [
        ("tiny-llama", 4, "dp_replicate=4 does not divide num_key_value_heads=2; use"),
        ("tiny-resnet", 2, "subnetworks with dp_replicate=2, but no module"),
    ],
)
def test_models_without_enough_neurons_are_not_planned(
    model: str, copies: int, said: str
) -> None:
    with pytest.raises(NoFeasiblePlanError, match=said):
        plan_model(
            graph_of(model),
            f"local:{copies}",
            global_batch=8,
            pin={"dp_replicate": copies, "synchronisation": "ist"},
        )


# -- Plans -----------------------------------------------------------------------------


def train_planned(text: str) -> list[float]:
    """Losses of four steps by a plan of the planner's."""
    made = Plan.from_json(text)
    return list(run(made, lambda: make(made.model.name), steps=4).losses)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-bert", "tiny-t5"])
def test_what_is_planned_runs(pool: Pool, model: str) -> None:
    made = planned(model, dp_replicate=2, synchronisation="subnetworks:local_steps=2")
    assert "rowwise" in made.strategy.sharding.patterns.values()
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()


def test_a_plain_sequential_is_planned_across_its_units(pool: Pool) -> None:
    graph = capture(
        hidden, {"input": ((8, INPUTS), "float32")}, dtype="float32", name="hidden"
    )
    assert graph.unit_names == ("0", "2")
    assert graph.sharding == {}
    made = plan_model(
        graph,
        "local:2",
        global_batch=8,
        pin={"dp_replicate": 2, "synchronisation": "subnetworks:local_steps=2"},
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert made.strategy.sharding.patterns == {"0": "colwise", "2": "rowwise"}
    weights = 4 * HIDDEN * (INPUTS + OUTPUTS)
    assert made.prediction.collective_bytes == {"all_to_all": weights / 2 / 2}
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()
