"""Saved under one plan, loaded under another: the next losses are the same."""

from __future__ import annotations

import math
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from executors import run
from executors.checkpoints.dcp import read_saved
from executors.checkpoints.folder import CheckpointFolder
from executors.data import synthetic_batch
from planner.errors import MeshwrightError
from planner.schema import Optimizer, Plan
from tests.distributed.cases import build, make_plan
from tests.distributed.planned import planned
from tests.distributed.pool import Pool

SGD = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3)
NADAM = Optimizer(name="NAdam", learning_rate=1e-2, betas=(0.99, 0.999))
PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}
ZBV = {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "num_microbatches": 4}
ZERO1 = {"dp_shard": 2, "zero_stage": 1}
ZERO2 = {"dp_shard": 2, "zero_stage": 2}
ZERO3 = {"dp_shard": 2, "zero_stage": 3}


def train(plan_json: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Losses of a run and its first step; or what it was refused for."""
    plan = Plan.from_json(plan_json)
    model = options.pop("model", plan.model.name)
    poison = options.pop("poison", None)
    full = options.pop("full", None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def data(step: int) -> dict[str, torch.Tensor]:
        batch = synthetic_batch(plan.workload, step)
        if step == poison:
            for value in batch.values():
                value[-1] = math.nan
        if step == full and dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
        return batch

    try:
        result = run(plan, lambda: build(model), data, **options)
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return list(result.losses), result.first_step


def ask(pool: Pool, plan: Plan, **options: Any) -> tuple[Any, Any]:
    """The same on processes; all of them must answer the same."""
    world = plan.strategy.mesh.num_devices
    answers = pool.run(train, world, plan.to_json(), options)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.parametrize(
    ("model", "optimizer", "before", "after"),
    [
        ("llama", SGD, ZERO3 | {"tp": 2}, PIPELINE | ZERO2),
        pytest.param(
            "llama",
            ADAMW,
            ZERO3 | {"tp": 2},
            PIPELINE | {"dp_replicate": 2},
            marks=pytest.mark.further,
        ),
        ("llama", ADAMW, ZERO1, ZERO3),
        # Counts of its own, one number each.
        ("llama", NADAM, ZERO1, ZERO3),
        pytest.param(
            "llama",
            ADAMW,
            {"dp_replicate": 2},
            PIPELINE | ZERO1,
            marks=pytest.mark.slow,
        ),
        # Tied weights: on both ends of a pipeline, then once; twice on one rank.
        pytest.param("gpt2", ADAMW, PIPELINE | ZERO2, ZERO3, marks=pytest.mark.further),
        ("gpt2", SGD, {"dp_replicate": 2}, ZBV),
        ("mixtral", ADAMW, {"dp_shard": 4, "ep": 2, "zero_stage": 3}, ZERO2),
        ("llama", ADAMW, {"cp": 2, "zero_stage": 3}, ZERO2),
        ("mixtral", ADAMW, {"tp": 2, "ep": 2, "sequence_parallel": True}, ZERO2),
    ],
)
def test_another_plan_goes_on_with_the_same_losses(
    pool: Pool,
    tmp_path: Path,
    model: str,
    optimizer: Optimizer,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    first, second = (
        make_plan(model, optimizer=optimizer, **mesh) for mesh in (before, after)
    )
    _goes_on(pool, tmp_path / "kept", first, second)


def _goes_on(pool: Pool, folder: Path, first: Plan, second: Plan) -> None:
    kept = {"checkpoint_dir": str(folder), "checkpoint_every": 2}
    straight, _ = ask(pool, first, steps=4, **kept)
    resumed, begun = ask(pool, second, steps=4, resume="step-000002", **kept)
    assert begun == 2
    # The second of them was computed with states that the checkpoint brought.
    assert resumed == pytest.approx(straight[2:], rel=1e-5)


@pytest.mark.parametrize(
    "back",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["from-pp", "to-pp"],
)
def test_a_weight_goes_by_one_name_whichever_stage_reads_it(
    pool: Pool, tmp_path: Path, back: bool
) -> None:
    """T5 calls one table shared, encoder's, decoder's and head's; so do its stages."""
    plans = [
        planned("tiny-t5", optimizer=SGD, **mesh)
        for mesh in (PIPELINE | {"num_microbatches": 2}, ZERO2)
    ]
    (tied,) = plans[0].model.tied
    assert len(tied) > 2
    first, second = reversed(plans) if back else plans
    _goes_on(pool, tmp_path / "kept", first, second)
    saved = read_saved(tmp_path / "kept" / "step-000004")
    assert [f"model.{name}" in saved for name in tied] == [True] + [False] * (
        len(tied) - 1
    )
    assert f"optimizer.momentum_buffer.{tied[0]}" in saved


def test_a_run_on_the_same_plan_goes_on_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    plan = make_plan("llama", optimizer=ADAMW, **ZERO3)
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "resume": True}
    straight, _ = ask(pool, plan, steps=5)
    begun = []
    losses: list[float] = []
    # The second asks for no step more; it neither trains nor fails.
    for steps in (2, 2, 5):
        part, first = ask(pool, plan, steps=steps, background_checkpoints=True, **kept)
        losses += part
        begun.append(first)
    assert begun == [0, 2, 2]
    assert losses == straight
    assert CheckpointFolder(tmp_path / "kept").steps() == [2, 5]


