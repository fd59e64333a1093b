"""Largest entries of chunks, with indexes of 12 bits.

Source: Sarfi et al. 2025, arXiv 2508.15706, whose values are of 2 bits; here they are
float32, so that what is sent and the residual make up the values exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

__all__ = ["CHUNK", "decode_chunks", "encode_chunks"]

#: Entries of a chunk: as many as 12 bits tell apart.
CHUNK = 4096


def encode_chunks(
    values: Sequence[torch.Tensor], top: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Choose the largest entries of every chunk of every tensor.

    Args:
        values: Of one dtype.
        top: Entries of a chunk, an even number.

    Returns:
        The message, of uint8 and shape [chunks, 5.5 top]: values, then indexes, three
        bytes for two; and what it says of each tensor, zeros included.
    """
    messages, sent = [], []
    for value in values:
        rows = _rows(value)
        indexes = rows.abs().topk(top, dim=1, sorted=False).indices
        chosen = rows.gather(1, indexes)
        said = torch.zeros_like(rows).scatter_(1, indexes, chosen)
        sent.append(said.view(-1)[: value.numel()].view(value.shape))
        one, two = indexes[:, ::2], indexes[:, 1::2]
        three = (one & 255, one >> 8 | (two & 15) << 4, two >> 4)
        packed = torch.stack(three, dim=-1).flatten(1).to(torch.uint8)
        plain = chosen.to(torch.float32).view(torch.uint8)
        messages.append(torch.cat((plain, packed), dim=1))
    return torch.cat(messages), sent


def decode_chunks(
    message: torch.Tensor, top: int, values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Undo :func:`encode_chunks`.

    Args:
        message: Of one rank.
        top: Entries of a chunk.
        values: Tensors of the shapes and the dtype of those that were sent.

    Returns:
        All of them, one after the other. Shape [n].
    """
    chosen = message[:, : 4 * top].contiguous().view(torch.float32)
    packed = message[:, 4 * top :].to(torch.int64).view(len(message), -1, 3)
    first, middle, last = packed.unbind(-1)
    one, two = first | (middle & 15) << 8, middle >> 4 | last << 4
    indexes = torch.stack((one, two), dim=-1).flatten(1)
    rows = chosen.new_zeros(len(message), CHUNK).scatter_(1, indexes, chosen)
    counts = [-(-value.numel() // CHUNK) for value in values]
    parts = [
        part.reshape(-1)[: value.numel()]
        for part, value in zip(torch.split(rows, counts), values, strict=True)
    ]
    return torch.cat(parts).to(values[0].dtype)


def _rows(value: torch.Tensor) -> torch.Tensor:
    """Chunks of a tensor, filled up with zeros. Shape [chunks, 4096]."""
    flat = value.reshape(-1)
    return pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)
