"""Copies that train shares of the residual blocks, dealt out every round, on gloo."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.dryrun import dry_runs
from executors.mesh import build_mesh
from executors.replicas.block_subnetworks import (
    BlockSubnetworksReplicas,
    _deal,
    deal_blocks,
    scaled_blocks,
)
from executors.strategies.batch_norms import calibrate_batch_norms
from executors.trainer import Trainer
from planner import plan as plan_model
from planner.capture import capture
from planner.errors import ExecutionError, NoFeasiblePlanError, StrategyError
from planner.graph.residual import find_residual_blocks
from planner.schema import Optimizer, Plan, Precision
from planner.schema.methods import read_method
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.schema.methods.method import equal_blocks
from planner.schema.verification import Verification
from tests.distributed.cases import build, largest_gap, make_plan
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
    resume,
    save_between,
    train,
    train_alone,
    train_planned,
    trainer_of,
)
from tests.models.convolutional import ResNet

LAYERS = tuple(f"model.layers.{index}" for index in range(4))


def _plan(model: str, copies: int, **changes: Any) -> Plan:
    names = ("period", "min_blocks", "seed")
    value = BlockSubnetworks(**{n: changes.pop(n) for n in names if n in changes})
    changes = {"optimizer": SGD, "semantics": "approximate", **changes}
    return make_plan(model, dp_replicate=copies, synchronisation=value, **changes)


# -- Deals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "copies", "min_blocks", "depth"),
    [
        (22, 4, 1, 6),
        (8, 4, 1, 2),
        (8, 4, 3, 3),
        (4, 2, 3, 3),
        (4, 2, 4, 4),
        (3, 8, 1, 1),
        (5, 1, 1, 5),
    ],
)
def test_each_block_has_a_holder_and_each_copy_its_depth(
    blocks: int, copies: int, min_blocks: int, depth: int
) -> None:
    value = BlockSubnetworks(min_blocks=min_blocks)
    assert value.depth(copies, blocks) == depth
    seen: list[set[int]] = [set() for _ in range(copies)]
    held = Counter[int]()
    rounds = 200
    for turn in range(rounds):
        dealt = deal_blocks(blocks, copies, depth=depth, seed=3, turn=turn)
        assert [len(each) for each in dealt] == [depth] * copies
        assert set().union(*dealt) == set(range(blocks))
        held.update(block for each in dealt for block in each)
        for own, each in zip(seen, dealt, strict=True):
            own |= each
    assert all(own == set(range(blocks)) for own in seen)
    # A block is in d/B of the copies, by which it is scaled.
    mean = rounds * copies * depth / blocks
    assert all(0.7 * mean < held[block] <= 1.3 * mean for block in range(blocks))


def test_deals_differ_by_seed_and_round_and_share_nothing_that_fits() -> None:
    first = deal_blocks(12, 4, depth=3, seed=0, turn=0)
    assert sum(map(len, first)) == len(set().union(*first))
    assert first == deal_blocks(12, 4, depth=3, seed=0, turn=0)
    assert first != deal_blocks(12, 4, depth=3, seed=1, turn=0)
    assert first != deal_blocks(12, 4, depth=3, seed=0, turn=1)


# -- Blocks ----------------------------------------------------------------------------


def test_the_longest_run_of_equal_units_is_dealt_out() -> None:
    shapes = {f"{unit}.w": (2, 2) for unit in ("a", "b.0", "b.1", "c.0", "c.1", "d")}
    shapes["c.2.w"] = (2, 2)
    shapes["b.1.w"] = shapes["b.0.w"] = (9, 9)
    units = ("a", "b.0", "b.1", "c.0", "c.1", "c.2", "d")
    assert equal_blocks(units, shapes, ()) == ("c.0", "c.1", "c.2")
    # Of one length, the larger.
    assert equal_blocks(units, shapes, ("c.2.w",)) == ("b.0", "b.1")
    # The first and the last stay whole, and so do units that hold others.
    assert equal_blocks(("c.0", "c.1", "c.2"), shapes, ()) == ()
    assert equal_blocks(("a", "c", "c.0", "c.1", "d"), shapes, ()) == ("c.0", "c.1")


def test_blocks_of_a_stage_are_found_in_a_resnet() -> None:
    graph = capture(
        resnet, {"x": ((8, 3, 32, 32), "float32")}, dtype="float32", name="resnet"
    )
    found = find_residual_blocks(graph)
    assert found.units == ("layer3.1", "layer3.2", "layer3.3")


def test_equal_layers_without_a_residual_are_none() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    graph = capture(
        lambda: nn.Sequential(
            nn.Linear(6, 6), *(layer() for _ in range(3)), nn.Linear(6, 6)
        ),
        {"input": ((8, 6), "float32")},
        dtype="float32",
        name="plain",
    )
    found = find_residual_blocks(graph)
    assert found.units == ()
    assert found.reason.endswith("do not add what they are given to what they compute")


def resnet() -> nn.Module:
    """A stage of one block, of two and of four."""
    torch.manual_seed(0)
    return ResNet((1, 2, 4), 4)


# -- Training --------------------------------------------------------------------------


class _Skip(nn.Module):
    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


def _layers(model: nn.Module) -> nn.ModuleList:
    found = model.get_submodule("model.layers")
    assert isinstance(found, nn.ModuleList)
    return found


def _train_shallow(
    plan: Plan, whole: nn.Module, kept: frozenset[int], index: int, turn: int
) -> tuple[nn.Module, list[float]]:
    """A round of one copy, in a model without the layers of others."""
    settings = plan.strategy.synchronisation
    assert isinstance(settings, BlockSubnetworks)
    model = copy.deepcopy(whole)
    own = list(_layers(model))
    shallow = _layers(model)
    for number in range(len(own)):
        if number not in kept:
            shallow[number] = _Skip()
    steps = range(turn * settings.period, (turn + 1) * settings.period)
    losses = train_alone(plan, model, index, steps)
    for number, layer in enumerate(own):
        shallow[number] = layer
    return model, losses


def _serial(plan: Plan, rounds: int) -> dict[str, Any]:
    """The same in one process: shallower models, and the mean over holders."""
    whole = build_model(lambda: build(plan.model.name))
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    assert isinstance(settings, BlockSubnetworks)
    losses: list[list[float]] = [[] for _ in range(copies)]
    depth = settings.depth(copies, len(LAYERS))
    for turn in range(rounds):
        dealt = deal_blocks(
            len(LAYERS), copies, depth=depth, seed=settings.seed, turn=turn
        )
        models = []
        for index, kept in enumerate(dealt):
            model, found = _train_shallow(plan, whole, kept, index, turn)
            models.append(model)
            losses[index] += found
        with torch.no_grad():
            for name, weight in whole.named_parameters():
                layer = ".".join(name.split(".")[:3])
                holders = [
                    model.get_parameter(name)
                    for model, kept in zip(models, dealt, strict=True)
                    if layer not in LAYERS or LAYERS.index(layer) in kept
                ]
                weight.copy_(torch.stack(holders).mean(0))
    weights = {n: p.detach().numpy() for n, p in whole.named_parameters()}
    return {"losses": losses, "weights": weights}


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (2, {"optimizer": MOMENTUM}),
        (2, {"min_blocks": 3, "optimizer": MOMENTUM}),
        (4, {"min_blocks": 2}),
    ],
    ids=str,
)
def test_copies_train_shallower_models(
    pool: Pool, copies: int, changes: dict[str, Any]
) -> None:
    """Compare with one process whose models lack the layers that are skipped."""
    plan = _plan("llama", copies, period=2, **changes)
    found = pool.run(train, copies, plan.to_json(), 6)
    expected = _serial(plan, 3)
    for each, own in zip(found, expected["losses"], strict=True):
        # At the end of a round copies share their loss.
        assert each["losses"][::2] == pytest.approx(own[::2], rel=1e-5)
        assert largest_gap(each["weights"][-1], expected["weights"]) <= 1e-5
    shared = np.mean(expected["losses"], axis=0)
    assert found[0]["losses"][1::2] == pytest.approx(shared[1::2], rel=1e-5)


@pytest.mark.parametrize("min_blocks", [1, 3])
def test_a_copy_computes_its_own_blocks_alone(pool: Pool, min_blocks: int) -> None:
    plan = _plan("llama", 2, period=2, min_blocks=min_blocks, seed=5)
    depth = max(2, min_blocks)
    for index, each in enumerate(pool.run(train, 2, plan.to_json(), 6)):
        for step, trained in enumerate(each["trained"]):
            dealt = deal_blocks(4, 2, depth=depth, seed=5, turn=step // 2)
            layers = {".".join(name.split(".")[:3]) for name in trained}
            assert layers & set(LAYERS) == {LAYERS[i] for i in dealt[index]}
            assert {"lm_head.weight", "model.norm.weight"} <= trained


@pytest.mark.parametrize(
    ("model", "copies", "min_blocks"),
    [("llama", 2, 1), ("llama", 2, 3), ("llama", 4, 1), ("gpt2", 2, 1)],
)
def test_rounds_without_steps_leave_the_model_bit_for_bit(
    pool: Pool, model: str, copies: int, min_blocks: int
) -> None:
    whole = build_model(lambda: build(model)).named_parameters()
    expected = {name: p.detach().numpy() for name, p in whole}
    plan = _plan(model, copies, period=1, min_blocks=min_blocks)
    for each in pool.run(deal_without_training, copies, plan.to_json(), 3):
        for weights in each:
            assert sorted(weights) == sorted(expected)
            for name, value in weights.items():
                assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, ADAMW], ids=lambda o: o.name)
def test_one_copy_is_plain_training_bit_for_bit(
    pool: Pool, optimizer: Optimizer
) -> None:
    plan = _plan("llama", 1, period=2, optimizer=optimizer)
    other = make_plan("llama", optimizer=optimizer)
    (ours,) = pool.run(train, 1, plan.to_json(), 4)
    (theirs,) = pool.run(train, 1, other.to_json(), 4)
    assert ours["losses"] == theirs["losses"]
    for name, value in theirs["weights"][-1].items():
        assert np.array_equal(ours["weights"][-1][name], value), name


# -- Bytes -----------------------------------------------------------------------------


def _bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of a layer, and of all that belongs to no layer."""
    layer = sum(p.nbytes for p in _layers(model)[0].parameters())
    every = sum(p.nbytes for p in model.parameters())
    return layer, every - len(_layers(model)) * layer


