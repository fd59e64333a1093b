"""Masks that a model would make only because it is being traced.

Models ask whether they are traced, and then make masks that a real run does without,
because a graph may be run at other shapes, and on other values, than it was traced at.
Stages are not. A mask costs more than its making: fused attention kernels do not take
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

__all__ = ["fixed_shapes", "whole_sequences"]


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Let a model's code, though not torch's own, think that it is not exported."""
    original = torch.compiler.is_exporting

    def is_exporting() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", ""))
        return original() and asking.partition(".")[0] == "torch"

    with mock.patch.object(torch.compiler, "is_exporting", is_exporting):
        yield


@contextmanager
def whole_sequences(whole: bool) -> Iterator[None]:
    """Answer what ``transformers`` asks positions for: do sequences restart in them?

    On tensors without values it would take them to.

    Args:
        whole: Whether each row's positions follow one another, as they do but where a
            ring deals chunks out or the data says otherwise.
    """
    library = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    if not whole or not hasattr(library, name):
        yield
        return
    with mock.patch.object(library, name, return_value=None):
        yield
