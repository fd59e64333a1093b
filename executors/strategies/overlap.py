"""How far ahead ``fully_shard`` gathers weights, where a plan says so.

On GPUs the gather of a unit runs beside the computation of those before it. More units
ahead hide longer gathers, and hold more weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from executors.names import inside
from planner.schema import Overlap

__all__ = ["set_prefetch"]


def set_prefetch(
    model: nn.Module, units: Sequence[str], experts: Sequence[str], overlap: Overlap
) -> None:
    """Say which units each unit gathers while it is computed.

    Args:
        model: The model, or one stage of it, after ``fully_shard``.
        units: FQNs of the units that are sharded on their own, in order of execution.
        experts: FQNs of modules within them that are sharded on their own, too, and
            gathered along with the unit around them.
        overlap: How many units ahead; None leaves torch's own order.
    """
    groups = [
        [unit, *(expert for expert in experts if inside(expert, unit))]
        for unit in units
    ]
    for index, (unit, *_) in enumerate(groups):
        depth = overlap.forward_prefetch
        if depth is not None:
            ahead = groups[index + 1 : index + 1 + depth]
            _sharded(model, unit).set_modules_to_forward_prefetch(
                [_sharded(model, name) for group in ahead for name in group]
            )
        depth = overlap.backward_prefetch
        if depth is not None:
            behind = groups[max(0, index - depth) : index][::-1]
            _sharded(model, unit).set_modules_to_backward_prefetch(
                [_sharded(model, name) for group in behind for name in group]
            )


def _sharded(model: nn.Module, name: str) -> FSDPModule:
    module = model.get_submodule(name)
    assert isinstance(module, FSDPModule)
    return module
