"""Stages that learn by themselves from synthetic labels, on gloo processes."""

from __future__ import annotations

import gc
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from executors import run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.dryrun import dry_runs
from executors.learning.synthetic_labels import synthetic_table
from executors.measuring.memory import LiveMemory
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.errors import ExecutionError, NoFeasiblePlanError
from planner.schema import Mesh, Optimizer, Plan, Precision, Strategy
from planner.schema.methods import read_method
from planner.schema.methods.synthetic_labels import SyntheticLabels
from planner.schema.verification import Verification
from planner.schema.violations import executor_violations
from tests.distributed.planned import planned
from tests.distributed.pool import Pool
from tests.models.classifiers import CLASSES, WIDTH, Classifier, classifier_plan

MOMENTUM = Optimizer(name="SGD", learning_rate=0.05, momentum=0.9)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3)
#: Weights in float32, products in bfloat16.
MIXED = Precision(compute="bfloat16")
BATCH, LOSS = 64, 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier(nn.ReLU)


def _plan(pin: str, pp: int = 2, **changes: Any) -> Plan:
    changes.setdefault("optimizer", MOMENTUM)
    return classifier_plan(Classifier(nn.ReLU), pp, learning=pin, **changes)


def _trainer(plan: Plan, width: int = WIDTH) -> Trainer:
    torch.manual_seed(0)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    return Trainer(plan, Classifier(nn.ReLU, width=width), place)


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses and bytes of a rank's steps, and its weights at the end."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses, traffic = [], []
    for step in range(steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.step(synthetic_batch(plan.workload, step)).loss)
        traffic.append({kind: each.bytes for kind, each in counter.traffic().items()})
    weights = {n: w.numpy() for n, w in full_parameters(trainer).items()}
    return {"losses": losses, "traffic": traffic, "weights": weights}


