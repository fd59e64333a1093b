"""Perceptrons that score classes, whose labels come with the data."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from planner import plan
from planner.capture import capture, load_model
from planner.schema import Optimizer, Plan, Precision

__all__ = ["CLASSES", "INPUTS", "WIDTH", "Classifier", "classifier", "classifier_plan"]

INPUTS, WIDTH, CLASSES = 64, 128, 10


class Classifier(nn.Module):
    """Linear layers with a function between them, and scores of ten classes.

    Args:
        activation: Makes the function.
        depth: Linear layers.
        width: Features between them.
    """

    def __init__(
        self,
        activation: Callable[[], nn.Module] = nn.Tanh,
        depth: int = 6,
        width: int = WIDTH,
    ) -> None:
        super().__init__()
        sizes = [INPUTS, *[width] * (depth - 1), CLASSES]
        layers: list[nn.Module] = []
        for given, made in pairwise(sizes):
            layers += [nn.Linear(given, made), activation()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores. Shapes [batch, 64] to [batch, 10]."""
        scores: torch.Tensor = self.layers(x)
        return scores


def classifier() -> tuple[nn.Module, dict[str, Any]]:
    """Return one of hyperbolic tangents and its example, for ``module:classifier``."""
    return Classifier(), {"x": ((64, INPUTS), "float32")}


def classifier_plan(
    model: nn.Module | str,
    pp: int,
    *,
    batch: int = 64,
    optimizer: Optimizer | None = None,
    cluster: str | None = None,
    precision: Precision | None = None,
    **pins: Any,
) -> Plan:
    """Plan of a pipeline of so many processes, one microbatch if nothing else is said.

    Args:
        model: Scores classes; ``module:factory`` for plans that processes can open.
        pp: Stages.
        batch: Samples of a step.
        optimizer: Plain gradient descent if None.
        cluster: As many local processes if None.
        precision: float32 if None.
        pins: Knobs.
    """
    example = {"x": ((batch, INPUTS), "float32")}
    captured = (
        capture(load_model(model), loss="cross_entropy", dtype="float32")
        if isinstance(model, str)
        else capture(model, example, loss="cross_entropy", dtype="float32")
    )
    made: Plan = plan(
        captured,
        cluster or f"local:{pp}",
        global_batch=batch,
        pin={"pp": pp, "num_microbatches": 1, "recompute": "none", **pins},
        precision=precision or Precision(compute="float32"),
        optimizer=optimizer or Optimizer(name="SGD", learning_rate=0.05),
        devices="any",
        certify=False,
    )
    return made
