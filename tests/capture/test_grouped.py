"""Products of stacked experts, read in other dtypes than bfloat16."""

from __future__ import annotations

import pytest
import torch

from planner.capture.private_apis import fake_mode
from planner.capture.stand_ins import run_or_assume


@pytest.mark.parametrize(
    ("left", "right", "groups"),
    [((32, 16), (4, 16, 24), 4), ((16, 32), (32, 24), 4), ((4, 8, 16), (4, 16, 24), 0)],
)
def test_shapes_are_those_of_the_op(
    left: tuple[int, ...], right: tuple[int, ...], groups: int
) -> None:
    offsets = torch.arange(1, groups + 1, dtype=torch.int32) * 8 if groups else None
    factors = torch.randn(left), torch.randn(right)
    expected = torch._grouped_mm(*factors, offs=offsets)
    mode = fake_mode()
    fakes = [mode.from_tensor(factor) for factor in factors]
    ends = None if offsets is None else mode.from_tensor(offsets)
    func = torch.ops.aten._grouped_mm.default
    with mode:
        made, _ = run_or_assume(
            func, (*fakes, ends), {}, fake=True, record=lambda *_: None
        )
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
