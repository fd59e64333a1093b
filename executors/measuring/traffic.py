"""Collectives and messages of this rank, counted at the dispatcher."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.schema.measurement import Traffic

__all__ = ["CollectiveCounter", "Tally"]

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


class Tally:
    """Calls and bytes of collectives, by kind and size of the group.

    Bytes are those of the larger side: what an all-gather returns, what a
    reduce-scatter or an all-reduce is given.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], list[int | float]]
        self._counts = defaultdict(lambda: [0, 0])

    def record(self, func: Any, args: Any) -> None:
        """Count one op of the dispatcher, if it is a collective or a message."""
        space, _, name = func._schema.name.partition("::")
        kind = _KINDS.get(name) if space == "c10d" else None
        if kind is not None:
            entry = self._counts[kind, _group_size(args)]
            entry[0] += 1
            entry[1] += max((_size(argument) for argument in args), default=0)

    def add(self, more: Mapping[tuple[str, int], Traffic]) -> None:
        """Add earlier traffic once more, by kind and size of the group."""
        for key, traffic in more.items():
            entry = self._counts[key]
            entry[0] += traffic.count
            entry[1] += traffic.bytes

    def by_group(self) -> dict[tuple[str, int], Traffic]:
        """Traffic so far, by kind and number of ranks that take part."""
        return {
            key: Traffic(count=count, bytes=size)
            for key, (count, size) in sorted(self._counts.items())
        }

    def by_kind(self) -> dict[str, Traffic]:
        """Traffic so far, by kind."""
        totals: dict[str, list[int | float]] = defaultdict(lambda: [0, 0])
        for (kind, _), (count, size) in self._counts.items():
            totals[kind][0] += count
            totals[kind][1] += size
        return {
            kind: Traffic(count=count, bytes=size)
            for kind, (count, size) in sorted(totals.items())
        }


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives of this rank while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tally = Tally()

    def traffic(self) -> dict[str, Traffic]:
        """Traffic so far, by kind."""
        return self._tally.by_kind()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self._tally.record(func, args)
        return func(*args, **(kwargs or {}))


def _group_size(args: Any) -> int:
    """Ranks of the group among an op's arguments; 2 for a message between two."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(argument).size()
            except RuntimeError:
                # Not a group but a boxed option, such as the kind of reduction.
                continue
    return 1


def _size(argument: Any) -> int:
    leaves = tree_leaves(argument)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
