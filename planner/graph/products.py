"""Products of unlike dtypes, which torch refuses when they are computed."""

from __future__ import annotations

from collections.abc import Iterable

from planner.graph.ops import OpGraph
from planner.graph.units import prefixes

__all__ = ["unlike_product"]

#: Ops whose floating operands must have one dtype; traces on fake tensors do not check.
_STRICT = frozenset(
    f"aten::{name}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)


def unlike_product(graph: OpGraph, units: Iterable[str], compute: str) -> str | None:
    """Describe a product whose operands have unlike dtypes once weights have one.

    A narrower dtype than float32 is cast to where a unit begins: a wide operand is told
    only if ops of the unit make it of narrow ones, or of buffers.

    Args:
        graph: Ops of the model with its weights in the dtype that it computes in.
        units: FQNs of pipeline units.
        compute: That dtype.
    """
    known, casts = frozenset(units), compute in ("bfloat16", "float16")
    writer: dict[int, int] = {}
    for row, name in enumerate(graph.names):
        found = _floats(graph, row) if name in _STRICT else {}
        if len(found) > 1:
            wide = {
                storage for kind in found.keys() - {compute} for storage in found[kind]
            }
            unit = next((p for p in prefixes(graph.modules[row]) if p in known), None)
            if not casts or _made_inside(graph, writer, wide, unit, compute):
                return _told(graph.modules[row], sorted(found), name, compute)
        writer |= dict.fromkeys(graph.outputs[row], row)
    return None


def _floats(graph: OpGraph, row: int) -> dict[str, list[int]]:
    """Floating storages that an op reads, by dtype."""
    found: dict[str, list[int]] = {}
    for storage in graph.inputs[row]:
        weight = storage < 0
        kind = (
            graph.parameters[-1 - storage].dtype
            if weight
            else graph.storage_tensor[storage][1]
        )
        if "float" in kind:
            found.setdefault(kind, []).append(storage)
    return found


def _made_inside(
    graph: OpGraph,
    writer: dict[int, int],
    wide: Iterable[int],
    unit: str | None,
    compute: str,
) -> bool:
    """Return True if ops of a unit make a storage wide, whatever enters the unit."""
    waiting, seen = [*wide], set[int]()
    while waiting:
        storage = waiting.pop()
        row = writer.get(storage)
        if storage in seen:
            continue
        seen.add(storage)
        if storage in graph.constants:
            return True
        if row is None or unit is None or unit not in prefixes(graph.modules[row]):
            continue
        floats = _floats(graph, row)
        others = [one for kind in floats.keys() - {compute} for one in floats[kind]]
        if floats and not others:
            return True
        waiting += others
    return False


def _told(module: str, kinds: list[str], op: str, compute: str) -> str:
    remedy = "" if compute == "float32" else ", or plan with compute=float32"
    return (
        f"{module or 'forward'} multiplies {' by '.join(kinds)} ({op}): all weights of "
        f"a plan have one dtype, here {compute}, and forward casts to another by hand "
        f"or reads a buffer in it; cast to the dtype of the weight, "
        f"x.to(self.weight.dtype){remedy}"
    )
