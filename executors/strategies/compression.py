"""Smaller gradients between replicas: hooks of DistributedDataParallel.

The two casts are ours: torch's bf16 hook wants NCCL whatever the backend can do
(torch 2.13 refuses it on gloo by the hook's name). PowerSGD is torch's.
"""

# No deferred annotations here: DDP compares a hook's with the classes themselves.

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power_sgd
from torch.nn.parallel import DistributedDataParallel

from planner.schema import GradientCompression, Strategy

__all__ = ["bucket_mb", "compress_gradients"]

#: PowerSGD's hook waits for its own collectives within a callback of the backend:
#: with two buckets both of gloo's threads wait for each other for ever (torch 2.13).
#: DDP has one bucket if it may be as large as this.
_ONE_BUCKET_MB = 1_000_000
#: Rank of PowerSGD's factors; Vogels et al. 2019 (section 5) train with 1 to 4.
_POWER_SGD_RANK = 4
#: Plain steps before PowerSGD sets in; torch asks for at least 2 with error feedback.
_POWER_SGD_START = 2


def bucket_mb(strategy: Strategy) -> float | None:
    """Size of DDP's buckets in MiB, perhaps a fraction; None for torch's own."""
    if strategy.gradient_compression == "powersgd":
        return _ONE_BUCKET_MB
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
        how: ``bfloat16`` and ``float16`` send rounded gradients; ``powersgd`` sends
            factors of low rank, and feeds what they miss back into the next step
            (Vogels et al. 2019).
        group: Replicas.
    """
    if how == "powersgd":
        state = power_sgd.PowerSGDState(
            process_group=group,
            matrix_approximation_rank=_POWER_SGD_RANK,
            start_powerSGD_iter=_POWER_SGD_START,
        )
        module.register_comm_hook(state, power_sgd.powerSGD_hook)
    elif how != "none":
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
