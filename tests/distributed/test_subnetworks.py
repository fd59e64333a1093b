"""Copies that train shares of the neurons, dealt out every round, on gloo ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model
from executors.data import synthetic_batch
from executors.replicas.subnetworks import deal_neurons
from executors.strategies.narrow import NeuronGroup, find_groups, narrow_layers
from planner import plan as plan_model
from planner.capture import capture
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.schema import (
    Optimizer,
    Plan,
    Precision,
    TensorSharding,
)
from planner.schema.methods.subnetworks import Subnetworks
from tests.distributed.cases import LLAMA_SHARDING, largest_gap, make_plan
from tests.distributed.planned import graph_of, planned
from tests.distributed.pool import Pool
from tests.distributed.rounds import (
    ADAMW,
    MOMENTUM,
    OTHER_AXES,
    SGD,
    axes_refused,
    deal_without_training,
    local,
    loss_of,
    make,
    move,
    plan_of,
    resume,
    save_between,
    train,
    train_alone,
    train_planned,
    trainer_of,
)

PATTERNS = {
    "perceptron": {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"},
    "llama": LLAMA_SHARDING,
    "gpt2": {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
}
INPUTS, HIDDEN, OUTPUTS = 6, 48, 5


def _plan(model: str, copies: int, steps: int, **changes: Any) -> Plan:
    value = Subnetworks(local_steps=steps, seed=changes.pop("seed", 0))
    return plan_of(
        model,
        PATTERNS.get(model, {"0": "colwise", "2": "rowwise"}),
        dp_replicate=copies,
        synchronisation=value,
        **{"optimizer": SGD, "semantics": "approximate", **changes},
    )


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
    settings = plan.strategy.synchronisation
    assert isinstance(settings, Subnetworks)

    def mask_input(layer: str) -> Any:
        mask = torch.from_numpy(masks[layer][index])
        return model.get_submodule(layer).register_forward_pre_hook(
            lambda _, args: (args[0] * mask,)
        )

    handles = [mask_input(layer) for layer in masks]
    steps = range(turn * settings.local_steps, (turn + 1) * settings.local_steps)
    losses = train_alone(plan, model, index, steps)
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
        assert each["held"] == weights / copies
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
        assert each["held"] == divided + common
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
    trainer = trainer_of(plan)
    most = 0
    for step in range(4):
        trainer.step(synthetic_batch(plan.workload, step))
        most = max(most, sum(local(p).numel() for p in trainer.all_parameters()))
    return most


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_a_copy_holds_an_nth_of_the_weights(pool: Pool, copies: int) -> None:
    plan = _plan("hidden", copies, 2)
    whole = HIDDEN * (INPUTS + OUTPUTS)
    assert pool.run(peak, copies, plan.to_json()) == [whole // copies] * copies


# -- Checkpoints -----------------------------------------------------------------------


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


def test_a_run_is_saved_at_the_end_of_a_round_alone(pool: Pool, tmp_path: Path) -> None:
    plan = _plan("perceptron", 2, 2)
    for said in pool.run(save_between, 2, plan.to_json(), str(tmp_path / "kept")):
        assert "steps=3" in said
        assert "use steps=4" in said


def test_another_plan_goes_on_from_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    """Its first loss is that of the weights which the rounds have led to."""
    plan = _plan("perceptron", 2, 2)
    exact = make_plan("perceptron", dp_shard=2, zero_stage=3, optimizer=SGD)
    found = pool.run(move, 2, plan.to_json(), exact.to_json(), str(tmp_path / "a"))
    value = loss_of(plan, found[0]["weights"], 4)
    for each in found:
        assert each["losses"][0] == pytest.approx(value, rel=1e-5)
    for each in pool.run(move, 2, exact.to_json(), plan.to_json(), str(tmp_path / "b")):
        assert np.isfinite(each["losses"]).all()
        assert len(each["losses"]) == 2


# -- Refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "said"), OTHER_AXES, ids=str)
def test_other_axes_are_refused(fields: dict[str, int], said: str) -> None:
    reason = axes_refused(Subnetworks(), fields)
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


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-bert", "tiny-t5"])
def test_what_is_planned_runs(pool: Pool, model: str) -> None:
    made = planned(model, dp_replicate=2, synchronisation="subnetworks:local_steps=2")
    assert "rowwise" in made.strategy.sharding.patterns.values()
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()


def test_a_plain_sequential_is_planned_across_its_units(pool: Pool) -> None:
    graph = capture(
        lambda: make("hidden"),
        {"input": ((8, INPUTS), "float32")},
        dtype="float32",
        name="hidden",
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
