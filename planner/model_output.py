"""Parts of what a model's forward returned: its own loss, and its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["loss_beside", "main_tensor", "named_loss"]


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
    """Return the only scalar among what a forward returned in order; None if not one.

    Own code often returns ``(logits, loss)``, models of ``transformers`` without
    ``return_dict`` return ``(loss, logits)``.
    """
    scalars = [
        value
        for value in (output if isinstance(output, list | tuple) else ())
        if isinstance(value, torch.Tensor)
        and not value.dim()
        and value.is_floating_point()
    ]
    return scalars[0] if len(scalars) == 1 else None


def main_tensor(output: Any) -> torch.Tensor | None:
    """Return the output's ``logits``, or its first tensor; None if it holds none."""
    found = _named(output, "logits")
    if found is not None:
        return found
    values: Sequence[Any] = ()
    if isinstance(output, torch.Tensor):
        values = (output,)
    elif isinstance(output, Mapping):
        values = tuple(output.values())
    elif isinstance(output, list | tuple):
        values = output
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def _named(output: Any, name: str) -> torch.Tensor | None:
    found = output.get(name) if isinstance(output, Mapping) else None
    if found is None:
        found = getattr(output, name, None)
    return found if isinstance(found, torch.Tensor) else None
