"""Private transformers names that capture replaces while it runs a model.

Seen to work on transformers 5.23. A release without one of them is read all the same:
then a mask is made where a real run needs none, and keys and values are repeated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["unpacked_sequences"]


def _no_packing(position_ids: torch.Tensor) -> None:
    """Return None, the answer of the real function for one sequence a row."""


@contextlib.contextmanager
def unpacked_sequences() -> Iterator[None]:
    """While open, take every row of a batch to be one sequence.

    transformers reads the position ids to find out, which on tensors without data it
    cannot, so it would build a mask [length, length] and take the slower path of
    attention that no training run takes.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    before = getattr(masking, name, None)
    if before is None:
        yield
        return
    setattr(masking, name, _no_packing)
    try:
        yield
    finally:
        setattr(masking, name, before)
