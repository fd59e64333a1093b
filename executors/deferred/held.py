"""Tensors that modules hold: parameters, buffers, and those in plain attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["held_tensors", "replace_plain"]

#: Attributes of every module that hold no tensors of its own.
_MACHINERY = frozenset(vars(nn.Module())) - {"training"}


def held_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors in attributes of a model's modules.

    Attributes are looked through lists, tuples and dicts, not other objects. What is
    held twice may come twice.
    """
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor
        for name, value in vars(module).items():
            if name not in _MACHINERY:
                yield from _within(value)


def _within(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _within(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _within(part)


def replace_plain(
    module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Put other tensors in the place of those in one module's plain attributes.

    Args:
        module: Its own attributes alone, not those of modules within it.
        change: Gives the tensor to hold instead; itself to leave it.
    """
    for name, value in list(vars(module).items()):
        if name not in _MACHINERY and any(True for _ in _within(value)):
            vars(module)[name] = _changed(value, change)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        # In place: others may hold the same container.
        for key, part in value.items():
            value[key] = _changed(part, change)
        return value
    if isinstance(value, list):
        value[:] = [_changed(part, change) for part in value]
        return value
    if isinstance(value, tuple):
        parts = [_changed(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