@pytest.mark.parametrize(
    ("copies", "min_blocks", "passed"),
    [(2, 1, 2), (4, 1, 1), (2, 3, 2 + 2), (4, 2, 1 + 2), (2, 4, 2 + 4)],
)
def test_bytes_are_priced_verified_and_counted(
    pool: Pool, copies: int, min_blocks: int, passed: int
) -> None:
    """A copy's blocks go once; of shared ones all that its owner has not, twice."""
    made = plan_model(
        graph_of("tiny-llama"),
        f"local:{copies}",
        global_batch=8,
        pin={
            "dp_replicate": copies,
            "synchronisation": f"resist:period=2,min_blocks={min_blocks}",
            "recompute": "none",
            "num_microbatches": 1,
        },
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    layer, common = _bytes(build("tiny-llama"))
    expected = {"all_reduce": common, "all_to_all": passed * layer}
    halves = {kind: size / 2 for kind, size in expected.items()}
    assert made.prediction.collective_bytes == halves
    sent = (copies - 1) / copies * (2 * common + passed * layer) / 2
    assert made.prediction.link_bytes == {"dp": pytest.approx(sent)}
    runs = dry_runs(made, lambda: build("tiny-llama"), [0])
    assert not any(one.failure for one in runs)
    found = {
        one.name.partition(",")[0]: one.found
        for one in Verification.of(made, runs).deviations
        if one.name.startswith("all-")
    }
    # A round's mean loss is summed up, too.
    assert found == {
        "all-reduce": pytest.approx(common / 2, abs=4),
        "all-to-all": pytest.approx(passed * layer / 2),
    }
    expected["all_reduce"] += 4
    for each in pool.run(train, copies, made.to_json(), 4):
        assert each["traffic"][::2] == [{}] * 2
        assert each["traffic"][1::2] == [expected] * 2


def test_messages_of_copies_that_do_not_divide_the_blocks() -> None:
    """Three copies of four blocks: two each. The mean over copies is what is priced."""
    value = BlockSubnetworks()
    passed, rounds = 0, 50
    for turn in range(rounds):
        before, after = (_deal(4, 3, value, turn + more) for more in (0, 1))
        assert all(
            owner in holders
            for owner, holders in zip(before.owners, before.holders, strict=True)
        )
        # Each holder that is no owner sends its block, or gets it.
        extra = sum(map(len, before.holders)) - 4
        assert len(before.to_owners()) == extra == 3 * 2 - 4
        passed += 4 + len(before.to_owners()) + len(after.to_holders())
    assert passed / 3 / rounds == pytest.approx(value.passed(3, 4))


def test_memory_is_that_of_a_copys_own_blocks() -> None:
    """Two of four layers: weights, gradients, states and activations."""
    made = planned(
        "tiny-llama",
        optimizer=Optimizer(),
        dp_replicate=2,
        synchronisation="resist:period=2",
        recompute="none",
        num_microbatches=1,
    )
    (expected,) = made.prediction.memory
    (found,) = dry_runs(made, lambda: build("tiny-llama"), [0])
    model = build("tiny-llama")
    layer, common = _bytes(model)
    held = common + 2 * layer
    assert expected.parameters_bytes == held
    assert expected.gradients_bytes == held
    assert expected.optimizer_bytes == 2 * held
    # Neither when rounds end nor between is more held.
    assert found.memory_bytes["parameters"] == held
    # A step counter a tensor comes on top.
    states = found.memory_bytes["optimizer"]
    assert 0 <= states - expected.optimizer_bytes <= 4 * len([*model.parameters()])
    activations = found.memory_bytes["activations"]
    assert activations == pytest.approx(expected.activations_bytes, rel=0.02)


def hold(text: str) -> list[int]:
    """Bytes of memory behind a copy's parameters, at first and after each step."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)

    def held() -> int:
        storages = (p.untyped_storage() for p in map(local, trainer.all_parameters()))
        return sum(storage.nbytes() for storage in storages)

    found = [held()]
    for step in range(4):
        trainer.step(synthetic_batch(plan.workload, step))
        found.append(held())
    return found


@pytest.mark.parametrize(
    ("copies", "depth", "changes"),
    [
        (2, 2, {}),
        (4, 1, {}),
        (4, 3, {"min_blocks": 3}),
        (2, 2, {"precision": Precision(compute="bfloat16")}),
    ],
    ids=str,
)
def test_a_copy_holds_no_weights_of_blocks_that_others_have(
    pool: Pool, copies: int, depth: int, changes: dict[str, Any]
) -> None:
    plan = _plan("llama", copies, period=2, **changes)
    layer, common = _bytes(build_model(lambda: build("llama")))
    for held in pool.run(hold, copies, plan.to_json()):
        assert held == [common + depth * layer] * 5


def train_frozen(text: str) -> dict[str, Any]:
    """Norms before and after two rounds in which none of them is trained."""
    plan = Plan.from_json(text)

    def make() -> nn.Module:
        model = build(plan.model.name)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name)
        return model

    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(make, small_bytes=0)
    trainer = Trainer(plan, model, place, recording)
    for step in range(4):
        trainer.step(synthetic_batch(plan.workload, step))
    named = dict(trainer.named_parameters())
    return {n: p.detach().numpy() for n, p in named.items() if "norm" in n}


def test_what_no_block_trains_stays_on_all_copies(pool: Pool) -> None:
    whole = build_model(lambda: build("llama"))
    for found in pool.run(train_frozen, 2, _plan("llama", 2, period=2).to_json()):
        assert len(found) == 2 * len(LAYERS) + 1
        for name, value in found.items():
            assert np.array_equal(value, whole.get_parameter(name).detach()), name


# -- Evaluation ------------------------------------------------------------------------


def test_scaled_blocks_add_their_share_to_the_stream() -> None:
    plan = _plan("llama", 4, period=2)
    model = build_model(lambda: build("llama")).eval()
    batch = {"input_ids": torch.arange(32).view(2, 16)}
    streams: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, args, out: streams.extend([args[0], out]))
        for layer in _layers(model)
    ]
    plain = model(**batch).logits
    streams.clear()
    with scaled_blocks(model, plan.strategy):
        scaled = model(**batch).logits
    for handle in handles:
        handle.remove()
    layer = _layers(model)[2]
    given, handed = streams[4:6]
    rotary = model.get_submodule("model.rotary_emb")
    positions = rotary(given, torch.arange(16)[None])
    whole = layer(given, position_embeddings=positions, attention_mask=None)
    torch.testing.assert_close(handed, given + (whole - given) / 4)
    assert not torch.allclose(scaled, plain)
    # It ends with the context; and all of a block is all of it, bit for bit.
    assert torch.equal(model(**batch).logits, plain)
    with scaled_blocks(model, _plan("llama", 2, min_blocks=4).strategy):
        assert torch.equal(model(**batch).logits, plain)


def test_models_without_dealt_blocks_are_not_scaled() -> None:
    plan = make_plan("llama", dp_replicate=2)
    with (
        pytest.raises(ExecutionError, match="all_reduce deals out no blocks; evaluate"),
        scaled_blocks(build("llama"), plan.strategy),
    ):
        pass


def test_batch_norms_are_calibrated_by_the_mean_over_batches() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(norm).eval()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    batches = [torch.randn(8, 3) * scale + scale for scale in (1.0, 2.0, 5.0)]
    model(batches[0])
    calibrate_batch_norms(model, [{"input": batch} for batch in batches])
    mean = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variance = torch.stack([batch.var(0) for batch in batches]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)
    assert (norm.momentum, norm.training) == (0.1, False)
    for name, value in weights.items():
        assert torch.equal(model.get_parameter(name), value)
    with pytest.raises(ExecutionError, match=r"no batches .*; give at least one"):
        calibrate_batch_norms(model, [])


# -- Checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (1, {"optimizer": ADAMW}),
        (2, {"optimizer": ADAMW, "grad_clip_norm": 0.05, "min_blocks": 3}),
        (2, {"precision": Precision(compute="bfloat16"), "optimizer": MOMENTUM}),
        (2, {"recompute": "full", "num_microbatches": 2}),
    ],
    ids=["alone", "shared", "bfloat16", "recompute"],
)
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, copies: int, changes: dict[str, Any]
) -> None:
    """Bit for bit on every rank."""
    plan = _plan("llama", copies, period=2, **changes)
    found = pool.run(resume, copies, plan.to_json(), str(tmp_path / "kept"))
    for each in found:
        assert each["first"] + each["rest"] == each["straight"]
    assert len({tuple(each["straight"]) for each in found}) == copies


def test_a_run_is_saved_at_the_end_of_a_round_alone(pool: Pool, tmp_path: Path) -> None:
    plan = _plan("llama", 2, period=2)
    for said in pool.run(save_between, 2, plan.to_json(), str(tmp_path / "kept")):
        assert "steps=3" in said
        assert "use steps=4" in said


# -- Refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "said"), OTHER_AXES, ids=str)
def test_other_axes_are_refused(fields: dict[str, int], said: str) -> None:
    reason = axes_refused(BlockSubnetworks(), fields)
    assert said in reason
    assert reason.endswith("each skip blocks, use dp_replicate alone")


@pytest.mark.parametrize(
    ("model", "pin", "said"),
    [
        (
            "tiny-llama",
            "resist:min_blocks=5",
            "min_blocks=5 with dp_replicate=2 gives each copy 5 residual blocks, more "
            "than the 4 equal ones of the model, model.layers.0 to model.layers.3; "
            "use 4 at most",
        ),
        (
            "tiny-resnet",
            "resist",
            "with dp_replicate=2, but the model has no equal residual blocks in a "
            "row; use another method",
        ),
        (
            "tiny-recommender",
            "resist",
            "but units embeddings.0 to embeddings.3 hand on more than one tensor, or "
            "one of another shape than they are given; use another method",
        ),
    ],
)
def test_models_without_enough_blocks_are_not_planned(
    model: str, pin: str, said: str
) -> None:
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_model(
            graph_of(model),
            "local:2",
            global_batch=8,
            pin={"dp_replicate": 2, "synchronisation": pin},
        )
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "pin",
    ["resist:period=0", "resist:min_blocks=0", "resist:seed=-1"],
)
def test_settings_out_of_range_are_refused(pin: str) -> None:
    with pytest.raises(StrategyError, match="should be greater than or equal to"):
        read_method("synchronisation", pin)


class _Tuple(nn.Module):
    """A residual layer that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, stream: torch.Tensor) -> tuple[torch.Tensor]:
        return (stream + self.inner(stream),)


