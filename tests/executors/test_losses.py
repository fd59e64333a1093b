"""The loss of pieces adds up to the loss of the whole, gradients too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional

from executors.losses import LossFunction, Tally, select_output, target_of
from executors.own_loss import OwnLossFunction
from planner.errors import ExecutionError


@dataclass
class _Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


def _pieces(
    target: torch.Tensor, logits: torch.Tensor, ranks: int, micro: int
) -> float:
    loss = LossFunction(kind="cross_entropy", data_parallel=ranks)
    loss.prepare({"labels": target}, micro)
    total = 0.0
    following = target_of({"labels": target}, "cross_entropy")
    assert following is not None
    for rows, values in zip(
        following.chunk(ranks * micro), logits.chunk(ranks * micro), strict=True
    ):
        total += float(loss(values, rows))
    return total / ranks


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 2), (4, 2), (1, 8)])
def test_pieces_of_tokens_sum_to_the_mean_over_all(ranks: int, micro: int) -> None:
    torch.manual_seed(0)
    target, logits = torch.randint(11, (8, 6)), torch.randn(8, 6, 11)
    # Unequal counts in unequal pieces: a mean of means would be another number.
    target[0, 2:] = -100
    target[3] = -100
    whole = functional.cross_entropy(
        logits[:, :-1].reshape(-1, 11), target[:, 1:].reshape(-1)
    )
    assert _pieces(target, logits, ranks, micro) == pytest.approx(float(whole))


def test_classes_are_not_shifted() -> None:
    target, logits = torch.tensor([1, 0]), torch.randn(2, 3)
    loss = LossFunction(kind="cross_entropy", data_parallel=1)
    loss.prepare({"labels": target}, 1)
    expected = functional.cross_entropy(logits, target)
    assert float(loss(logits, target)) == pytest.approx(float(expected))


def test_model_and_mean_square_average_their_microbatches() -> None:
    square = LossFunction(kind="mean_square", data_parallel=2)
    square.prepare({}, 4)
    assert float(square(torch.full((3,), 2.0))) == pytest.approx(4 / 4)
    own = LossFunction(kind="model", data_parallel=1)
    own.prepare({}, 2)
    output = _Output(loss=torch.tensor(3.0), logits=torch.zeros(1))
    assert float(own(output)) == pytest.approx(1.5)


def test_outputs_of_many_shapes() -> None:
    logits, loss = torch.zeros(2), torch.ones(())
    assert select_output(_Output(loss=loss, logits=logits), "cross_entropy") is logits
    assert select_output(_Output(loss=loss, logits=logits), "model") is loss
    assert select_output({"logits": logits}, "mean_square") is logits
    assert select_output((None, logits), "mean_square") is logits
    assert select_output(loss, "model") is loss
    with pytest.raises(ExecutionError, match="no scalar loss"):
        select_output({"logits": logits}, "model")
    with pytest.raises(ExecutionError, match="without a tensor"):
        select_output((None, 3), "model")


def test_targets_are_the_next_of_labels_or_tokens() -> None:
    tokens, labels = torch.tensor([[5, 6, 7]]), torch.tensor([1])
    both = target_of({"input_ids": tokens, "labels": labels}, "cross_entropy")
    assert both is labels  # one class a sample has no next
    following = target_of({"mask": tokens > 0, "words": tokens}, "cross_entropy")
    assert following is not None
    assert following.tolist() == [[6, 7, -100]]
    assert target_of({"x": torch.zeros(1)}, "mean_square") is None
    with pytest.raises(ExecutionError, match="needs tokens, the batch has x"):
        target_of({"x": torch.zeros(1)}, "cross_entropy")


def test_scores_without_a_label_each_are_refused() -> None:
    loss = LossFunction(kind="cross_entropy", data_parallel=1)
    tokens = torch.zeros(4, 6, dtype=torch.int64)
    target = loss.target({"source": tokens, "target": tokens[:, :5]})
    said = r"\(4, 5, 8\) beside labels of shape \(4, 6\).*'labels' of shape \(4, 5\)"
    with pytest.raises(ExecutionError, match=said):
        loss(torch.zeros(4, 5, 8), target)


def test_a_batch_without_a_target_is_refused() -> None:
    loss = LossFunction(kind="cross_entropy", data_parallel=1)
    with pytest.raises(ExecutionError, match="every target"):
        loss.prepare({"labels": torch.full((2, 3), -100)}, 1)


def test_targets_stand_where_the_model_s_kind_has_them() -> None:
    tokens, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[1, 2, 3]])
    batch = {"input_ids": tokens, "decoder_input_ids": tokens + 1}

    def targets(batch: dict[str, torch.Tensor], shift: int) -> list[list[int]]:
        found = target_of(batch, "cross_entropy", shift)
        assert found is not None
        return list(found.tolist())

    assert targets({**batch, "labels": labels}, 0) == [[1, 2, 3]]
    assert targets({**batch, "labels": labels}, 1) == [[2, 3, -100]]
    # A decoder reads what it wrote: without labels its targets are its next inputs.
    assert targets(batch, 0) == [[7, 8, -100]]
    # A masked model without labels is held to its own tokens.
    assert targets({"input_ids": tokens}, 0) == [[5, 6, 7]]
    mask = torch.tensor([[1, 1, 0]])
    assert targets({"input_ids": tokens, "attention_mask": mask}, 1) == [
        [6, -100, -100]
    ]
    labelled = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    assert targets(labelled, 1) == [[2, 3, -100]]


def _own(target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_a_model_s_own_mean_over_tokens_is_weighed_by_tokens() -> None:
    torch.manual_seed(0)
    labels, logits = torch.randint(11, (8, 6)), torch.randn(8, 6, 11)
    labels[0, 2:] = -100
    labels[3, 1:] = -100
    loss = LossFunction(kind="model", data_parallel=2, label_shift=0, own_loss="tokens")
    loss.prepare({"labels": labels}, 2)
    total = 0.0
    for rows, values in zip(labels.chunk(4), logits.chunk(4), strict=True):
        own = _own(rows, values)
        total += float(loss(own, loss.target({"labels": rows})))
    assert total / 2 == pytest.approx(float(_own(labels, logits)))


def test_labels_of_another_ignore_index_weigh_nothing() -> None:
    torch.manual_seed(0)
    labels, logits = torch.randint(1, 11, (8, 6)), torch.randn(8, 6, 11)
    labels[0, 2:], labels[3, 1:] = 0, 0

    def own(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(
            values.flatten(0, 1), rows.flatten(), ignore_index=0
        )

    loss = LossFunction(
        kind="model",
        data_parallel=2,
        label_shift=0,
        own_loss="tokens",
        ignore_index=0,
    )
    loss.prepare({"labels": labels}, 2)
    total = 0.0
    for rows, values in zip(labels.chunk(4), logits.chunk(4), strict=True):
        total += float(loss(own(rows, values), loss.target({"labels": rows})))
    assert total / 2 == pytest.approx(float(own(labels, logits)))


def test_other_ignored_labels_are_not_taken_of_unequal_parts() -> None:
    own = LossFunction(kind="model", data_parallel=2, ignore_index=3)
    batch = {"tokens": torch.tensor([[3, 3], [1, 2]]), "target": torch.ones(2).long()}
    own.prepare(batch, 1)  # tokens are no labels
    batch["target"][0] = 3
    with pytest.raises(ExecutionError, match=r"0 to 1 labels .*are not 3"):
        own.prepare(batch, 1)


@pytest.mark.parametrize("name", ["labels", "targets"])
def test_a_mean_that_nobody_knows_is_not_taken_of_unequal_parts(name: str) -> None:
    labels = torch.ones(4, 3, dtype=torch.int64)
    own = LossFunction(kind="model", data_parallel=2, label_shift=0)
    batch = {"x": torch.ones(4, 2), "idx": torch.ones(4, 9).long(), name: labels}
    batch["table"] = torch.ones(3).long()  # which no sample owns
    own.prepare(batch, 1)  # equal parts: the mean of means is the mean
    labels[0, 0] = -100
    with pytest.raises(ExecutionError, match=r"2 microbatches .* to \d+ labels"):
        own.prepare(batch, 1)


def test_a_part_without_labels_has_no_mean() -> None:
    labels = torch.ones(4, 3, dtype=torch.int64)
    own = LossFunction(kind="model", data_parallel=2, label_shift=0)
    labels[:2] = -100
    own.own_loss = "tokens"
    with pytest.raises(ExecutionError, match="a mean over none is undefined"):
        own.prepare({"labels": labels}, 1)


@pytest.mark.parametrize("kind", ["cross_entropy", "model"])
def test_counts_of_parts_make_up_those_of_the_batch(kind: Any) -> None:
    labels = torch.randint(9, (8, 5), generator=torch.Generator().manual_seed(0))
    labels[5:, 2:] = -100
    whole = LossFunction(kind=kind, data_parallel=2, own_loss="tokens")
    whole.prepare({"labels": labels}, 2)
    parts = LossFunction(kind=kind, data_parallel=2, own_loss="tokens")
    tallies = [parts.tally({"labels": half}, 2) for half in labels.chunk(2)]
    assert tallies[0].count == 16
    assert tallies[1].count == 7
    parts.take(Tally.total(tallies), 2)
    assert parts.count == whole.count == 23


@pytest.mark.parametrize("first", ["questions", "choices"])
def test_a_loss_of_ones_own_is_given_all_rows_of_its_samples(first: str) -> None:
    torch.manual_seed(0)
    batch = {"questions": torch.randn(4, 3), "choices": torch.randn(8, 3)}
    scores = torch.randn(8, 3)

    def of(scores: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        choices = (batch["choices"] * scores).view(-1, 2, 3).sum(1)
        return (choices * batch["questions"]).sum(1)

    whole = of(scores, batch).mean()
    loss = OwnLossFunction(
        kind="mean_square",
        data_parallel=1,
        function=of,
        rows={"questions": 1, "choices": 2},
    )
    order = {first: batch[first], **batch}
    loss.prepare(order, 2)
    parts = zip(scores.chunk(2), loss.target(order).chunk(2), strict=True)
    found = sum(float(loss(rows, numbers)) for rows, numbers in parts)
    assert found == pytest.approx(float(whole))
    other = OwnLossFunction(
        kind="mean_square",
        data_parallel=2,
        function=lambda scores, batch: scores.mean(),
        rows=loss.rows,
    )
    other.prepare(order, 1)
    numbers = other.target(order)
    with pytest.raises(ExecutionError, match="output has 7 rows for 4 samples"):
        other(scores[:7], numbers)
