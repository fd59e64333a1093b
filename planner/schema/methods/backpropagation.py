"""Gradients of the whole model, by back-propagation."""

from __future__ import annotations

from typing import Literal

from planner.schema.methods.method import Learning, Method

__all__ = ["METHODS", "Backpropagation"]


class Backpropagation(Learning):
    """The optimizer follows the gradient of the loss through the whole model."""

    kind: Literal["backpropagation"] = "backpropagation"


METHODS = (
    Method(
        kind="backpropagation",
        slot="learning",
        document=Backpropagation,
        default=True,
        prices="planner.cost.learning.backpropagation:BackpropagationPricing",
        runs="executors.learning.backpropagation:BackpropagationStep",
        page="methods/backpropagation.md",
        test="tests/distributed/test_composition.py",
        source="torch.autograd and torch.distributed.pipelining, torch 2.13",
    ),
)
