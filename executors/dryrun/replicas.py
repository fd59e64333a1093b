"""A stand-in for DistributedDataParallel on tensors without memory.

torch's reducer is C++ that reads values, and runs on no fake tensor. This one has its
buckets as they are from the second step on: gradients in the order in which backward
has made them, a first bucket of 1 MiB, then of 25. Source: Li et al. 2020, section 3.2;
``torch/csrc/distributed/c10d/reducer.cpp``, ``rebuild_buckets``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["FakeReplicas"]

_MIB = 1 << 20
#: torch's default of ``bucket_cap_mb``.
_CAP_MB = 25


class FakeReplicas(DistributedDataParallel):
    """Reduces the gradients of a module's replicas at the end of backward.

    Args:
        module: On fake tensors.
        process_group: Of the replicas.
        bucket_cap_mb: Size of a bucket in MiB; None for torch's default.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup,
        bucket_cap_mb: float | None = None,
        **_: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.find_unused_parameters = False
        self._group = process_group
        self._limits = (
            [dist._DEFAULT_FIRST_BUCKET_BYTES, _CAP_MB * _MIB]  # type: ignore[attr-defined]
            if bucket_cap_mb is None
            else [int(bucket_cap_mb * _MIB)]
        )
        self._first = dist.get_global_rank(process_group, 0)
        self._sync = self._synced = True
        self._sent_as: torch.dtype | None = None
        self._arrived: list[torch.Tensor] = []
        self._trained = [p for p in module.parameters() if p.requires_grad]
        # Buckets live as long as the reducer does; gradients are views of them.
        self._views = {id(p): torch.empty_like(p) for p in self._trained}
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._collect
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward after a broadcast of the first replica's buffers."""
        buffers = list(self.module.buffers())
        if self._synced and buffers:
            self._send_flat(buffers, dist.broadcast, src=self._first)
        self._synced = self._sync
        return self.module(*args, **kwargs)

    def buckets(self) -> list[torch.Tensor]:
        """Memory of the gradients, which lives as long as this does."""
        return list(self._views.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of the block accumulate."""
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Send gradients rounded, as :mod:`executors.strategies.compression` asks.

        Args:
            state: The group, and the dtype to round to.
            hook: Rounds on real tensors; not called.
        """
        _, self._sent_as = state

    def _collect(self, parameter: torch.Tensor) -> None:
        if self._sync:
            parameter.grad = self._views[id(parameter)]
            self._arrived.append(parameter)
            if len(self._arrived) == len(self._trained):
                self._reduce()

    def _reduce(self) -> None:
        buckets, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
            self._arrived, self._limits, [False] * len(self._arrived)
        )
        for bucket in buckets:
            views = [self._views[id(self._arrived[index])] for index in bucket]
            self._send_flat(views, dist.all_reduce, sent_as=self._sent_as)
        self._arrived.clear()

    def _send_flat(
        self,
        tensors: Sequence[torch.Tensor],
        how: Callable[..., Any],
        *,
        sent_as: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        """One call for tensors of each dtype, on the meta device: it takes no memory.

        Buckets are one storage already; buffers are too small to be seen. What is
        rounded is a copy, and takes memory while it is sent.
        """
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        for dtype, size in sizes.items():
            where = None if sent_as else "meta"
            flat = torch.empty(size, dtype=sent_as or dtype, device=where)
            how(flat, group=self._group, **options)
