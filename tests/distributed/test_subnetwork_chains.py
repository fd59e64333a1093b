"""Chains of layers that are cut both ways, dealt out every round, on gloo ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model
from executors.checkpoints.snapshot import full_gradients
from executors.data import synthetic_batch
from executors.dryrun import dry_runs
from executors.replicas.subnetworks import deal_neurons
from executors.strategies.narrow import KEPT_ROWS, NeuronGroup, find_groups
from planner import plan as plan_model
from planner.capture import capture
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.graph import ModelGraph
from planner.graph.neurons import only_chains
from planner.schema import Optimizer, Plan, Precision, TensorSharding
from planner.schema.methods import read_method
from planner.schema.methods.subnetworks import Subnetworks
from planner.schema.verification import Verification
from tests.distributed.cases import largest_gap
from tests.distributed.planned import graph_of
from tests.distributed.pool import Pool
from tests.distributed.rounds import (
    ADAMW,
    INPUTS,
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
    train,
    train_alone,
    train_planned,
    trainer_of,
)

PATTERNS: dict[str, Any] = {
    "deep": {"0": "colwise", "2": "colwise", "4": "colwise", "6": "rowwise"},
    "gcn": {
        **{f"layers.{index}": "colwise" for index in range(3)},
        "layers.3": "rowwise",
    },
}
LAYERS = {name: tuple(patterns) for name, patterns in PATTERNS.items()}


def _plan(model: str, copies: int, steps: int, **changes: Any) -> Plan:
    value = Subnetworks(local_steps=steps, layers="chains", seed=changes.pop("seed", 0))
    return plan_of(
        model,
        PATTERNS[model],
        dp_replicate=copies,
        synchronisation=value,
        **{"optimizer": SGD, "semantics": "approximate", **changes},
    )


def _groups(model: nn.Module, name: str) -> tuple[NeuronGroup, ...]:
    sharding = TensorSharding(patterns=PATTERNS[name])
    return find_groups(model, sharding, chains=True)


def _bytes(name: str, copies: int) -> tuple[int, int, int]:
    """Bytes of a copy's part of what is cut one way, both ways, and of the rest."""
    model = make(name)
    first, *inner, last = (model.get_submodule(layer) for layer in LAYERS[name])
    once = [first.weight, last.weight]
    once += [layer.bias for layer in (first, *inner) if layer.bias is not None]
    every = list(model.parameters())
    whole = sum(p.nbytes for p in every)  # type: ignore[misc]
    one_way = sum(p.nbytes for p in once)  # type: ignore[misc, union-attr]
    both = sum(layer.weight.nbytes for layer in inner)  # type: ignore[misc, operator]
    return one_way // copies, both // copies**2, whole - one_way - both


# -- Layers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deep", "gcn"])
def test_each_hidden_feature_is_made_by_one_layer_and_taken_by_the_next(
    name: str,
) -> None:
    model = make(name)
    layers = LAYERS[name]
    groups = _groups(model, name)
    assert [group.layer for group in groups] == list(layers[1:])
    for group, before in zip(groups, layers, strict=False):
        assert group.neurons == model.get_submodule(before).out_features
        assert group.parameters[0].name == f"{before}.weight"
        assert group.parameters[0].dim == 0
        assert group.parameters[-1].name == f"{group.layer}.weight"
        assert group.parameters[-1].dim == 1
    # Neither inputs nor outputs of the model.
    cut = [(part.name, part.dim) for group in groups for part in group.parameters]
    assert (f"{layers[0]}.weight", 1) not in cut
    assert (f"{layers[-1]}.weight", 0) not in cut
    assert (f"{layers[-1]}.bias", 0) not in cut


def test_layers_that_do_not_fit_are_refused() -> None:
    patterns: Any = {"0": "colwise", "4": "colwise", "6": "rowwise"}
    with pytest.raises(StrategyError, match=r"4 takes 24 features, 0 make \[48\]"):
        find_groups(make("deep"), TensorSharding(patterns=patterns), chains=True)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_round_covers_a_share_of_a_layer_and_all_rounds_all_of_it(
    copies: int,
) -> None:
    """A feature has one owner; a weight between two is trained where owners meet."""
    covered = np.zeros((24, 48), dtype=int)
    for turn in range(60):
        rows, columns = (
            deal_neurons(size, copies, seed=1, turn=turn, group=group)
            for group, size in ((1, 24), (0, 48))
        )
        assert sorted(rows.flatten()) == [*range(24)]
        assert sorted(columns.flatten()) == [*range(48)]
        met = np.zeros_like(covered)
        for down, across in zip(rows, columns, strict=True):
            met[np.ix_(down, across)] += 1
        assert met.max() == 1
        assert met.sum() * copies == met.size
        covered += met
    assert covered.min() > 0


