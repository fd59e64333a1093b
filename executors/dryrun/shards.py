"""Adapter to what ``fully_shard`` remembers between microbatches.

Which of its groups of parameters are whole, and which gradients are there, decides what
it does next. The only file that knows these private parts of torch. Seen to work with
torch 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from executors.dryrun.trace import StepTrace

__all__ = ["enter_state", "sharding_state"]


def sharding_state(module: nn.Module, *, gradients: bool) -> Hashable:
    """What decides what the next forward or backward of a module will send and keep.

    Args:
        module: Of this rank, in its final form.
        gradients: Whether it also matters which gradients there are.
    """
    groups = _groups(module)
    shards = tuple(
        (group._sharded_state.name, group._all_gather_result is not None)
        for group in groups
    )
    if not gradients:
        return shards
    kept = tuple(
        (shard.unsharded_accumulated_grad is None, _ungraded(shard))
        for group in groups
        for shard in group.fsdp_params
    )
    return shards, kept, tuple(p.grad is None for p in module.parameters())


def enter_state(module: nn.Module, state: Hashable, trace: StepTrace) -> None:
    """Gather or free parameters so that a module is in a state, uncounted.

    Args:
        module: Of this rank, in its final form.
        state: From :func:`sharding_state`, without gradients.
        trace: What is not to count.
    """
    assert isinstance(state, tuple)
    with trace.quiet():
        for group, (wanted, _) in zip(_groups(module), state, strict=True):
            if group._sharded_state.name == wanted:
                continue
            if wanted == "UNSHARDED":
                group.unshard()
                group.wait_for_unshard()
            else:
                group.reshard()


def _groups(module: nn.Module) -> list[Any]:
    found: list[Any] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            found += part._get_fsdp_state()._fsdp_param_groups
    return found


def _ungraded(shard: Any) -> bool:
    whole = getattr(shard, "_unsharded_param", None)
    return whole is None or whole.grad is None
