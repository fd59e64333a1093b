"""A stand-in for routing, which follows values: every expert gets equally many tokens.

That is what a load-balancing loss trains routers to; what a real step sends and keeps
varies around it. Source: Fedus et al. 2021 (Switch), section 2.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["balanced_counts"]


def balanced_counts(
    expert: torch.Tensor, held: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """What ``exchange_counts`` tells if routing is balanced.

    It stands in for that of :mod:`executors.strategies.experts`.

    Rows that do not divide go to the first experts, on every rank alike.

    Args:
        expert: Shape [rows]; has no values.
        held: Experts on each rank.
        group: The ep axis.
    """
    size = group.size()
    counts = torch.empty(size * held, dtype=torch.int64)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    each, rest = divmod(expert.shape[0], size * held)
    shares = [each + (index < rest) for index in range(size * held)]
    sends = [sum(shares[rank * held : (rank + 1) * held]) for rank in range(size)]
    return arriving, sends, [sends[group.rank()]] * size