# -- Training --------------------------------------------------------------------------


def _owned(size: int, copies: int, *, seed: int, turn: int, group: int) -> Any:
    """Mask of the features of each copy. Shape [copies, size]."""
    dealt = deal_neurons(size, copies, seed=seed, turn=turn, group=group)
    owned = np.zeros((copies, size), dtype=bool)
    owned[np.arange(copies)[:, None], dealt] = True
    return torch.from_numpy(owned)


def _serial(plan: Plan, rounds: int) -> dict[str, Any]:
    """The same in one process: whole models, other copies' features at zero."""
    settings, name = plan.strategy.synchronisation, plan.model.name
    assert isinstance(settings, Subnetworks)
    copies, steps = plan.strategy.mesh.dp_replicate, settings.local_steps
    whole = build_model(lambda: make(name))
    groups = _groups(whole, name)
    losses: list[list[float]] = [[] for _ in range(copies)]
    for turn in range(rounds):
        models = [copy.deepcopy(whole) for _ in range(copies)]
        trained: dict[str, Any] = {
            n: torch.ones(copies, *p.shape, dtype=torch.bool)
            for n, p in whole.named_parameters()
        }
        cut = set()
        for number, group in enumerate(groups):
            masks = _owned(
                group.neurons, copies, seed=settings.seed, turn=turn, group=number
            )
            for index, model in enumerate(models):
                layer = model.get_submodule(group.layer)
                layer.register_forward_pre_hook(
                    lambda _, args, mask=masks[index]: (args[0] * mask,)
                )
            for part in group.parameters:
                shape = [copies, *(1,) * whole.get_parameter(part.name).ndim]
                shape[part.dim + 1] = group.neurons
                trained[part.name] = trained[part.name] & masks.view(shape)
                cut.add(part.name)
        for index, model in enumerate(models):
            own = range(turn * steps, (turn + 1) * steps)
            losses[index] += train_alone(plan, model, index, own)
        with torch.no_grad():
            for key, weight in whole.named_parameters():
                of_copies = torch.stack([m.get_parameter(key) for m in models])
                if key in cut:
                    for values, mask in zip(of_copies, trained[key], strict=True):
                        weight.copy_(torch.where(mask, values, weight))
                else:
                    weight.copy_(of_copies.mean(0))
    weights = {n: p.detach().numpy() for n, p in whole.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("model", "copies", "changes"),
    [
        ("deep", 2, {"optimizer": MOMENTUM}),
        ("deep", 4, {"seed": 3}),
        ("gcn", 2, {"optimizer": MOMENTUM}),
        ("gcn", 4, {}),
    ],
    ids=str,
)
def test_copies_train_narrower_layers(
    pool: Pool, model: str, copies: int, changes: dict[str, Any]
) -> None:
    """Compare with one process that holds whole models and sets features to zero."""
    plan = _plan(model, copies, 2, **changes)
    found = pool.run(train, copies, plan.to_json(), 6)
    expected = _serial(plan, 3)
    for each, own in zip(found, expected["losses"], strict=True):
        # At the end of a round copies share their loss.
        assert each["losses"][::2] == pytest.approx(own[::2], rel=2e-5)
    shared = np.mean(expected["losses"], axis=0)
    assert found[0]["losses"][1::2] == pytest.approx(shared[1::2], rel=2e-5)
    assert largest_gap(found[0]["weights"][-1], expected["weights"]) <= 3e-5


@pytest.mark.parametrize(("model", "copies"), [("deep", 2), ("deep", 4), ("gcn", 4)])
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
                assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("model", ["deep", "gcn"])
def test_one_copy_is_plain_training_bit_for_bit(pool: Pool, model: str) -> None:
    plan = _plan(model, 1, 2)
    plain = plan_of(model, {}, optimizer=SGD)
    (ours,) = pool.run(train, 1, plan.to_json(), 4)
    (theirs,) = pool.run(train, 1, plain.to_json(), 4)
    assert ours["losses"] == theirs["losses"]
    for name, value in theirs["weights"][-1].items():
        assert np.array_equal(ours["weights"][-1][name], value), name
    assert not any(step.get("all_to_all") for step in ours["traffic"])


