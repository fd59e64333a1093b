"""Deferred initialisation: a model whose parameters are recorded, not computed.

``model_fn`` is run under a recording (:mod:`executors.deferred.recording`), from which
any one tensor is computed later (:mod:`executors.deferred.materialize`). Every random
operation has a seed of its own, so that a tensor has the same values whatever else is
computed.

Source: the idea is torchdistX's ``deferred_init``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from executors.deferred.recording import Recording
from executors.deferred.tape import SMALL_BYTES
from executors.exception_chain import explain

__all__ = ["held_tensors", "record", "replace_plain"]

_LOG = logging.getLogger(__name__)


def record(
    model_fn: Callable[[], nn.Module], *, small_bytes: int = SMALL_BYTES
) -> tuple[nn.Module, Recording | None]:
    """Build a model without computing its parameters.

    Seeds are drawn from torch's generator as it stands. Tensors that do not come from
    torch's operations (files, numpy) and those below ``small_bytes`` have values at
    once. Where values are asked for (``.item()``, ``.numpy()``), they are computed.

    Args:
        model_fn: Builds the whole model, on the CPU.
        small_bytes: Tensors below this size are computed at once. No value depends on
            it.

    Returns:
        The model, and what gives its tensors values; None if the model could not be
        recorded and was built whole, of which the log tells the reason.
    """
    before = torch.get_rng_state()
    recording = Recording(small_bytes)
    try:
        with recording.active():
            model = model_fn()
        hidden = recording.hidden(held_tensors(model))
        reason = f"{hidden:,} bytes of tensors are kept where modules do not show them"
    except Exception as error:  # whatever model code raises on tensors without values
        hidden, reason = 1, f"{type(error).__name__}: {explain(error)}"
    if not hidden:
        return model, recording
    _LOG.warning("every process builds the whole model, which takes memory: %s", reason)
    torch.set_rng_state(before)
    return model_fn(), None


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
