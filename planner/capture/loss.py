"""The scalar that backward starts from, made as a training run makes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from planner.capture.torch_private import tree_flatten
from planner.errors import CaptureError

__all__ = ["Loss", "LossKind", "compute_loss"]

LossKind = Literal["auto", "cross_entropy", "model", "mean_square"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A loss and how it was made.

    Attributes:
        value: Scalar tensor.
        kind: ``cross_entropy``, ``model`` or ``mean_square``.
    """

    value: torch.Tensor
    kind: str


def _field(output: Any, name: str) -> torch.Tensor | None:
    found = (
        output.get(name) if isinstance(output, dict) else getattr(output, name, None)
    )
    return found if isinstance(found, torch.Tensor) else None


def _logits(output: Any, integers: Iterable[tuple[int, ...]]) -> torch.Tensor | None:
    """Scores [batch, length, vocabulary] of some integer input [batch, length]."""
    found = _field(output, "logits")
    if found is None and isinstance(output, torch.Tensor):
        found = output
    if found is None or found.dim() != 3 or not found.is_floating_point():
        return None
    return found if tuple(found.shape[:2]) in set(integers) else None


def _cross_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Next-token loss in fp32, labels shifted by one as in training.

    fp32 matters: the log-probabilities that are kept are the largest tensor of many
    models.
    """
    labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten()
    )


def _mean_square(output: Any) -> torch.Tensor:
    floating = [
        leaf
        for leaf in tree_flatten(output)[0]
        if isinstance(leaf, torch.Tensor)
        and leaf.is_floating_point()
        and leaf.requires_grad
    ]
    if not floating:
        raise CaptureError(
            "forward returned no floating tensor that needs a gradient, so there is "
            "nothing to train; check requires_grad and that forward is not under "
            "no_grad"
        )
    total = floating[0].float().square().mean()
    for tensor in floating[1:]:
        total = total + tensor.float().square().mean()
    return total


def compute_loss(
    output: Any, kind: LossKind, integers: Iterable[tuple[int, ...]]
) -> Loss:
    """A scalar from whatever a forward returned.

    ``auto`` takes the model's own loss if it has one, next-token cross-entropy if the
    output scores every position of an integer input, and the mean square otherwise.

    Args:
        output: What forward returned.
        kind: How to make the loss.
        integers: Shapes of the integer inputs.

    Raises:
        CaptureError: If the output does not allow that loss.
    """
    found = _loss(output, kind, integers)
    if not found.value.requires_grad:
        raise CaptureError(
            "the loss needs no gradient, so there is nothing to train; check "
            "requires_grad of the parameters and that forward is not under no_grad"
        )
    return found


def _loss(output: Any, kind: LossKind, integers: Iterable[tuple[int, ...]]) -> Loss:
    own = _field(output, "loss")
    if own is None and isinstance(output, torch.Tensor) and not output.dim():
        own = output
    if kind == "model" or (kind == "auto" and own is not None):
        if own is None:
            raise CaptureError(
                "loss='model', but forward returned neither a scalar nor a .loss; use "
                "loss='mean_square' or pass labels among example_inputs"
            )
        return Loss(value=own, kind="model")
    logits = _logits(output, integers)
    if kind == "cross_entropy" or (kind == "auto" and logits is not None):
        if logits is None:
            raise CaptureError(
                "loss='cross_entropy', but forward returned no logits of shape "
                "[batch, length, vocabulary] for an integer input [batch, length]; use "
                "loss='mean_square'"
            )
        return Loss(value=_cross_entropy(logits), kind="cross_entropy")
    return Loss(value=_mean_square(output), kind="mean_square")