def gradients(text: str) -> dict[str, Any]:
    """Whole gradients of the first step."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)
    trainer.step(synthetic_batch(plan.workload, 0))
    found = full_gradients(trainer)
    return {name: value.numpy() for name, value in found.items()}


def test_gradients_are_zero_where_no_copys_features_meet(pool: Pool) -> None:
    plan = _plan("deep", 2, 100)
    for found in pool.run(gradients, 2, plan.to_json()):
        value = found["2.weight"]
        assert value.shape == (24, 48)
        met = np.zeros(value.shape, dtype=bool)
        rows, columns = (
            deal_neurons(size, 2, seed=0, turn=0, group=group)
            for group, size in ((1, 24), (0, 48))
        )
        for down, across in zip(rows, columns, strict=True):
            met[np.ix_(down, across)] = True
        assert not value[~met].any()
        assert np.count_nonzero(value[met]) > 0.2 * met.sum()


# -- Bytes and memory ------------------------------------------------------------------


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("model", ["deep", "gcn"])
def test_a_round_sends_what_is_cut_both_ways_twice(
    pool: Pool, model: str, copies: int
) -> None:
    """W/n from owner to owner, D/n^2 to those who keep layers and D/n^2 back."""
    plan = _plan(model, copies, 2)
    one_way, both, common = _bytes(model, copies)
    exchange = {"all_to_all": one_way + 2 * both, "all_reduce": common + 4}
    for each in pool.run(train, copies, plan.to_json(), 6):
        first, *later = each["traffic"]
        # Nothing is to be returned before the first step.
        assert first == {"all_to_all": one_way + both}
        assert later[::2] == [exchange] * 3
        assert later[1::2] == [{}] * 2
        assert each["held"] == one_way + both + common


def kept(text: str) -> tuple[int, int]:
    """Bytes of parameters and of rows of layers that a copy keeps while it trains."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)
    trainer.step(synthetic_batch(plan.workload, 0))
    (part,) = trainer.parts.values()
    buffers = dict(part.inner.named_buffers())
    assert all(name.endswith(f".{KEPT_ROWS}") for name in buffers)
    storages = [b.untyped_storage().nbytes() for b in buffers.values()]
    return sum(local(p).nbytes for p in trainer.all_parameters()), sum(storages)


@pytest.mark.parametrize("copies", [2, 4])
def test_a_copy_keeps_an_nth_of_each_layer(pool: Pool, copies: int) -> None:
    plan = _plan("deep", copies, 2)
    one_way, both, common = _bytes("deep", copies)
    found = pool.run(kept, copies, plan.to_json())
    assert found == [(one_way + both + common, both * copies)] * copies


def _captured(name: str) -> ModelGraph:
    example = {key: ((8, *shape), "float32") for key, shape in INPUTS[name].items()}
    return capture(lambda: make(name), example, dtype="float32", name=name)


def _planned(name: str, copies: int, **changes: Any) -> Plan:
    return plan_model(
        _captured(name),
        f"local:{copies}",
        global_batch=8,
        pin={
            "dp_replicate": copies,
            "synchronisation": "gist:local_steps=2",
            "recompute": "none",
            "num_microbatches": 1,
        },
        precision=Precision(compute="float32"),
        **{"optimizer": SGD, **changes},
    )


@pytest.mark.parametrize("name", ["deep", "gcn"])
def test_chains_are_found_in_captured_models(name: str) -> None:
    graph = only_chains(_captured(name))
    styles = {p.name: p.style for p in graph.parameters if p.name.endswith("weight")}
    first, *inner, last = LAYERS[name]
    assert styles == {
        f"{first}.weight": "colwise",
        **{f"{layer}.weight": "both" for layer in inner},
        f"{last}.weight": "rowwise",
    }
    assert all(block.tp_collectives == 0 for block in graph.blocks)
    sizes = {"deep": 8, "gcn": 8}
    assert graph.tp_dims == {"intermediate_size": sizes[name]}


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("name", ["deep", "gcn"])
def test_bytes_are_priced_verified_and_counted(
    pool: Pool, name: str, copies: int
) -> None:
    made = _planned(name, copies)
    whole = make(name)
    found_groups = find_groups(whole, made.strategy.sharding, chains=True)
    assert found_groups == _groups(whole, name)
    one_way, both, common = _bytes(name, copies)
    expected = {"all_reduce": common, "all_to_all": one_way + 2 * both}
    assert made.prediction.collective_bytes == {
        kind: pytest.approx(size / 2) for kind, size in expected.items()
    }
    sent = (2 * common + one_way + 2 * both) * (copies - 1) / copies / 2
    assert made.prediction.link_bytes == {"dp": pytest.approx(sent)}
    runs = dry_runs(made, lambda: make(name), [0])
    assert not any(one.failure for one in runs)
    found = {
        one.name.partition(",")[0]: one.found
        for one in Verification.of(made, runs).deviations
        if one.name.startswith("all-")
    }
    # A round's mean loss is summed up, too.
    assert found == {
        "all-reduce": pytest.approx(common / 2, abs=4),
        "all-to-all": pytest.approx((one_way + 2 * both) / 2),
    }
    exchange = expected | {"all_reduce": common + 4}
    for each in pool.run(train, copies, made.to_json(), 4):
        assert each["traffic"][1::2] == [exchange] * 2