# -- Tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [128, 5])
def test_half_of_a_row_is_scale_and_seeds_and_cuts_differ(width: int) -> None:
    settings = SyntheticLabels(scale=2.0, seed=3)
    table = synthetic_table(settings, 1, 10, width)
    assert table.unique().tolist() == [0.0, 2.0]
    assert ((table > 0).sum(1) == width // 2).all()
    assert torch.equal(table, synthetic_table(settings, 1, 10, width))
    others = (
        synthetic_table(settings, 0, 10, width),
        synthetic_table(SyntheticLabels(scale=2.0, seed=4), 1, 10, width),
    )
    assert not any(torch.equal(table, other) for other in others)


def test_phases_are_the_shares_of_steps() -> None:
    assert SyntheticLabels().phases == {"apart": 1.0}
    both = SyntheticLabels(steps=30, recovery_steps=10)
    assert both.phases == {"apart": 0.75, "recovery": 0.25}
    assert [both.phase(step) for step in (0, 29, 30, 99)] == [
        *["apart"] * 2,
        *["recovery"] * 2,
    ]
    assert read_method("learning", "sil:steps=200") == SyntheticLabels(steps=200)


# -- Steps -----------------------------------------------------------------------------


def _serial(plan: Plan, steps: int) -> dict[str, np.ndarray]:
    """Weights of parts that are trained one after the other, in this process."""
    settings = plan.strategy.learning
    assert isinstance(settings, SyntheticLabels)
    model, count = _model(), len(plan.strategy.stages)
    many = plan.strategy.num_microbatches
    dtype = getattr(torch, plan.strategy.precision.compute)
    for index, stage in enumerate(plan.strategy.stages):
        names = [int(name.rpartition(".")[2]) for name in stage.modules]
        last = index == count - 1
        part = model.layers[names[0] : names[-1] + (1 if last else 2)]  # type: ignore[index]
        optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            batch = synthetic_batch(plan.workload, step)
            optimizer.zero_grad()
            for x, y in zip(
                batch["x"].chunk(many), batch["labels"].chunk(many), strict=True
            ):
                given = x
                if index:
                    given = synthetic_table(settings, index - 1, CLASSES, WIDTH)[y]
                cast = {name: p.to(dtype) for name, p in part.named_parameters()}
                made = torch.func.functional_call(part, cast, (given.to(dtype),))
                if last:
                    loss = functional.cross_entropy(made.float(), y, reduction="sum")
                    (loss / BATCH).backward()
                else:
                    wanted = synthetic_table(settings, index, CLASSES, WIDTH)[y]
                    made.backward((made.detach() - wanted.to(dtype)) / BATCH)
            optimizer.step()
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("pp", "many", "precision"), [(2, 1, None), (3, 4, None), (2, 2, MIXED)]
)
def test_parts_learn_by_themselves_and_send_nothing(
    pool: Pool, pp: int, many: int, precision: Precision | None
) -> None:
    plan = _plan("sil:steps=3", pp, num_microbatches=many, precision=precision)
    found = pool.run(train, pp, plan.to_json(), 5)
    assert [each["traffic"] for each in found] == [[{}] * 5] * pp
    assert len({tuple(each["losses"]) for each in found}) == pp
    expected = _serial(plan, 5)
    weights = {name: w for each in found for name, w in each["weights"].items()}
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert np.allclose(weight, expected[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("many", [1, 4])
def test_recovery_is_plain_training_of_the_whole(pool: Pool, many: int) -> None:
    changes = {"num_microbatches": many, "schedule": "GPipe"}
    plan = _plan("sil:steps=2,recovery_steps=2", **changes)
    found = pool.run(train, 2, plan.to_json(), 5)
    sent = BATCH * WIDTH * 4
    for each in found:
        assert each["traffic"][:2] == [{}, {}]
        both = {"all_reduce": LOSS, "send": sent, "recv": sent}
        # torch greets neighbours before the first step of a pipeline.
        assert each["traffic"][3:] == [both] * 2
    assert found[0]["losses"][2:] == found[1]["losses"][2:]
    model = _model()
    parts = {n: torch.from_numpy(w) for n, w in _serial(plan, 2).items()}
    model.load_state_dict(parts)
    batch = synthetic_batch(plan.workload, 2)
    loss = functional.cross_entropy(model(batch["x"]), batch["labels"])
    assert found[0]["losses"][2] == pytest.approx(loss.item(), rel=1e-5)


def test_outputs_go_forward_and_nothing_comes_back(pool: Pool) -> None:
    plan = _plan("sil:inputs=outputs", 3, num_microbatches=4)
    found = pool.run(train, 3, plan.to_json(), 2)
    sent = BATCH * WIDTH * 4
    assert found[0]["traffic"] == [{"send": sent}] * 2
    assert found[1]["traffic"] == [{"send": sent, "recv": sent}] * 2
    assert found[2]["traffic"] == [{"recv": sent}] * 2
    # The last part's first loss is of what the parts before it make of the samples.
    batch = synthetic_batch(plan.workload, 0)
    loss = functional.cross_entropy(_model()(batch["x"]), batch["labels"])
    assert found[2]["losses"][0] == pytest.approx(loss.item(), rel=1e-5)


# -- Memory ----------------------------------------------------------------------------

WIDE, SAMPLES = 512, 512


def _alive() -> int:
    """Bytes that other tests left alive in this process."""
    gc.collect()
    with LiveMemory() as memory:
        return memory.current_bytes


def peak(text: str) -> int:
    """Bytes of a step on this rank at the peak, by whom the model is forgotten."""
    plan = Plan.from_json(text)
    before = _alive()
    trainer = _trainer(plan, WIDE)
    batch = synthetic_batch(plan.workload, 0)
    trainer.step(batch)
    trainer.optimizer.zero_grad()
    # Weights of other stages are garbage in cycles until Python looks for it.
    gc.collect()
    with LiveMemory() as memory:
        trainer.step(batch)
    return memory.peak_bytes - before


def _part_alone(plan: Plan, index: int) -> int:
    """Peak of a plain step of a part, given and compared with vectors of its size."""
    before = _alive()
    stages = plan.strategy.stages
    names = [int(name.rpartition(".")[2]) for name in stages[index].modules]
    last = index == len(stages) - 1
    layers = Classifier(nn.ReLU, width=WIDE).layers
    part = layers[names[0] : names[-1] + (1 if last else 2)]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    batch = synthetic_batch(plan.workload, 0)
    given = torch.rand(SAMPLES, WIDE) if index else batch["x"]
    del layers

    def step() -> None:
        optimizer.zero_grad()
        made = part(given)
        if last:
            loss = functional.cross_entropy(made, batch["labels"])
        else:
            loss = functional.mse_loss(made, wanted)
        loss.backward()
        optimizer.step()

    wanted = torch.rand(SAMPLES, WIDE)
    step()
    optimizer.zero_grad()
    with LiveMemory() as memory:
        step()
    return memory.peak_bytes - before


@pytest.mark.parametrize("pp", [2, 3])
def test_a_rank_holds_no_more_than_its_part(pool: Pool, pp: int) -> None:
    plan = classifier_plan(
        Classifier(nn.ReLU, width=WIDE),
        pp,
        batch=SAMPLES,
        optimizer=MOMENTUM,
        learning="sil",
    )
    for index, found in enumerate(pool.run(peak, pp, plan.to_json())):
        assert found <= 1.1 * _part_alone(plan, index)


@pytest.mark.parametrize(
    ("pin", "many"),
    [
        ("sil", 1),
        ("sil", 4),
        ("sil:inputs=outputs", 1),
        ("sil:inputs=outputs", 4),
        ("sil:steps=3,recovery_steps=1", 1),
    ],
)
def test_a_dry_run_finds_what_is_predicted(pin: str, many: int) -> None:
    plan = classifier_plan(
        Classifier(nn.ReLU, width=WIDE),
        3,
        batch=SAMPLES,
        learning=pin,
        num_microbatches=many,
        schedule="GPipe",
    )
    ranks = dry_runs(plan, lambda: Classifier(nn.ReLU, width=WIDE), [0, 1, 2])
    assert not any(rank.failure for rank in ranks)
    for each in Verification.of(plan, ranks).deviations:
        if each.name.startswith("peak memory"):
            assert each.found == pytest.approx(each.predicted, rel=0.2), each.name
        else:
            assert each.found == pytest.approx(each.predicted, abs=LOSS), each.name


# -- Checkpoints -----------------------------------------------------------------------


def resume(text: str, folder: str) -> dict[str, Any]:
    """Losses of a run without a break, and of one that is resumed twice."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        return list(run(plan, _model, steps=steps, **options).losses)

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
    "pin", ["sil", "sil:steps=4,recovery_steps=3", "sil:inputs=outputs"]
)
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, pin: str
) -> None:
    plan = _plan(pin, optimizer=ADAMW)
    for each in pool.run(resume, 2, plan.to_json(), str(tmp_path / "kept")):
        assert [len(part) for part in each["parts"]] == [3, 1, 3]
        assert [*chain(*each["parts"])] == each["straight"]


# -- Refusals --------------------------------------------------------------------------


def test_language_models_and_losses_of_their_own_are_refused() -> None:
    with pytest.raises(NoFeasiblePlanError, match="are sequences of 16 tokens"):
        planned("tiny-llama", pp=2, learning="sil")
    with pytest.raises(NoFeasiblePlanError, match="the loss is mean_square"):
        planned("tiny-resnet", pp=2, learning="sil")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mesh": Mesh()}, "with pp=1; stages of a pipeline are the parts"),
        ({"mesh": Mesh(pp=2, dp_replicate=2)}, "with dp_replicate=2; each part is one"),
        ({"mesh": Mesh(pp=2, tp=2)}, "with tp=2; each part is one device"),
        ({"virtual_stages": 2}, "with virtual_stages=2; each part"),
        ({"grad_clip_norm": 1.0}, "its norm is over all parts, which never meet"),
        ({"semantics": "exact"}, "say semantics=approximate"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    fields = {
        "mesh": Mesh(pp=2),
        "semantics": "approximate",
        "precision": Precision(compute="float32"),
        "learning": SyntheticLabels(),
    }
    found = executor_violations(Strategy(**{**fields, **changes}))
    assert any(said in one for one in found), found


def test_tied_weights_are_refused() -> None:
    strategy = Strategy(
        mesh=Mesh(pp=2), semantics="approximate", learning=SyntheticLabels()
    )
    (said,) = (
        one
        for one in executor_violations(strategy, tied=(("a", "b"),))
        if "learning" in one
    )
    assert "tied weights (a, b) with learning=synthetic_labels" in said


def refused(text: str, classes: int) -> str:
    """Error of building a trainer, or of a step with labels of tokens."""
    plan = Plan.from_json(text)
    try:
        trainer = _trainer(plan)
        batch = synthetic_batch(plan.workload, 0)
        trainer.step({**batch, "labels": batch["labels"][:, None].expand(-1, 3)})
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("pin", "said"),
    [
        ("sil:classes=4", "but the model scores 10 classes; use classes=10"),
        ("sil:classes=12", "labels of shape [64, 3]; it needs integer 'labels'"),
    ],
)
def test_classes_that_do_not_fit_are_told(pool: Pool, pin: str, said: str) -> None:
    for found in pool.run(refused, 2, _plan(pin).to_json(), 4):
        assert said in found


# -- Learning --------------------------------------------------------------------------


def accuracy(text: str, steps: int) -> dict[str, np.ndarray]:
    """Weights of a rank after training on digits."""
    from benchmarks.convergence import TASKS

    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    batches = TASKS["digits"].batches(0, BATCH)
    for _ in range(steps):
        batch = next(batches)
        trainer.step({"x": batch["x"], "labels": batch["labels"]})
    return {n: p.detach().numpy() for n, p in trainer.named_parameters()}


def test_parts_tell_digits_together(pool: Pool) -> None:
    """Plain training tells 96.8 % after as many steps, the mean of 3 seeds."""
    from benchmarks.local_learning import accuracy_of

    found = pool.run(accuracy, 2, _plan("sil").to_json(), 512)
    weights = {n: torch.from_numpy(w) for each in found for n, w in each.items()}
    model = Classifier(nn.ReLU)
    model.load_state_dict(weights)
    assert accuracy_of(model) >= 96.8 - 1.5
