"""Parts of what a model's forward returned: its own loss, and its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

__all__ = ["has_scalars", "loss_beside", "main_tensor", "named_loss", "parts_of"]


def named_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that a forward returned under that name, or as all it returned.

    Args:
        output: A tensor, a sequence or mapping of them, or a dataclass such as those of
            ``transformers``.
    """
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 and not output.dim() else None
    return _named(output, "loss")


def loss_beside(output: Any) -> torch.Tensor | None:
    """Return the loss among what a forward returned in order; None if not one.

    Own code often returns ``(logits, loss)`` or ``(loss, accuracy)``, models of
    ``transformers`` without ``return_dict`` return ``(loss, logits)``. It is the first
    scalar, and the only one that needs a gradient.
    """
    parts = output if isinstance(output, list | tuple) else ()
    scalars = _scalars(parts)
    needed = [scalar for scalar in scalars if scalar.requires_grad]
    if not any(isinstance(p, torch.Tensor) and p.requires_grad for p in parts):
        needed = scalars[:1]  # Under no_grad.
    return needed[0] if len(needed) == 1 and needed[0] is scalars[0] else None


def has_scalars(output: Any) -> bool:
    """Return True for scalars to train on, beside others or as all there is."""
    parts = parts_of(output)
    scalars = [one for one in _scalars(parts) if one.requires_grad]
    tensors = [one for one in parts if isinstance(one, torch.Tensor)]
    beside = isinstance(output, list | tuple)
    return bool(scalars) and (beside or len(scalars) == len(tensors))


def main_tensor(output: Any) -> torch.Tensor | None:
    """Return the output's ``logits``, or its first tensor; None if it holds none."""
    found = _named(output, "logits")
    if found is not None:
        return found
    parts = parts_of(output)
    return next((part for part in parts if isinstance(part, torch.Tensor)), None)


def parts_of(output: Any) -> Sequence[Any]:
    """Return what a forward returned at once, in order: items, values or fields."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    if isinstance(output, list | tuple):
        return output
    if is_dataclass(output):
        return tuple(getattr(output, field.name) for field in fields(output))
    return (output,)


def _scalars(parts: Sequence[Any]) -> list[torch.Tensor]:
    return [
        part
        for part in parts
        if isinstance(part, torch.Tensor)
        and not part.dim()
        and part.is_floating_point()
    ]


def _named(output: Any, name: str) -> torch.Tensor | None:
    found = output.get(name) if isinstance(output, Mapping) else None
    if found is None:
        found = getattr(output, name, None)
    return found if isinstance(found, torch.Tensor) else None
