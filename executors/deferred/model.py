"""Deferred initialisation: a model whose parameters are recorded, not computed.

``model_fn`` is run under a recording (:mod:`executors.deferred.recording`), from which
any one tensor is computed later (:mod:`executors.deferred.materialize`). Every random
operation has a seed of its own, so that a tensor has the same values whatever else is
computed.

Source: the idea is torchdistX's ``deferred_init``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from executors.causes import explain
from executors.deferred.held import held_tensors
from executors.deferred.recording import Recording
from executors.deferred.tape import SMALL_BYTES

__all__ = ["record"]

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
