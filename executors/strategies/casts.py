"""Mixed precision without shards: casts of weights and of what enters a model.

Where a process holds whole weights and nothing is reduced, ``fully_shard`` would do for
casts alone, but its hooks take a host milliseconds a unit (4 on the host of an H200,
`python -m benchmarks.one_gpu`, 2026-11-26). Here autograd does it. Losses and gradients
are those of ``fully_shard`` with ``reduce_dtype=float32``, to the bit, but for weights
that several units share, whose gradients are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["WeightCasts", "can_cast_weights", "cast_inputs", "uncast_weights"]


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


class WeightCasts:
    """Casts of a model's weights, with which it computes.

    In a step of one microbatch the cast of a weight is an operation of the forward,
    whose backward widens the gradient: casts go when their unit's backward is done. In
    a step of several, casts are made once and are leaves, whose gradients are added to
    those of the weights at once.

    Args:
        model: The model, or one stage of it.
        units: FQNs of its pipeline units.
        dtype: Of casts.
    """

    def __init__(
        self, model: nn.Module, units: Collection[str], dtype: torch.dtype
    ) -> None:
        self._model, self._units, self._dtype = model, units, dtype
        self._kept: dict[int, torch.Tensor] | None = None

    def apply(self) -> None:
        """Let the model compute with casts from now on, in place.

        Each unit casts its weights when its forward begins, the model those outside of
        units; parameters stay as they are between forwards. Batch norms and scalars are
        not cast. Where recomputation is wrapped later, it casts weights again.
        """
        model, full = self._model, {id(one) for one in uncast_weights(self._model)}
        units = {model.get_submodule(unit) for unit in self._units}
        for part in units | {model}:
            holders = _modules_outside(part, units - {part})
            places = [
                (holder._parameters, name)
                for holder in holders
                for name, weight in holder._parameters.items()
                if weight is not None and id(weight) not in full and weight.ndim
            ]
            if places:
                part.__dict__["forward"] = self._around(part.forward, places)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A block of several forwards and backwards, in which no weight changes."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def leaves(self) -> list[torch.Tensor]:
        """Each parameter, or the cast of it that gets its gradient."""
        kept = self._kept or {}
        return [kept.get(id(one), one) for one in self._model.parameters()]

    def _leaf(self, weight: nn.Parameter) -> torch.Tensor:
        """Cast of a weight that is kept."""
        assert self._kept is not None
        if id(weight) not in self._kept:
            cast = weight.detach().to(self._dtype)
            if weight.requires_grad:
                cast.requires_grad_()
                hand_on = partial(_hand_on, weight)
                cast.register_post_accumulate_grad_hook(hand_on)  # type: ignore[no-untyped-call]
            self._kept[id(weight)] = cast
        return self._kept[id(weight)]

    def _around(
        self, forward: Callable[..., Any], places: Sequence[tuple[dict[str, Any], str]]
    ) -> Callable[..., Any]:
        """Return a forward during which casts are in the places of parameters."""

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            weights = [(held, name, held[name]) for held, name in places]
            # A weight with two names in a unit has one cast.
            made: dict[int, torch.Tensor] = {}
            for held, name, weight in weights:
                if not weight.is_floating_point() or weight.dtype == self._dtype:
                    continue
                if self._kept is not None:
                    held[name] = self._leaf(weight)
                    continue
                if id(weight) not in made:
                    made[id(weight)] = weight.to(self._dtype)
                held[name] = made[id(weight)]
            try:
                return forward(*args, **kwargs)
            finally:
                for held, name, weight in weights:
                    held[name] = weight

        return run


def _modules_outside(module: nn.Module, others: Set[nn.Module]) -> list[nn.Module]:
    """A module and what it holds, without others and what only they hold."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if one not in found and one not in others:
            found[one] = None
            waiting += one.children()
    return [*found]


@torch.no_grad()
def _hand_on(weight: nn.Parameter, cast: torch.Tensor) -> None:
    """Add the gradient of a cast to that of its weight."""
    grad, cast.grad = cast.grad, None
    assert grad is not None
    if weight.grad is None:
        weight.grad = grad.to(weight.dtype)
    else:
        weight.grad.add_(grad)


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
