"""Data of one's own: equal on all ranks, every key used or refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import planner
from executors import Samples, build_model, prepare, run
from executors.data import open_tokens, synthetic_batch
from planner.errors import ExecutionError
from planner.schema import Optimizer, Plan, Precision
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
            "samples of step 1 differ between ranks: rank 1 had others than rank 0"
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


def test_a_model_s_own_loss_needs_whole_sequences(pool: Pool) -> None:
    made = make_plan("llama", cp=2)
    workload = made.workload.model_copy(update={"loss": "model", "own_loss": "tokens"})
    plan = made.model_copy(update={"workload": workload})
    for text in pool.run(_refusal, 2, plan.to_json(), "attention_mask", None):
        assert "cp=2 with the model's own loss" in text


def test_samples_that_a_loss_compares_stay_together(pool: Pool) -> None:
    made = make_plan("llama", dp_replicate=2)
    workload = made.workload.model_copy(update={"loss": "model", "own_loss": "coupled"})
    plan = made.model_copy(update={"workload": workload})
    for text in pool.run(_refusal, 2, plan.to_json(), None, None):
        assert "compares its samples with each other" in text
        assert "num_microbatches=1" in text


# -- Each rank reads its part ----------------------------------------------------

LOCAL = {
    "dp_replicate": 2,
    "synchronisation": {"kind": "local_steps", "period": 2},
    "semantics": "approximate",
}
SPLITS = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "zero_stage": 3},
    {"pp": 2, "num_microbatches": 4},
    {"cp": 2},
    {"tp": 2},
    LOCAL,
]


def _losses_of(plan_json: str, kind: str, options: dict[str, Any]) -> Any:
    """Losses of a run on data of a kind; or what it was refused for."""
    plan = Plan.from_json(plan_json)
    folder = options.pop("folder", None)
    data: Any = f"{folder}/tokens.npy"
    if kind == "windows":
        rows = open_tokens(data, plan.workload).batches(0)

        def data(step: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.from_numpy(rows(step))}
    elif kind == "dataset":
        data = _PaddedRows()
    elif kind == "loader":
        order = torch.Generator().manual_seed(5)
        data = DataLoader(
            _PaddedRows(),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            generator=order,
        )
    elif kind == "documents":
        data = [{"input_ids": packed()}]
    try:
        result = run(plan, lambda: build(plan.model.name), data, **options)
    except ExecutionError as error:
        return str(error)
    return list(result.losses)


class _PaddedRows(Dataset[Any]):
    """Rows of unequal lengths: padded tokens are no targets."""

    def __len__(self) -> int:
        return 3 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {n: v[index % BATCH] for n, v in _labelled(index // BATCH).items()}


def _loader() -> Any:
    return DataLoader(
        _PaddedRows(),
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(5),
    )


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    np.save(tmp_path / "tokens.npy", rng.integers(0, VOCAB, 1000).astype(np.uint16))
    return tmp_path


@pytest.mark.parametrize("mesh", SPLITS)
def test_parts_of_a_token_file_train_as_its_whole_batches_do(
    pool: Pool, tokens: Path, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", **mesh).to_json()
    options = {"folder": str(tokens), "steps": 4}
    parts = pool.run(_losses_of, 2, plan, "tokens", options)
    whole = pool.run(_losses_of, 2, plan, "windows", options)
    assert all(isinstance(losses, list) for losses in parts)
    assert parts == whole
    if mesh is not LOCAL:
        assert parts[0] == parts[1]


def _checked(plan_json: str, folder: str, separator: int | None) -> Any:
    """First step beside one process's, evaluations by parts and by whole batches."""
    plan, file = Plan.from_json(plan_json), f"{folder}/tokens.npy"
    windows = open_tokens(file, plan.workload).windows(3)
    whole = [{"input_ids": torch.from_numpy(rows)} for rows in windows]
    found = []
    for held_out in (file, whole):
        result = run(
            plan,
            lambda: build("llama"),
            file,
            steps=2,
            check_first_step=True,
            measure=True,
            eval_data=held_out,
            document_separator=separator,
        )
        assert result.first_step_check is not None
        assert result.measurement is not None
        check = result.first_step_check
        found.append((check.loss, check.whole_loss, result.evaluations))
    return found


@pytest.mark.parametrize(
    ("mesh", "separator"),
    [({"dp_replicate": 2}, None), ({"dp_replicate": 2}, 7), ({"pp": 2}, None)],
)
def test_parts_are_checked_measured_and_evaluated_as_whole_batches_are(
    pool: Pool, tokens: Path, mesh: dict[str, Any], separator: int | None
) -> None:
    plan = make_plan("llama", **mesh).to_json()
    parts, whole = pool.run(_checked, 2, plan, str(tokens), separator)[0]
    assert parts == whole
    loss, whole_loss, evaluations = parts
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    assert [step for step, _ in evaluations] == [2]


