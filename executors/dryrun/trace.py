"""One dispatch mode that watches a dry step: memory, communication, FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop,
    sdpa_flop,
)

from executors.dryrun.ledger import Ledger
from executors.measuring.memory import StorageWatch
from executors.measuring.traffic import Tally

__all__ = ["StepTrace"]

_ATEN = torch.ops.aten

#: torch has formulas for attention on GPUs alone.
_CPU_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


def _grouped_flop(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """FLOPs of grouped products: two a product, each row in one group."""
    del out_val
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    inner, columns = left.shape[-1], right.shape[-1]
    return int(2 * groups * left.shape[-2] * inner * columns)


#: torch has none for what experts compute.
_GROUPED = {_ATEN._grouped_mm: _grouped_flop}
_FORMULAS: dict[Any, Any] = {**flop_registry, **_CPU_ATTENTION, **_GROUPED}


class StepTrace(StorageWatch):  # type: ignore[no-untyped-call]
    """Counts what the ops of this rank's local tensors do while it is entered.

    Entered within a fake mode. What ``fully_shard`` gathers, reduces and receives is
    known by its own ops.

    Attributes:
        ledger: Memory.
        tally: Communication.
        flops: Of matrix products, convolutions and attention.
    """

    def __init__(self) -> None:
        self.ledger = Ledger()
        super().__init__(self.ledger.resized)
        self.restart()
        self._mode: Any = None
        self._quiet = False

    def restart(self) -> None:
        """Forget flops and collectives so far, and begin a new peak of memory."""
        self.tally = Tally()
        self.flops = 0
        self.ledger.restart()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Count nothing of the block."""
        self._quiet = True
        try:
            with self.ledger.muted():
                yield
        finally:
            self._quiet = False

    def __enter__(self) -> Self:
        self._mode = active_fake_mode()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # Its local op comes by here in a moment.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._quiet or active_fake_mode() is not self._mode:
            # DTensor works out shapes by ops on whole fake tensors of its own.
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.ledger.add(leaf)
        if func.namespace in ("c10d", "fsdp"):
            self._communicate(func, args, kwargs, result)
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func._overloadpacket.__name__
        self.tally.record(func, args)
        if name.startswith("recv"):
            self._tag(args, "buffers")
        elif name == "all_gather_copy_in":
            self._tag(result, "buffers")
        elif name == "split_with_sizes_copy":
            self._tag(kwargs["out"], "parameters")
        elif name == "chunk_cat":
            self._tag(args, "gradients")
            self._tag(kwargs["out"], "buffers")

    def _tag(self, value: Any, category: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                self.ledger.tag(leaf, category)
