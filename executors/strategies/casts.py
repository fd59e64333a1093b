"""Casts of what enters a model, as the policies of ``fully_shard`` make them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["cast_inputs", "uncast_weights"]


def cast_inputs(model: nn.Module, units: Iterable[str], dtype: torch.dtype) -> None:
    """Cast floats that enter a model or a unit of it.

    Args:
        model: The model, or one stage of it.
        units: FQNs of its pipeline units.
        dtype: Of floats from then on.
    """

    def enter(_: Any, args: Any, kwargs: Any) -> Any:
        return _cast_floats(args, dtype), _cast_floats(kwargs, dtype)

    for part in (model, *(model.get_submodule(unit) for unit in units)):
        part.register_forward_pre_hook(enter, with_kwargs=True)


def uncast_weights(model: nn.Module) -> set[nn.Parameter]:
    """Weights that no cast reaches: those of batch norms, which torch wants in full."""
    return {
        parameter
        for module in model.modules()
        if isinstance(module, _BatchNorm)
        for parameter in module.parameters()
    }


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: _cast_floats(value, dtype) for key, value in tree.items()}
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_cast_floats(value, dtype) for value in tree)
    return tree
