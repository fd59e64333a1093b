"""Own modules whose batches are, or are not, means over their samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.capture import capture
from planner.errors import CaptureError
from planner.graph.model import ModelGraph

_Forward = Callable[..., Any]
_X = {"x": ((8, 16), "float32")}
_LABELS = {**_X, "labels": ((8,), "int64")}


class _Own(nn.Module):
    """Two layers, a counter, and a forward of the test's own."""

    def __init__(self, forward: _Forward, width: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, width)
        self.register_buffer("count", torch.zeros(()))
        self.own = forward

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.first(x).tanh())
        return made

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.own(self, x) if labels is None else self.own(self, x, labels)


class _Mixed(torch.autograd.Function):
    """A backward that adds the gradients of other samples."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + gradient.sum(0, keepdim=True)


def _counted(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.count += 1
    made: torch.Tensor = model.scores(x) * model.count
    return made.square().mean()


def _branched(model: Any, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = model.scores(x)
    return (made if x.flatten()[0] > 0 else 2 * made).square().mean()


def _balanced(model: Any, x: torch.Tensor) -> torch.Tensor:
    shares = model.first(x).softmax(-1)
    chosen = functional.one_hot(shares.argmax(-1), 32).float()
    balance: torch.Tensor = (shares.mean(0) * chosen.mean(0)).sum()
    return balance + model.scores(x).square().mean()


def _kept(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rates = functional.cross_entropy(model.scores(x), labels, reduction="none")
    return rates[labels != 0].mean()


def _ignoring(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        model.scores(x), labels.masked_fill(labels == 0, -100)
    )


_MEANS: dict[str, _Forward] = {
    "mean": lambda m, x: m.scores(x).square().mean(),
    "mean of means": lambda m, x: m.scores(x).square().mean(1).mean(),
    "sum by samples": lambda m, x: m.scores(x).square().sum() / len(x),
    "two terms": lambda m, x: m.scores(x).abs().mean() + 0.1 * m.first(x).mean(),
    "stacked": lambda m, x: torch.stack([m.scores(x).mean()] * 2).sum(),
    "class by class": lambda m, x: m.first(x).mean(0).sum(),
    "hinge": lambda m, x: (1 - m.scores(x)).clamp(min=0).mean(),
    "dropout": lambda m, x: functional.dropout(m.scores(x), 0.5, m.training).mean(),
    "counter of no use": lambda m, x: m.scores(x).mean() + 0 * m.count.add_(1),
}
_MEETINGS: dict[str, _Forward] = {
    "place in the batch": lambda m, x: (
        (m.scores(x) * torch.arange(len(x))[:, None] / len(x)).square().mean()
    ),
    "one sample's branch": _branched,
    "own backward": lambda m, x: _Mixed.apply(m.scores(x)).square().mean(),  # type: ignore[no-untyped-call]
    "counter": _counted,
    "weights": lambda m, x: (m.scores(x) * x).sum() / x.abs().sum(),
    "hardest": lambda m, x: m.scores(x).flatten().topk(4).values.mean(),
    "balance of experts": _balanced,
    "inverse": lambda m, x: torch.div(torch.ones(()), m.scores(x).square().mean()),
    "ratio of means": lambda m, x: m.scores(x).square().mean() / x.square().mean(),
    "centred": lambda m, x: (m.scores(x) - m.scores(x).mean()).square().mean(),
}


def _is_whole(graph: ModelGraph) -> bool:
    told = any(text.startswith("batches stay whole") for text in graph.assumptions)
    assert told == (graph.config.get("own_loss") == "coupled")
    return told


@pytest.mark.parametrize("name", _MEANS)
def test_a_loss_that_is_a_mean_leaves_the_batch_divisible(name: str) -> None:
    assert not _is_whole(capture(_Own(_MEANS[name]), _X, dtype="float32"))


@pytest.mark.parametrize("name", _MEETINGS)
def test_a_loss_of_samples_that_meet_keeps_the_batch_whole(name: str) -> None:
    assert _is_whole(capture(_Own(_MEETINGS[name]), _X, dtype="float32"))


@pytest.mark.parametrize("forward", [_kept, _ignoring])
def test_labels_left_out_within_forward_keep_the_batch_whole(forward: _Forward) -> None:
    graph = capture(_Own(forward, 2), _LABELS, dtype="float32")
    assert _is_whole(graph)


def test_a_function_that_builds_a_module_is_checked_like_the_module() -> None:
    assert _is_whole(capture(lambda: _Own(_counted), _X, dtype="float32"))


def test_the_check_leaves_weights_buffers_and_random_state_alone() -> None:
    model = _Own(_counted)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    capture(model, _X)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(model.state_dict()[name], v) for name, v in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def _both(model: Any, x: torch.Tensor, labels: torch.Tensor) -> Any:
    scores = model.scores(x)
    return scores, functional.cross_entropy(scores, labels)


@pytest.mark.parametrize(
    "arrange",
    [
        tuple,
        list,
        lambda pair: pair[::-1],
        lambda pair: {"loss": pair[1], "y": pair[0]},
    ],
)
def test_the_scalar_beside_the_scores_is_the_loss(arrange: Any) -> None:
    model = _Own(lambda *given: arrange(_both(*given)), 4)
    graph = capture(model, _LABELS, dtype="float32")
    assert (graph.config["loss"], graph.config.get("own_loss")) == ("model", None)


def test_a_scalar_that_may_be_a_part_of_the_loss_is_asked_about() -> None:
    model = _Own(lambda m, x: (m.scores(x), m.first(x).square().mean()), 4)
    with pytest.raises(CaptureError, match=r"a scalar beside.*loss='model'"):
        capture(model, _X)
    graph = capture(model, _X, loss="model")
    assert graph.config["loss"] == "model"
    assert capture(model, _X, loss="cross_entropy").config["loss"] == "cross_entropy"


def test_scores_in_a_tuple_are_those_of_tokens() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

        def forward(self, idx: torch.Tensor) -> Any:
            return self.head(self.words(idx)), None

    graph = capture(Tokens(), {"idx": ((4, 8), "int64")})
    assert graph.config["loss"] == "cross_entropy"
