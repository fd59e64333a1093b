"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LoadedModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be built, and inputs to run it with.

    Attributes:
        name: For people.
        ref: What it was asked for by.
        build: Makes the module; on the meta device no weight is allocated.
        inputs: Keyword arguments of forward; tensors as
            :class:`planner.capture.inputs.InputShape`.
        seq_len: Tokens per sample; None without a sequence.
    """

    name: str
    ref: str
    build: Callable[[], torch.nn.Module]
    inputs: Any
    seq_len: int | None = None
