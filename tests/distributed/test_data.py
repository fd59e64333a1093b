"""Data of one's own: equal on all ranks, every key used or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from executors import build_model, run
from executors.data import synthetic_batch
from planner.errors import ExecutionError
from planner.schema import Plan
from tests.distributed.cases import BATCH, SEQ, VOCAB, build, make_plan
from tests.distributed.pool import Pool


def _shuffled(plan_json: str, seed: int | None, model: str) -> str:
    import torch.distributed as dist

    plan = Plan.from_json(plan_json)
    torch.manual_seed(0)
    rows = [{"input_ids": row} for row in torch.randint(VOCAB, (2 * BATCH, SEQ))]
    order = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    data: Any = DataLoader(rows, batch_size=BATCH, shuffle=True, generator=order)  # type: ignore[arg-type]
    try:
        run(plan, lambda: build(model), data, steps=3)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"pp": 2}, {"tp": 2}])
def test_a_loader_that_shuffles_differently_on_each_rank_is_refused(
    pool: Pool, mesh: dict[str, int]
) -> None:
    plan = make_plan("llama", num_microbatches=2, **mesh)
    for text in pool.run(_shuffled, 2, plan.to_json(), None, "llama"):
        assert text.startswith(
            "'input_ids' of step 1 differs between ranks: rank 1 had other values "
            "than rank 0"
        )
        assert "seed the sampler equally" in text
    assert pool.run(_shuffled, 2, plan.to_json(), 7, "llama") == ["", ""]


def _one_value(plan_json: str, key: str, at: int) -> str:
    """Rank 2 gets another value, or another key, in one step."""
    import torch.distributed as dist

    plan = Plan.from_json(plan_json)

    def data(step: int) -> dict[str, torch.Tensor]:
        batch = synthetic_batch(plan.workload, step)
        if step == at and dist.get_rank() == 2:
            batch[key] = batch["input_ids"].clone()
            batch[key][-1, -1] += 1
        return batch

    try:
        run(plan, lambda: build("llama"), data, steps=3)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("key", "at"), [("input_ids", 0), ("labels", 2)])
def test_one_other_value_on_one_rank_is_named(pool: Pool, key: str, at: int) -> None:
    plan = make_plan("llama", dp_shard=4, zero_stage=3)
    for text in pool.run(_one_value, 4, plan.to_json(), key, at):
        assert f"'{key}' of step {at + 1} differs between ranks: rank 2 had" in text


def padded(step: int = 0) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths: masked, with labels that do not count where padded."""
    tokens = torch.randint(
        1, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(step)
    )
    lengths = torch.tensor([SEQ - 12 * (row < BATCH // 2) for row in range(BATCH)])
    lengths[3] = 2
    mask = (torch.arange(SEQ) < lengths[:, None]).long()
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def _losses(plan_json: str, model: str, steps: int) -> list[float]:

    plan = Plan.from_json(plan_json)
    return list(run(plan, lambda: build(model), padded, steps=steps).losses)


def _plain_losses(model: str, steps: int) -> list[float]:
    """Train with the loss of transformers itself, on whole batches."""
    whole = build_model(lambda: build(model)).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = whole(**padded(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "mesh", [{"dp_replicate": 2}, {"dp_shard": 2, "zero_stage": 3}]
)
def test_masks_and_labels_that_the_plan_does_not_name_are_used(
    pool: Pool, mesh: dict[str, int]
) -> None:
    plan = make_plan("llama", num_microbatches=4, **mesh)
    ours = pool.run(_losses, 2, plan.to_json(), "llama", 3)
    expected = pytest.approx(_plain_losses("llama", 3), rel=1e-5)
    assert ours[0] == expected
    assert ours[1] == expected


def _refusal(plan_json: str, drop: str | None, add: str | None) -> str:
    batch = {key: value for key, value in padded().items() if key != drop}
    if add is not None:
        batch[add] = batch["labels"]
    try:
        run(Plan.from_json(plan_json), lambda: build("llama"), [batch], steps=1)
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}, {"cp": 2}])
def test_a_mask_that_a_split_cannot_use_is_refused(
    pool: Pool, mesh: dict[str, int]
) -> None:
    plan = make_plan("llama", num_microbatches=2, **mesh)
    for text in pool.run(_refusal, 2, plan.to_json(), None, None):
        assert "'attention_mask', which would not be used" in text
        assert "reads input_ids" in text
        assert "example_inputs" in text


def test_keys_that_are_missing_or_that_forward_does_not_take_are_refused(
    pool: Pool,
) -> None:
    plan = make_plan("llama", dp_replicate=2).to_json()
    for text in pool.run(_refusal, 2, plan, None, "atention_mask"):
        assert "'atention_mask', which would not be used" in text
    for text in pool.run(_refusal, 2, plan, "input_ids", None):
        assert "has attention_mask, labels and no 'input_ids'" in text


def _labelled(step: int) -> dict[str, torch.Tensor]:
    return {name: padded(step)[name] for name in ("input_ids", "labels")}


def _labelled_losses(plan_json: str, steps: int) -> list[float]:
    plan = Plan.from_json(plan_json)
    return list(run(plan, lambda: build("llama"), _labelled, steps=steps).losses)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"pp": 2}, {"tp": 2}])
def test_a_model_s_own_loss_weighs_tokens_alike(
    pool: Pool, mesh: dict[str, int]
) -> None:
    made = make_plan("llama", num_microbatches=4, **mesh)
    (tokens,) = made.workload.inputs
    labels = tokens.model_copy(update={"name": "labels"})
    changes = {"inputs": (tokens, labels), "loss": "model", "own_loss": "tokens"}
    workload = made.workload.model_copy(update=changes)
    plan = made.model_copy(update={"workload": workload})
    ours = pool.run(_labelled_losses, 2, plan.to_json(), 3)
    whole = build_model(lambda: build("llama")).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step, found in enumerate(zip(*ours, strict=True)):
        optimizer.zero_grad()
        loss = whole(**_labelled(step)).loss
        loss.backward()
        optimizer.step()
        assert found == pytest.approx([float(loss.detach())] * 2, rel=1e-5)


def test_samples_that_a_loss_compares_stay_together(pool: Pool) -> None:
    made = make_plan("llama", dp_replicate=2)
    workload = made.workload.model_copy(update={"loss": "model", "own_loss": "coupled"})
    plan = made.model_copy(update={"workload": workload})
    for text in pool.run(_refusal, 2, plan.to_json(), None, None):
        assert "compares its samples with each other" in text
        assert "num_microbatches=1" in text