def test_memory_is_what_a_copy_trains_and_an_nth_of_each_layer() -> None:
    made = _planned("deep", 2, optimizer=Optimizer())
    one_way, both, common = _bytes("deep", 2)
    (expected,) = made.prediction.memory
    trained = one_way + both + common
    assert expected.parameters_bytes == trained
    # What is kept from step to step beside them counts here.
    assert expected.gradients_bytes == trained + 2 * both
    assert expected.optimizer_bytes == 2 * trained
    (found,) = dry_runs(made, lambda: make("deep"), [0])
    assert found.memory_bytes["parameters"] == trained
    batch = 4 * 4 * 6
    assert found.memory_bytes["buffers"] == 2 * both + batch


# -- Checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "copies", "changes"),
    [
        ("deep", 2, {"optimizer": MOMENTUM}),
        ("deep", 4, {"optimizer": ADAMW, "grad_clip_norm": 0.05}),
        ("gcn", 2, {"precision": Precision(compute="bfloat16")}),
    ],
    ids=["momentum", "adamw", "bfloat16"],
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


def test_another_plan_goes_on_from_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    """Its first loss is that of the weights which the rounds have led to."""
    plan = _plan("deep", 2, 2)
    exact = plan_of("deep", {}, dp_shard=2, zero_stage=3, optimizer=SGD)
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
    reason = axes_refused(Subnetworks(layers="chains"), fields)
    assert said in reason
    assert reason.endswith("have parts of the layers, use dp_replicate alone")


def test_settings_are_read_from_a_pin() -> None:
    assert read_method("synchronisation", "gist") == Subnetworks(
        local_steps=500, layers="chains"
    )
    with pytest.raises(StrategyError, match="layers: Input should be 'pairs' or"):
        read_method("synchronisation", "subnetworks:layers=rows")


class _Normed(nn.Module):
    """Norms over features between layers, or a residual around one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        if kind == "listed last":
            self.last = nn.Linear(8, 5)
        self.inner, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.last = nn.Linear(8, 5) if kind != "listed last" else self.last
        self.scale, self.kind = nn.Parameter(torch.ones(8)), kind

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(features))
        made = self.inner(hidden)
        if self.kind == "norm":
            made = self.norm(made)
        elif self.kind == "residual":
            made = made + hidden
        elif self.kind == "softmax":
            made = torch.softmax(made, -1)
        elif self.kind == "scale":
            made = made * self.scale
        return self.last(made)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("plain", {"first": "colwise", "inner": "both", "last": "rowwise"}),
        ("norm", {"first": "colwise", "inner": "rowwise"}),
        ("softmax", {"first": "colwise", "inner": "rowwise"}),
        ("scale", {"first": "colwise", "inner": "rowwise"}),
        ("residual", {}),
        ("listed last", {}),
    ],
)
def test_chains_end_where_features_are_mixed(kind: str, cut: dict[str, str]) -> None:
    example = {"features": ((4, 6), "float32")}
    graph = capture(lambda: _Normed(kind), example, dtype="float32", name=kind)
    found = only_chains(graph).parameters
    assert cut == {
        p.name.removesuffix(".weight"): p.style
        for p in found
        if p.name.endswith("weight") and p.style != "none"
    }


@pytest.mark.parametrize(
    ("name", "copies", "said"),
    [
        ("deep", 3, "dp_replicate=3 does not divide intermediate_size=8; use 1, 2"),
        ("tiny-resnet", 2, "layers=chains with dp_replicate=2, but no module"),
    ],
)
def test_models_without_chains_are_not_planned(
    name: str, copies: int, said: str
) -> None:
    graph = graph_of(name) if name.startswith("tiny") else _captured(name)
    with pytest.raises(NoFeasiblePlanError, match=said):
        plan_model(
            graph,
            f"local:{copies}",
            global_batch=12,
            pin={"dp_replicate": copies, "synchronisation": "gist"},
        )


# -- Plans -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deep", "gcn"])
def test_what_is_planned_runs(pool: Pool, name: str) -> None:
    made = _planned(name, 2)
    assert made.strategy.semantics == "approximate"
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()


def test_chains_of_a_transformer_are_its_mlps(pool: Pool) -> None:
    made = plan_model(
        graph_of("tiny-gpt2"),
        "local:2",
        global_batch=8,
        pin={"dp_replicate": 2, "synchronisation": "gist:local_steps=2"},
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    assert set(made.strategy.sharding.patterns.values()) == {"colwise", "rowwise"}
    assert all("mlp" in pattern for pattern in made.strategy.sharding.patterns)
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()
