"""Activation checkpointing: what a stage's backward computes again."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from planner.schema import Recompute

__all__ = ["apply_recompute"]

_ATEN = torch.ops.aten

#: Outputs kept under "selective": products and fused attention, which are dear to
#: compute; everything between them is computed again.
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._grouped_mm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def apply_recompute(model: nn.Module, units: Iterable[str], how: Recompute) -> None:
    """Let the units of a stage keep less for backward, in place.

    The forward of each unit is wrapped, not the unit: names of parameters stay, and
    hooks on the unit itself (all-gathers, scatters) do not run again.

    Args:
        model: The stage.
        units: FQNs of its pipeline units; those without parameters are left alone.
        how: ``none``, ``selective`` or ``full``.
    """
    if how == "none":
        return
    options: dict[str, Any] = {} if how == "full" else {"context_fn": _selective}
    for name in units:
        unit = model.get_submodule(name)
        if any(True for _ in unit.parameters()):
            wrapped = partial(checkpoint, unit.forward, use_reentrant=False, **options)
            unit.__dict__["forward"] = wrapped
