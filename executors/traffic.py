"""Collectives and messages of this rank, counted at the dispatcher."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.schema.measurement import Traffic

__all__ = ["CollectiveCounter"]

#: c10d op name to the kind that it is counted as; barriers carry nothing.
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls and bytes by kind while it is entered.

    Bytes are those of the larger side: what an all-gather returns, what a
    reduce-scatter or an all-reduce is given.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: dict[str, int] = defaultdict(int)
        self._bytes: dict[str, int] = defaultdict(int)

    def traffic(self) -> dict[str, Traffic]:
        """What was counted so far, by kind."""
        return {
            kind: Traffic(count=count, bytes=self._bytes[kind])
            for kind, count in sorted(self._calls.items())
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        kind = _KINDS.get(name) if space == "c10d" else None
        if kind is not None:
            self._calls[kind] += 1
            self._bytes[kind] += max((_size(argument) for argument in args), default=0)
        return func(*args, **(kwargs or {}))


def _size(argument: Any) -> int:
    leaves = tree_leaves(argument)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