def test_a_loss_that_is_not_finite_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    plan = make_plan("perceptron", dp_replicate=2)
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 1}
    kind, text = ask(pool, plan, steps=9, poison=3, **kept)
    assert kind == "NonFiniteError"
    assert "the loss of step 4 is nan on rank 1;" in text
    assert f"resume from {tmp_path / 'kept' / 'step-000003'}" in text
    assert "\n" not in text
    assert CheckpointFolder(tmp_path / "kept").steps() == [2, 3]
    # What is left is good: without the poison it goes on.
    losses, first = ask(pool, plan, steps=5, resume=True, **kept)
    assert first == 3
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_keeps_nothing_of_the_checkpoint_that_failed(
    pool: Pool, tmp_path: Path, background: bool
) -> None:
    plan = make_plan("llama", **ZERO3)
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 1}
    kept |= {"background_checkpoints": background}
    straight, _ = ask(pool, plan, steps=4)
    kind, text = ask(pool, plan, steps=9, full=2, **kept)
    assert kind == "ExecutionError"
    assert text.startswith(f"rank 1 cannot write {tmp_path / 'kept' / 'step-00000'}")
    assert "File too large; make room or choose another checkpoint_dir" in text
    # In the background the second one may still be written as the disk fills up.
    last = CheckpointFolder(tmp_path / "kept").steps()[-1]
    assert last == 2 or (background and last == 1)
    names = {path.name for path in (tmp_path / "kept").iterdir()}
    assert names == {"latest", *(f"step-00000{step + 1}" for step in range(last))}
    losses, first = ask(pool, plan, steps=4, resume=True, **kept)
    assert (losses, first) == (straight[last:], last)


def test_a_damaged_checkpoint_is_named_and_the_one_before_offered(
    pool: Pool, tmp_path: Path
) -> None:
    plan = make_plan("llama", **ZERO3)
    folder = CheckpointFolder(tmp_path / "kept")
    kept = {"checkpoint_dir": str(folder.path), "checkpoint_every": 2}
    straight, _ = ask(pool, plan, steps=4, **kept)
    file = folder.of(4) / "__1_0.distcp"
    whole = file.read_bytes()
    for damaged, what in (
        (whole[:-100], f"it has {len(whole) - 100} bytes, {len(whole)} were written"),
        (whole[:2000] + b"?" + whole[2001:], "its bytes are not those"),
    ):
        file.write_bytes(damaged)
        kind, text = ask(pool, plan, steps=6, resume=True, **kept)
        assert kind == "ExecutionError"
        assert f"{file} is damaged: {what}" in text
        assert text.endswith("(--resume step-000002)")
    losses, first = ask(pool, plan, steps=4, resume="step-000002", **kept)
    assert (losses, first) == (straight[2:], 2)
    assert folder.steps() == [2, 4]


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
    pool: Pool, tmp_path: Path
) -> None:
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    ask(pool, make_plan("llama", **ZERO3), steps=1, **kept)
    kind, text = ask(
        pool, make_plan("gpt2", dp_replicate=2), steps=2, resume=True, **kept
    )
    assert kind == "FingerprintError"
    assert "transformer.wte.weight is only here" in text
    assert "\n" not in text
    adam = make_plan("llama", optimizer=ADAMW, **ZERO3)
    kind, text = ask(pool, adam, steps=2, resume=True, **kept)
    assert kind == "ExecutionError"
    assert "holds states of SGD, the plan trains with AdamW" in text
    kind, text = ask(pool, make_plan("llama", **ZERO3), steps=2, **kept)
    assert "holds checkpoints of another run, up to step-000001" in text


def _buffers(plan_json: str, options: dict[str, Any]) -> dict[str, list[float]]:
    """Buffers of the model as this rank has it when the run has ended."""
    plan = Plan.from_json(plan_json)
    built: list[torch.nn.Module] = []

    def model() -> torch.nn.Module:
        built.append(build(plan.model.name))
        return built[-1]

    run(plan, model, **options)
    return {
        name: value.flatten().tolist()
        for name, value in built[0].named_buffers()
        if name.endswith(("running_mean", "num_batches_tracked"))
    }


def test_running_statistics_are_state_too(pool: Pool, tmp_path: Path) -> None:
    options = {"steps": 2, "checkpoint_dir": str(tmp_path / "kept"), "resume": True}
    whole = make_plan("resnet").to_json()
    (saved,) = pool.run(_buffers, 1, whole, options)
    assert saved["bn1.num_batches_tracked"] == [2]
    cut = make_plan("resnet", **PIPELINE).to_json()
    # Nothing is left to train: what the stages have, the checkpoint brought.
    stages = pool.run(_buffers, 2, cut, options)
    for name, expected in saved.items():
        assert any(expected) or "conv" in name
        assert any(stage[name] == pytest.approx(expected) for stage in stages), name


REPLICAS = {"dp_replicate": 2}


@pytest.mark.parametrize(
    "changes",
    [REPLICAS, ZERO3, pytest.param(PIPELINE | REPLICAS, marks=pytest.mark.slow)],
    ids=["ddp", "zero3", "pp-replicate"],
)
def test_the_first_data_parallel_rank_tells_the_running_statistics(
    pool: Pool, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Replicas resume with rank 0's buffers, as under DistributedDataParallel."""
    plan = make_plan("resnet", semantics="approximate", **changes)
    pp = plan.strategy.mesh.pp
    options = {"steps": 2, "checkpoint_dir": str(tmp_path / "kept"), "resume": True}
    ranks = pool.run(_buffers, 2 * pp, plan.to_json(), options)
    # Of the stem, which the first stage has; rank 0 and its replica saw other samples.
    name = "bn1.running_mean"
    assert ranks[0][name] != ranks[1][name]
    whole = make_plan("resnet").to_json()
    (saved,) = pool.run(_buffers, 1, whole, options)
    assert saved[name] == ranks[0][name]
    if pp > 1:
        last = [name for name in saved if name.endswith("running_mean")][-1]
        assert saved[last] == ranks[2][last] != ranks[3][last]
