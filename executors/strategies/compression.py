"""Smaller gradients between replicas: hooks of DistributedDataParallel.

The casts are ours: torch's bf16 hook wants NCCL whatever the backend can do
(torch 2.13 refuses it on gloo by the hook's name). Codecs, which keep a state, run in
buckets of our own: :mod:`executors.communication`.
"""

# No deferred annotations here: DDP compares a hook's with the classes themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from planner.schema import GradientCompression, Strategy

__all__ = ["bucket_mb", "compress_gradients"]


def bucket_mb(strategy: Strategy) -> float | None:
    """Size of DDP's buckets in MiB, perhaps a fraction; None for torch's own."""
    size = strategy.overlap.bucket_bytes
    return None if size is None else size / 2**20


def compress_gradients(
    module: DistributedDataParallel,
    how: GradientCompression,
    group: dist.ProcessGroup,
) -> None:
    """Register the hook that compresses gradients between replicas.

    Args:
        module: Not yet run. Built with ``bucket_cap_mb`` of
            :func:`bucket_mb`.
        how: ``bfloat16`` and ``float16`` send rounded gradients.
        group: Replicas.
    """
    if how != "none":
        assert isinstance(how, str), "documents are of codecs"
        module.register_comm_hook((group, getattr(torch, how)), _rounded)


def _rounded(
    state: tuple[dist.ProcessGroup, torch.dtype],
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # DDP finds the parameter by this very name
) -> torch.futures.Future[torch.Tensor]:
    """Mean over replicas of gradients rounded to a narrow dtype.

    Divided before the sum, so that float16 does not overflow where the mean would not.
    """
    group, dtype = state
    whole = bucket.buffer()
    narrow = whole.to(dtype).div_(group.size())
    work: Any = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        widened: torch.Tensor = whole.copy_(future.value()[0])
        return widened

    done: torch.futures.Future[torch.Tensor] = work.get_future().then(widen)
    return done
