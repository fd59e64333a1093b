"""Regions of tensor parallelism: what lies between colwise and rowwise layers.

Within a region each tp rank computes with its own features, and so has a part of the
gradient of whatever else it reads there. That part is made whole in one of two ways.
Where ops between the layers read nothing but split features, constants and parameters,
the region is entered at the colwise layers: their input's gradient is summed, and that
of the parameters read. Where they also read other activations (keys that all heads
share in multi-head latent attention), the region is entered at the module around its
layers, and all parameters in it that tp does not split have partial gradients. That
needs a module that is closed: what comes after its rowwise layers reads their sums
alone. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from planner.graph.ops import Flow, OpGraph

__all__ = ["Region", "read_region"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Entry of one group of paired layers.

    Attributes:
        module: Module that is entered as a whole; None if the layers are.
        replicated: Indices of parameters that ops between the layers read and that tp
            does not split.
        closed: True if the module around the layers may be entered as a whole, as
            sequence parallelism does.
        violation: Why the group cannot be split; None if it can.
    """

    module: str | None = None
    replicated: frozenset[int] = frozenset()
    closed: bool = False
    violation: str | None = None


def read_region(
    graph: OpGraph,
    flow: Flow,
    layers: Mapping[int, str],
    start: int,
    stop: int,
) -> Region:
    """Follow the split features of one group of paired layers.

    Args:
        graph: All forward ops.
        flow: Data dependences.
        layers: Row of each product of the group, to ``colwise`` or ``rowwise``.
        start: First row of the unit.
        stop: Row after its last.
    """
    elsewhere = _used_elsewhere(graph, layers)
    if elsewhere is not None:
        return Region(violation=f"share weights with another use of {elsewhere}")
    module = _around([graph.modules[r] for r, s in layers.items() if s == "colwise"])
    features = _follow(graph, flow, layers, module, stop)
    split, foreign, replicated = features.split, features.foreign, features.parameters
    rows = [row for row in range(start, stop) if _inside(graph.modules[row], module)]
    closed = _is_closed(graph, flow, layers, rows, split)
    if not foreign:
        for row in range(len(graph)):
            shared = replicated.intersection(-1 - i for i in graph.inputs[row] if i < 0)
            if shared and row not in features.rows:
                name = graph.parameters[shared.pop()].name
                return Region(violation=f"compute with {name}, which others read too")
        return Region(replicated=frozenset(replicated), closed=closed)
    if all(foreign.values()) and closed and not _parameters_after(graph, layers, rows):
        return Region(module=module, closed=True)
    shape, _ = graph.storage_tensor[next(iter(foreign))]
    return Region(
        violation=f"compute with another activation between them, of shape "
        f"{list(shape)}, whose gradient no rank would have in full"
    )


@dataclass(slots=True)
class _Features:
    """Split features between the layers of a group, and what computes with them.

    Attributes:
        split: Storages of the features.
        foreign: Storage of another activation that they meet, to whether only the
            entered module reads it.
        parameters: Indices of parameters that they meet.
        rows: Ops that read them.
    """

    split: set[int] = field(default_factory=set)
    foreign: dict[int, bool] = field(default_factory=dict)
    parameters: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)


def _follow(
    graph: OpGraph, flow: Flow, layers: Mapping[int, str], module: str, stop: int
) -> _Features:
    """Follow what colwise layers make, up to the rowwise layers and past them."""
    own = {graph.modules[row] for row in layers}
    found = _Features()
    for row in range(min(layers), stop):
        style, inputs = layers.get(row), graph.inputs[row]
        if style == "colwise":
            found.split.update(graph.outputs[row])
        if style is not None or found.split.isdisjoint(inputs):
            continue
        found.rows.add(row)
        inside = _inside(graph.modules[row], module)
        for storage in inputs:
            # A bias that is added apart belongs to its layer, and is split with it.
            if storage < 0 and graph.modules[row] not in own:
                found.parameters.add(-1 - storage)
            elif storage not in found.split and _counts(graph, flow, storage):
                found.foreign[storage] = found.foreign.get(storage, True) and inside
        made = (i for i in graph.outputs[row] if graph.storage_tensor[i][0])
        found.split.update(made)
    return found


def _used_elsewhere(graph: OpGraph, layers: Mapping[int, str]) -> str | None:
    """Name of a parameter of paired layers that another op reads; None if none does."""
    own = {i for row in layers for i in graph.inputs[row] if i < 0}
    for row in range(len(graph)):
        if row not in layers:
            shared = own.intersection(graph.inputs[row])
            if shared:
                return graph.parameters[-1 - shared.pop()].name
    return None


def _counts(graph: OpGraph, flow: Flow, storage: int) -> bool:
    """True for an activation whose gradient counts."""
    return (
        storage >= 0
        and storage not in flow.recomputable
        and storage not in graph.sources
        and "float" in graph.storage_tensor[storage][1]
    )


def _around(names: Collection[str]) -> str:
    """Innermost module that has all of the named ones in it."""
    first, *others = (name.split(".")[:-1] for name in names)
    while first and any(other[: len(first)] != first for other in others):
        first = first[:-1]
    return ".".join(first)


def _inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _is_closed(
    graph: OpGraph,
    flow: Flow,
    layers: Mapping[int, str],
    rows: Sequence[int],
    split: Collection[int],
) -> bool:
    """True if only sums and split features leave a module, or are used after its sums.

    Args:
        graph: All forward ops.
        flow: Data dependences.
        layers: Paired layers.
        rows: Ops of the module.
        split: Storages of split features.
    """
    inside = set(rows)
    after = {row for row, style in layers.items() if style == "rowwise"}
    for row in rows:
        reads = flow.reads[row]
        if row in after or not any(writer in after for writer, _ in reads):
            continue
        after.add(row)
        known = {storage for writer, storage in reads if writer in after}
        if any(i not in known and _counts(graph, flow, i) for i in graph.inputs[row]):
            return False
    return not any(
        writer in inside and writer not in after and storage not in split
        for row in range(rows[0], len(graph))
        if row not in inside
        for writer, storage in flow.reads[row]
        if _counts(graph, flow, storage)
    )


def _parameters_after(
    graph: OpGraph, layers: Mapping[int, str], rows: Sequence[int]
) -> bool:
    """True if ops of a module that follow its last sum read parameters."""
    last = max(row for row, style in layers.items() if style == "rowwise")
    return any(i < 0 for row in rows if row > last for i in graph.inputs[row])