def _own_loop(plan_json: str, folder: str) -> Any:
    plan = Plan.from_json(plan_json)
    with prepare(plan, lambda: build("llama"), f"{folder}/tokens.npy") as training:
        losses = [training.step().loss for _ in range(3)]
    with prepare(plan, lambda: build("llama")) as training:
        try:
            training.step()
        except ExecutionError as error:
            return losses, str(error)
    return losses, ""


def test_a_loop_of_one_s_own_takes_the_next_part(pool: Pool, tokens: Path) -> None:
    plan = make_plan("llama", dp_replicate=2).to_json()
    options = {"folder": str(tokens), "steps": 3}
    expected = pool.run(_losses_of, 2, plan, "tokens", options)[0]
    for losses, refused in pool.run(_own_loop, 2, plan, str(tokens)):
        assert losses == expected
        assert "step() without a batch" in refused


@pytest.mark.parametrize("kind", ["dataset", "loader", "tokens"])
def test_more_replicas_go_on_with_the_very_next_samples(
    pool: Pool, tokens: Path, kind: str
) -> None:
    one = make_plan("llama", pp=2).to_json()
    two = make_plan("llama", dp_replicate=2).to_json()
    files = {"folder": str(tokens)}
    whole = pool.run(_losses_of, 2, one, kind, {**files, "steps": 5})[0]
    kept = {**files, "checkpoint_dir": str(tokens / "kept")}
    pool.run(_losses_of, 2, one, kind, {**kept, "steps": 2})
    rest = pool.run(_losses_of, 2, two, kind, {**kept, "steps": 5, "resume": True})
    assert rest[0] == pytest.approx(whole[2:], rel=1e-5)
    assert len(set(whole)) == 5


@pytest.mark.parametrize("mesh", SPLITS[:-1])
def test_padded_rows_count_by_their_real_labels_over_the_global_batch(
    pool: Pool, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", **mesh)
    ours = pool.run(_losses_of, 2, plan.to_json(), "loader", {"steps": 3})
    assert ours[0] == ours[1]
    whole = build_model(lambda: build("llama")).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    expected, uneven = [], []
    for batch in _loader():
        optimizer.zero_grad()
        loss = whole(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
        halves = (batch["labels"][:, 1:] != -100).chunk(2)
        uneven.append(int(halves[0].sum()) != int(halves[1].sum()))
    assert any(uneven)
    assert ours[0] == pytest.approx(expected, rel=1e-5)


class _LeftPaddedRows(_PaddedRows):
    """Rows that are padded in front, where tokens behind would see the padding."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = padded(index // BATCH)
        return {name: value[index % BATCH].flip(0) for name, value in rows.items()}


def _masked_losses(plan_json: str) -> list[float]:
    plan = Plan.from_json(plan_json)
    data = Samples(dataset=_LeftPaddedRows(), shuffle=False)
    return list(run(plan, lambda: build("llama"), data, steps=3).losses)


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_replicate": 2, "num_microbatches": 2},
        {"pp": 2, "num_microbatches": 4},
        {"tp": 2},
    ],
)
def test_masks_of_padded_rows_are_used_by_a_plan_that_has_them(
    pool: Pool, mesh: dict[str, Any]
) -> None:
    plan = _with_input(make_plan("llama", **mesh), "attention_mask", 2)
    whole = build_model(lambda: build("llama")).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    expected = []
    for step in range(3):
        optimizer.zero_grad()
        batch = {name: value.flip(1) for name, value in padded(step).items()}
        loss = whole(**batch).loss
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    for ours in pool.run(_masked_losses, 2, plan.to_json()):
        assert ours == pytest.approx(expected, rel=1e-5)


# -- Packed documents ------------------------------------------------------------

END = 0


def packed() -> torch.Tensor:
    """Rows of documents of several lengths, each ended by END."""
    rows = torch.randint(
        1, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(7)
    )
    for row in range(BATCH):
        rows[row, row % (SEQ - 1)] = END
        rows[row, (5 * row + 3) % SEQ] = END
    return rows


def _documents(row: torch.Tensor) -> list[torch.Tensor]:
    ends = [int(at) + 1 for at in (row == END).nonzero()]
    bounds = [0, *ends, len(row)]
    return [row[start:stop] for start, stop in pairwise(bounds) if stop > start]


def _losses_apart(name: str, steps: int) -> list[float]:
    """Train on each document as a row of its own, in one process."""
    whole = build_model(lambda: build(name)).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    documents = [one for row in packed() for one in _documents(row) if len(one) > 1]
    count = sum(len(one) - 1 for one in documents)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for one in documents:
            logits = whole(input_ids=one[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, one[1:], reduction="sum")
            (loss / count).backward()
            total += float(loss.detach()) / count
        optimizer.step()
        losses.append(total)
    return losses


def _with_input(plan: Plan, name: str, high: int) -> Plan:
    """A plan for a model that is given another input of tokens' shape."""
    (tokens,) = plan.workload.inputs
    further = tokens.model_copy(update={"name": name, "high": high})
    workload = plan.workload.model_copy(update={"inputs": (tokens, further)})
    return plan.model_copy(update={"workload": workload})


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"dp_replicate": 2, "num_microbatches": 2}),
        ("llama", {"dp_shard": 2, "zero_stage": 3}),
        ("llama", {"tp": 2, "sequence_parallel": True}),
        ("llama", {"pp": 2, "num_microbatches": 4, "schedule": "1F1B"}),
        ("gpt2", {"dp_replicate": 2}),
    ],
)
def test_packed_documents_train_as_if_each_were_a_row(
    pool: Pool, name: str, mesh: dict[str, Any]
) -> None:
    plan = make_plan(name, **mesh)
    if "pp" in mesh:
        plan = _with_input(plan, "position_ids", SEQ)
    options = {"steps": 3, "document_separator": END}
    ours = pool.run(_losses_of, 2, plan.to_json(), "documents", options)
    assert ours[0] == ours[1]
    assert ours[0] == pytest.approx(_losses_apart(name, 3), rel=1e-5)


