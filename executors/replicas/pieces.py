"""Weights in pieces, to be sent in few messages that take little memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor

from planner.schema.methods.method import Synchronisation

__all__ = ["local_part", "pieces"]

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without its graph."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def pieces(tensors: Iterable[_Tensor], times: int = 1) -> Iterator[list[_Tensor]]:
    """Cut a list into runs of one dtype and no more bytes than a piece has.

    Args:
        tensors: What to send.
        times: Tensors that each one stands for.
    """
    piece: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = times * local_part(tensor).nbytes
        full = size + nbytes > Synchronisation.PIECE_BYTES
        if piece and (full or tensor.dtype != piece[0].dtype):
            yield piece
            piece, size = [], 0
        piece.append(tensor)
        size += nbytes
    if piece:
        yield piece