def skip_tuples() -> str:
    """Message of blocks that return more than the stream."""
    replicas = BlockSubnetworksReplicas(BlockSubnetworks())
    replicas._blocks = ("layers.0",)
    replicas._round = replicas._deal(0)
    layer = _Tuple()
    replicas._let_skip(0, layer)
    with pytest.raises(ExecutionError) as caught:
        layer(torch.ones(2, 4))
    return str(caught.value)


def test_blocks_that_return_tuples_are_refused() -> None:
    said = skip_tuples()
    assert "layers.0 takes a tensor of shape (2, 4) first and returns tuple" in said
    assert said.endswith("use synchronisation=local_steps")


# -- Plans -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", ["tiny-llama", "tiny-bert", "tiny-gpt2", "tiny-vit", "tiny-whisper"]
)
def test_what_is_planned_runs(pool: Pool, model: str) -> None:
    made = planned(model, dp_replicate=2, synchronisation="resist:period=2")
    for losses in pool.run(train_planned, 2, made.to_json()):
        assert np.isfinite(losses).all()


def train_resnet(text: str) -> dict[str, Any]:
    """Losses of four steps, and of the whole model without and with its scale."""
    made = Plan.from_json(text)
    place = build_mesh(made.strategy, torch.device("cpu"))
    model, recording = record(resnet, small_bytes=0)
    trainer = Trainer(made, model, place, recording)
    batches = [synthetic_batch(made.workload, step) for step in range(4)]
    losses = [trainer.step(batch).loss for batch in batches]
    whole = build_model(resnet)
    whole.load_state_dict(full_parameters(trainer), strict=False)
    found = []
    for context in (nullcontext(), scaled_blocks(whole, made.strategy)):
        with context, torch.no_grad():
            calibrate_batch_norms(whole, batches)
            found.append(whole.eval()(**batches[0]))
    return {"losses": losses, "outputs": [one.numpy() for one in found]}


def test_blocks_of_a_resnet_are_trained_and_evaluated(pool: Pool) -> None:
    graph = capture(
        resnet, {"x": ((8, 3, 32, 32), "float32")}, dtype="float32", name="resnet"
    )
    made = plan_model(
        graph,
        "local:2",
        global_batch=8,
        pin={"dp_replicate": 2, "synchronisation": "resist:period=2,min_blocks=2"},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=1e-3),
    )
    first, second = pool.run(train_resnet, 2, made.to_json())
    assert np.isfinite(first["losses"]).all()
    assert first["losses"][1::2] == second["losses"][1::2]
    assert first["losses"][0] != second["losses"][0]
    plain, scaled = first["outputs"]
    assert np.isfinite(scaled).all()
    assert not np.allclose(plain, scaled)