def test_documents_are_refused_where_they_could_not_be_kept_apart(pool: Pool) -> None:
    options = {"steps": 1, "document_separator": END}
    for mesh, words in (
        ({"cp": 2}, "document_separator=0 with cp=2"),
        ({"pp": 2}, "document_separator=0 with pp=2, whose stages were cut for"),
    ):
        plan = make_plan("llama", **mesh)
        for text in pool.run(_losses_of, 2, plan.to_json(), "documents", options):
            assert words in text
    beyond = {"steps": 1, "document_separator": VOCAB}
    plan = make_plan("llama", tp=2)
    for text in pool.run(_losses_of, 2, plan.to_json(), "documents", beyond):
        assert "document_separator=96 is none of the model's tokens" in text


def _blind(plan_json: str) -> str:
    """A model that takes positions and lets documents see each other."""
    plan = Plan.from_json(plan_json)

    def model() -> torch.nn.Module:
        made = build("llama")
        made.model._update_causal_mask = None
        forward = made.model.layers[0].self_attn.forward

        def without_mask(*args: Any, **kwargs: Any) -> Any:
            kwargs["attention_mask"] = None
            return forward(*args, **kwargs)

        made.model.layers[0].self_attn.forward = without_mask
        return made

    data = [{"input_ids": packed()}]
    try:
        run(plan, model, data, steps=1, document_separator=END)
    except ExecutionError as error:
        return str(error)
    return ""


def test_a_model_that_ignores_where_documents_begin_is_refused(pool: Pool) -> None:
    for text in pool.run(_blind, 2, make_plan("llama", dp_replicate=2).to_json()):
        assert "lets a document see the one before it" in text


def _restarted(plan_json: str) -> str:
    plan = Plan.from_json(plan_json)
    positions = torch.arange(SEQ).expand(BATCH, -1) % 5
    batch = {"input_ids": packed(), "position_ids": positions}
    try:
        run(plan, lambda: build("llama"), [batch], steps=1)
    except ExecutionError as error:
        return str(error)
    return ""


def test_positions_that_restart_are_refused_where_ranks_share_sequences(
    pool: Pool,
) -> None:
    plan = _with_input(make_plan("llama", cp=2), "position_ids", SEQ)
    for text in pool.run(_restarted, 2, plan.to_json()):
        assert "position_ids restart within a row, and cp=2" in text


class Ranker(torch.nn.Module):
    """Scores of three choices for each question, whose rows follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.given = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
        self.mixed = torch.nn.Linear(16, 16)

    def forward(self, question: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Return [questions, 3]; choices are [3 questions, 8]."""
        given = self.mixed(self.given(choices).relu()).view(-1, 3, 16)
        return torch.einsum("qd,qcd->qc", self.asked(question), given)


class Asked(Dataset[Any]):
    """Questions, each with its three choices."""

    def __len__(self) -> int:
        return 2 * BATCH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        rows = torch.randn(4, 8, generator=drawn)
        return {"question": rows[:1], "choices": rows[1:]}


def ranked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([one[name] for one in samples]) for name in samples[0]}


def train_ranker(plan_json: str) -> list[float]:
    data = DataLoader(Asked(), batch_size=BATCH, collate_fn=ranked)
    return list(run(Plan.from_json(plan_json), Ranker, data, steps=2).losses)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"pp": 2}], ids=["dp", "pp"])
def test_a_sample_s_rows_stay_together_on_every_mesh(
    pool: Pool, mesh: dict[str, int]
) -> None:
    plan = planner.plan(
        Ranker(),
        "local:2",
        example_inputs={
            "question": ((2, 8), "float32"),
            "choices": ((6, 8), "float32"),
        },
        global_batch=BATCH,
        pin={**mesh, "num_microbatches": 4},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=0.1),
        certify=False,
    )
    model, wanted = build_model(Ranker), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, BATCH):
        batch = ranked([Asked()[first + index] for index in range(BATCH)])
        optimizer.zero_grad()
        loss = model(**batch).square().mean()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    found = pool.run(train_ranker, 2, plan.to_json())
    assert found == [pytest.approx(wanted, rel=1e-5)] * 2
