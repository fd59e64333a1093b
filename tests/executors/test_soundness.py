"""Sums over bits, which tell copies of a weight apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executors.soundness import _bit_sum


def _sum(tensor: torch.Tensor) -> int:
    return int(_bit_sum(nn.Parameter(tensor)))


@pytest.mark.parametrize("shape", [(), (3,), (5, 4099), (2, 4096, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_bit_and_any_exchange_changes_the_sum(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator).to(dtype)
    expected = _sum(tensor)
    # The same values elsewhere in memory, at an odd address.
    shifted = torch.cat([torch.zeros(1, dtype=dtype), tensor.reshape(-1)])[1:]
    assert _sum(shifted.view(shape)) == expected
    kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    places = torch.randint(tensor.numel(), (20,), generator=generator).tolist()
    for place in places:
        for bit in range(8 * dtype.itemsize):
            other = tensor.clone()
            bits = other.view(kind).view(-1)
            bits[place] ^= torch.tensor(1 << bit).to(kind)
            assert _sum(other) != expected
        swapped = tensor.clone().view(-1)
        swapped[0], swapped[place] = tensor.view(-1)[place], tensor.view(-1)[0]
        if not torch.equal(swapped, tensor.view(-1)):
            assert _sum(swapped.view(shape)) != expected
