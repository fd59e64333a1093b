"""Own modules whose batches are, or are not, means over their samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.capture import capture
from planner.errors import CaptureError
from planner.graph.model import ModelGraph
from planner.random_draws import host_state

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


def _seen(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss over what is seen of each sample, as masked autoencoders have."""
    order = torch.rand(x.shape).argsort(dim=1)
    hidden = torch.ones(x.shape)
    hidden[:, :4] = 0
    hidden = hidden.gather(1, order.argsort(dim=1))
    errors = (model.scores(x) - x).square()
    made: torch.Tensor = (errors * hidden).sum() / hidden.sum()
    return made


def _negatives(model: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = torch.multinomial(torch.ones(32), 2 * len(x), replacement=True)
    made: torch.Tensor = model.first(x).gather(1, drawn.view(len(x), 2)).square()
    return made.mean()


def _in_half(model: Any, x: torch.Tensor) -> torch.Tensor:
    made = model.scores(x).square()
    chosen = torch.rand_like(made) < 0.5
    return (made * chosen).sum() / chosen.sum()


def _tossed(model: Any, x: torch.Tensor, coin: float) -> torch.Tensor:
    made: torch.Tensor = model.scores(x) if coin < 0.9 else model.first(x)
    return made.square().mean()


def _by_numpy(model: Any, x: torch.Tensor) -> torch.Tensor:
    drawn = np.random.rand(len(x), 1)  # noqa: NPY002, as own code draws
    made: torch.Tensor = model.scores(x + torch.from_numpy(drawn).to(x)).square()
    return made.mean()


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
    "noise": lambda m, x: m.scores(x + torch.randn_like(x)).square().mean(),
    "noise in place": lambda m, x: m.scores(x + x.new_empty(x.shape).normal_()).mean(),
    "timesteps": lambda m, x: (
        (m.scores(x) * torch.randint(9, (len(x), 1))).square().mean()
    ),
    "stochastic depth": lambda m, x: (
        m.scores(x * x.new_empty(len(x), 1).bernoulli_(0.5)).square().mean()
    ),
    "posterior": lambda m, x: (
        torch.distributions.Normal(m.first(x), 1.0).rsample().square().mean()
    ),
    "codes": lambda m, x: functional.gumbel_softmax(m.first(x), hard=True)[:, 0].mean(),
    "shared noise": lambda m, x: m.scores(x + torch.randn(16)).square().mean(),
    "seen": _seen,
    "negatives": _negatives,
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
    "mixed up": lambda m, x: m.scores(x + x[torch.randperm(len(x))]).square().mean(),
    "drawn from the batch": lambda m, x: (
        m.scores(x) * m.scores(x[torch.randint(len(x), (len(x),))])
    ).mean(),
    "random number of terms": _in_half,
    "coin": lambda m, x: _tossed(m, x, float(torch.rand(()))),
    "coin of Python": lambda m, x: _tossed(m, x, random.random()),
    "NumPy's noise": _by_numpy,
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


def test_numbers_that_samples_share_are_told() -> None:
    shared = capture(_Own(_MEANS["shared noise"]), _X, dtype="float32")
    own = capture(_Own(_MEANS["noise"]), _X, dtype="float32")
    (told,) = (one for one in shared.assumptions if one.startswith("random numbers"))
    assert "(randn)" in told
    assert not any(one.startswith("random numbers") for one in own.assumptions)


def test_layers_behind_a_coin_are_named_with_the_remedy() -> None:
    graph = capture(_Own(_MEETINGS["coin"]), _X, dtype="float32")
    assert "uses last.weight or does not" in graph.whole_batch
    assert "drawn for each sample" in graph.whole_batch


class _Scheduled(nn.Module):
    """Layers, and a loss whose weight grows with a count of forwards."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.steps, self.rows, self.seen = 0, 0, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen:
            self.rows = len(x)
        else:
            self.steps += 1
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean() * (1 + self.steps / 1e6)


def test_a_forward_that_counts_in_python_is_not_cut_into_stages() -> None:
    counting, seeing = (
        capture(_Scheduled(seen), _X, dtype="float32") for seen in (False, True)
    )
    assert "changes steps" in str(counting.uncut)
    assert seeing.uncut is None
    tossed = capture(_Own(_MEETINGS["coin of Python"]), _X, dtype="float32")
    assert "draws numbers of Python's or NumPy's" in str(tossed.uncut)


def test_the_check_leaves_weights_buffers_and_random_state_alone() -> None:
    model = _Own(lambda m, x: _counted(m, x + torch.randn(16)) + random.random())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, host = torch.get_rng_state(), host_state()
    capture(model, _X)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert host_state() == host
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
