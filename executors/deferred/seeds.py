"""A seed for every random operation, whatever else is computed before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["draw_seed", "seeded"]


def draw_seed(generator: torch.Generator | None = None) -> int:
    """The next seed for one random operation.

    Drawn from the generator that the operation would have drawn its numbers from, so
    that ``torch.manual_seed`` and generators of a model's own are heeded.

    Args:
        generator: None for torch's.
    """
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(drawn.item())


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's CPU generator for the block; None for a block that draws nothing."""
    if seed is None:
        yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
