"""Mixed precision without shards: casts of weights and of what enters a model.

Where a process holds whole weights and nothing is reduced, ``fully_shard`` would do for
casts alone, but its hooks take a host milliseconds a unit (4 on the host of an H200,
`python -m benchmarks.one_gpu`, 2026-11-26). Here autograd does it: the cast of a weight
is an operation of the forward, whose backward widens the gradient. Losses and gradients
are those of ``fully_shard`` with ``reduce_dtype=float32``, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["can_cast_weights", "cast_inputs", "cast_weights", "uncast_weights"]


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


def can_cast_weights(model: nn.Module) -> bool:
    """Return False for a model with modules that keep their weights elsewhere, too.

    Recurrent layers do: what stands in for a weight would not reach them.
    """
    return all(
        type(module).__setattr__ is nn.Module.__setattr__ for module in model.modules()
    )


def cast_weights(model: nn.Module, units: Collection[str], dtype: torch.dtype) -> None:
    """Let a model compute with casts of its weights, in place.

    Each unit casts its weights when its forward begins, the model those outside of
    units; parameters stay as they are between forwards. A unit that is computed again
    in backward casts its weights again, and keeps no casts until then.

    Args:
        model: The model, or one stage of it, compiled already, not yet wrapped for full
            recomputation. Batch norms and scalars are not cast.
        units: FQNs of units that share no weights with the rest of the model.
        dtype: Of casts.
    """
    full = {id(one) for one in uncast_weights(model)}
    inner: set[nn.Module] = set()
    for part in (*(model.get_submodule(unit) for unit in units), model):
        holders = [one for one in part.modules() if one not in inner]
        inner.update(holders)
        places = [
            (holder._parameters, name)
            for holder in holders
            for name, weight in holder._parameters.items()
            if weight is not None and id(weight) not in full and weight.ndim
        ]
        if places:
            part.__dict__["forward"] = _with_casts(part.forward, places, dtype)


def _with_casts(
    forward: Callable[..., Any],
    places: Iterable[tuple[dict[str, Any], str]],
    dtype: torch.dtype,
) -> Callable[..., Any]:
    """Return a forward during which casts are in the places of parameters."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        weights = [(held, name, held[name]) for held, name in places]
        casts: dict[int, torch.Tensor] = {}
        for held, name, weight in weights:
            if weight.is_floating_point():
                # A weight with two names has one cast, which adds up its gradients.
                if id(weight) not in casts:
                    casts[id(weight)] = weight.to(dtype)
                held[name] = casts[id(weight)]
        try:
            return forward(*args, **kwargs)
        finally:
            for held, name, weight in weights:
                held[name] = weight

    return run


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
