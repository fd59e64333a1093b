"""Kind of a block, told from its ops and its class."""

from __future__ import annotations

import re
from collections.abc import Sequence

from planner.graph.model import BlockKind
from planner.graph.ops import OpGraph

__all__ = ["EXPERTS", "block_kind"]

#: Names of modules and parameters that expert parallelism divides.
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_SCAN = re.compile(r"mamba|ssm|s4|rwkv|selective|retention|deltanet", re.IGNORECASE)
_RECURRENT = re.compile(r"lstm|gru|rnn", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)


def _attends(names: Sequence[str], kinds: Sequence[str]) -> bool:
    """A fused attention op, or a softmax between two batched products."""
    if "attention" in kinds:
        return True
    products = [
        i for i, name in enumerate(names) if name in {"aten::bmm", "aten::baddbmm"}
    ]
    softmax = [i for i, name in enumerate(names) if name == "aten::_softmax"]
    return any(products[0] < i < products[-1] for i in softmax) if products else False


def block_kind(graph: OpGraph, start: int, stop: int, *, last: bool) -> BlockKind:
    """Kind of the ops [start, stop).

    Args:
        graph: The ops.
        start: First op.
        stop: One past the last op.
        last: Whether nothing with weights follows the block.
    """
    names = graph.names[start:stop]
    kernels = graph.kernels[start:stop]
    modules = sorted(set(graph.modules[start:stop]))
    classes = " ".join(graph.module_types.get(name, "") for name in modules)
    flops: dict[str, float] = {}
    for kernel in kernels:
        flops[kernel.kind] = flops.get(kernel.kind, 0.0) + kernel.flops
    arithmetic = sum(flops.values())
    checks: tuple[tuple[BlockKind, bool], ...] = (
        ("expert", any(EXPERTS.search(name) for name in modules)),
        ("expert", any(name.endswith("grouped_mm") for name in names)),
        ("scan", bool(_SCAN.search(classes)) and arithmetic > 0),
        ("attention", _attends(names, [kernel.kind for kernel in kernels])),
        ("recurrent", bool(_RECURRENT.search(classes)) and arithmetic > 0),
        ("head", last and arithmetic > 0),
        ("conv", 2 * flops.get("conv", 0.0) > arithmetic > 0),
        ("embedding", "embedding" in flops),
        ("mlp", arithmetic > 0),
        ("norm", bool(_NORM.search(classes)) or any("norm" in name for name in names)),
    )
    return next((kind for kind, holds in checks if holds), "other")
