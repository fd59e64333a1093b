"""Models as chains of units: what is found, and why others are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.graph.chains import Chain, find_chain
from tests.models.classifiers import Classifier
from tests.models.tiny import TINY


class Skips(nn.Module):
    """Three layers, of which the last is also given what the first makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.one(x)
        scores: torch.Tensor = self.head(first + self.two(first.tanh()))
        return scores


class Convolves(nn.Module):
    """A convolution, and scores of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.head = nn.Conv1d(1, 2, 3), nn.Linear(62, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.one(x[:, None])[:, 0])
        return scores


def _chain(build: Callable[[], nn.Module], loss: Any = "cross_entropy") -> Chain:
    example = {"x": ((4, 64), "float32")}
    return find_chain(capture(build(), example, loss=loss, dtype="float32"))


def test_linear_layers_and_functions_are_a_chain() -> None:
    assert _chain(Classifier) == Chain()
    assert _chain(lambda: Classifier(nn.ReLU, depth=2)) == Chain()


@pytest.mark.parametrize(
    ("build", "classes", "layers"),
    [
        (
            Skips,
            "one hands on [4, 64] and [4, 64], no vector a sample",
            "two adds what it is given to what it computes",
        ),
        (
            Convolves,
            "one hands on [4, 2, 62], no vector a sample",
            "one is not one linear layer (its products: conv)",
        ),
    ],
)
def test_what_is_no_chain_is_told(
    build: Callable[[], nn.Module], classes: str, layers: str
) -> None:
    found = _chain(build)
    assert (found.no_classes, found.no_layers) == (classes, layers)


def test_losses_and_sequences_are_told() -> None:
    assert "the loss is mean_square" in _chain(Classifier, "mean_square").no_classes
    tiny = TINY["tiny-llama"]
    found = find_chain(capture(tiny.build, tiny.example(4), dtype="float32"))
    assert "sequences of 16 tokens, a label each" in found.no_classes


def test_scores_of_classes_need_no_labels_to_be_captured() -> None:
    graph = capture(
        Classifier(), {"x": ((4, 64), "float32")}, loss="cross_entropy", dtype="float32"
    )
    assert graph.config["loss"] == "cross_entropy"
    assert graph.seq_len is None
    auto = capture(Classifier(), {"x": ((4, 64), "float32")}, dtype="float32")
    assert auto.config["loss"] == "mean_square"
