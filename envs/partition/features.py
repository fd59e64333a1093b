"""Features of a planning problem: numbers of order one, for any size of problem.

Everything is relative (to the fastest device, to the whole model) or a logarithm, so
that weights learned on small clusters mean the same on large ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.graph import ModelGraph
from planner.search import OBJECTIVES, Request
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.subsets import Choices
from planner.simulate.compiled import compiled

__all__ = [
    "FEATURE_VERSION",
    "GROUP_FEATURES",
    "MESH_FEATURES",
    "PAIR_FEATURES",
    "UNIT_FEATURES",
    "WHOLE_FEATURES",
    "Observed",
    "observe",
]

Array = NDArray[np.float32]
Index = NDArray[np.int64]
Wide = NDArray[np.float64]

#: Raised when the meaning of a number changes: other weights are then refused.
FEATURE_VERSION = 1

_KINDS = ("attention", "mlp", "expert", "conv", "embedding", "head", "norm")
#: Bytes of training state a scalar: weight, gradient and two states in float32.
_STATE_BYTES = 16.0

UNIT_FEATURES = 5 + len(_KINDS)
GROUP_FEATURES = 13
PAIR_FEATURES = 2
MESH_FEATURES = 30
WHOLE_FEATURES = 15


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observed:
    """A planning problem in numbers.

    Attributes:
        units: Features of the model's pipeline units. Shape [units, UNIT_FEATURES].
        unit_edges: Units that exchange tensors, both ways. Shape [2, edges].
        groups: Features of the groups of devices. Shape [groups, GROUP_FEATURES].
        group_edges: Each group and those it reaches fastest. Shape [2, edges].
        pairs: Log bandwidth and log latency between groups, the first higher for
            faster links, the second lower. Shape [groups, groups, PAIR_FEATURES].
        meshes: Features of the choices. Shape [choices, MESH_FEATURES].
        whole: Features of model, machines and request. Shape [WHOLE_FEATURES].
    """

    units: Array
    unit_edges: Index
    groups: Array
    group_edges: Index
    pairs: Array
    meshes: Array
    whole: Array


def _log(values: Wide | float, unit: float, scale: float = 1.0) -> Wide:
    """Decades above a unit, over ``scale``; 0 for values that are not positive."""
    array = np.asarray(values, dtype=float)
    decades = np.asarray(np.where(array > 0, array, unit))
    # In place, because there may be millions of pairs.
    decades /= unit
    np.log10(decades, out=decades)
    decades /= scale
    return decades


def _unit_features(graph: ModelGraph) -> tuple[Wide, Index]:
    blocks = graph.blocks
    owner = np.repeat(
        np.arange(len(graph.units)), [stop - start for start, stop in graph.units]
    )
    number = len(graph.units)

    def summed(name: str) -> Wide:
        values = np.array([getattr(block, name) or 0.0 for block in blocks], float)
        return np.bincount(owner, weights=values, minlength=number).astype(float)

    columns = []
    for name in ("forward_flops", "backward_flops", "parameter_count", "saved_bytes"):
        part = summed(name)
        columns.append(part / max(float(part.mean()), 1e-30))
    columns.append(_log(summed("boundary_bytes"), 1e6, 3.0))
    for kind in _KINDS:
        has = np.array([block.kind == kind for block in blocks], float)
        columns.append(np.minimum(np.bincount(owner, has, number), 1.0))
    pairs = {(int(owner[edge.source]), int(owner[edge.target])) for edge in graph.edges}
    chain = {(at, at + 1) for at in range(number - 1)}
    joined = sorted({(a, b) for a, b in pairs if a != b} | chain)
    edges = np.array(joined, dtype=np.int64).reshape(-1, 2).T
    return np.tanh(np.stack(columns, axis=1) / 3) * 3, np.concatenate(
        [edges, edges[::-1]], axis=1
    )


#: Nearest groups that a group is connected with.
_NEAREST = 12
#: Number of groups up to which links are sorted as in the training of the weights;
#: above it the nearest are selected, 50 times as fast. Equally near ones may differ.
_SORTED = 512


def _group_features(request: Request, groups: DeviceGroups) -> tuple[Wide, Index, Wide]:
    context = request.context
    types = context.cluster.device_types
    kinds, sizes = groups.kinds, groups.sizes.astype(float)
    # Hosts that were joined look as one of them does: weights know hosts.
    each = groups.host_sizes.astype(float)
    compute = context.precision.compute
    speed = np.array([peak_flops_per_s(kind, compute) for kind in types])[kinds]
    memory = np.array([kind.memory_bytes for kind in types])[kinds]
    moved = np.array([kind.memory_bandwidth_bytes_per_s for kind in types])[kinds]
    many = len(groups)
    bandwidth = _log(np.minimum(groups.bandwidth, 1e13), 1e9)
    latency = _log(np.maximum(groups.latency, 1e-7), 1e-5)
    pairs = np.stack([bandwidth / 2, latency / 2], axis=2)
    alone = np.eye(many, dtype=bool)
    others = np.where(alone, np.nan, bandwidth) if many > 1 else bandwidth
    waits = np.where(alone, np.nan, latency) if many > 1 else latency
    of_kind = np.array([sizes[kinds == kind].sum() for kind in kinds])
    columns = [
        np.log2(each) / 3,
        np.log2(speed / speed.max()),
        np.log2(memory / memory.max()),
        np.log2(moved / moved.max()),
        _log(memory, 1e10),
        np.where(each > 1, np.diagonal(bandwidth), 0.0) / 2,
        (each > 1).astype(float),
        np.nanmean(others, axis=1) / 2,
        np.nanmax(others, axis=1) / 2,
        np.nanmin(others, axis=1) / 2,
        np.nanmean(waits, axis=1) / 2,
        of_kind / sizes.sum(),
        np.log2(each / each.max()) / 3,
    ]
    near = _nearest(groups.seconds(), min(_NEAREST, many - 1))
    source = np.repeat(np.arange(many), near.shape[1])
    edges = np.stack([near.reshape(-1), source]) if many > 1 else np.zeros((2, 0))
    return np.stack(columns, axis=1), edges.astype(np.int64), pairs


def _nearest(seconds: Wide, most: int) -> Index:
    """Return the groups that each group reaches soonest. Shape [groups, most]."""
    np.fill_diagonal(seconds, np.inf)
    if len(seconds) <= _SORTED:
        return np.argsort(seconds, axis=1)[:, :most].astype(np.int64)
    near = np.empty((len(seconds), most), dtype=np.int64)
    _take_nearest(seconds, near)
    return near


@compiled
def _take_nearest(seconds: Wide, near: Index) -> None:
    """Fill in the columns with the least values of each row, the first of equal ones.

    The row itself fills up where fewer can be reached.
    """
    most = near.shape[1]
    least = np.empty(most)
    for row in range(len(seconds)):
        least[:] = np.inf
        near[row] = row
        for column in range(seconds.shape[1]):
            value, at = seconds[row, column], most
            while at > 0 and value < least[at - 1]:
                at -= 1
            if at == most:
                continue
            least[at + 1 :] = least[at : most - 1].copy()
            near[row, at + 1 :] = near[row, at : most - 1].copy()
            least[at], near[row, at] = value, column


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Sums over the model: FLOPs of a step, the others of a sample."""

    flops: float
    parameters: float
    saved: float
    stream: float


def _sums(request: Request) -> _Sums:
    graph = request.context.graph
    samples = request.global_batch / graph.batch
    flops = sum(block.forward_flops + block.backward_flops for block in graph.blocks)
    bounds = sorted(block.boundary_bytes for block in graph.blocks)
    return _Sums(
        flops=max(flops * samples, 1.0),
        parameters=float(max(sum(b.parameter_count for b in graph.blocks), 1)),
        saved=float(sum(block.saved_bytes for block in graph.blocks)) / graph.batch,
        stream=float(bounds[len(bounds) // 2]) / graph.batch if bounds else 0.0,
    )


def _subset_numbers(
    request: Request, groups: DeviceGroups, choices: Choices
) -> tuple[Wide, Wide]:
    """Describe the fastest devices of each subset, and its links.

    Returns:
        Speed of all as fast as the slowest, summed speed, and least memory, shape
        [subsets, 3]; and the median and the least bandwidth between groups in the best
        plain order, and that inside a group, shape [subsets, 3].
    """
    context = request.context
    types = context.cluster.device_types
    compute = context.precision.compute
    speed = np.array([peak_flops_per_s(kind, compute) for kind in types])
    memory = np.array([kind.memory_bytes for kind in types])
    power, links = [], []
    for subset in choices.subsets:
        ids = groups.orders(subset.sequences, subset.count)
        kinds = np.asarray(context.cluster.type_index)[ids]
        total = speed[kinds].min(axis=1) * subset.count
        best = int(total.argmax())
        used = kinds[best]
        power.append([total[best], speed[used].sum(), memory[used].min()])
        last = subset.sequences[-1]
        near = last[last >= 0]
        between = groups.bandwidth[near[:-1], near[1:]] if len(near) > 1 else [1e12]
        inside = np.median(np.minimum(np.diagonal(groups.bandwidth), 1e13)[near])
        links.append([float(np.median(between)), float(np.min(between)), inside])
    return np.array(power), np.array(links)


def _mesh_features(
    request: Request, groups: DeviceGroups, choices: Choices, sums: _Sums
) -> Wide:
    if not len(choices):
        return np.zeros((0, MESH_FEATURES))
    pp, replicate, shard, cp, tp, ep = choices.mesh.T.astype(float)
    power, links = _subset_numbers(request, groups, choices)
    slow, summed, least = power[choices.subset].T
    typical, worst, inside = links[choices.subset].T
    counts = np.array([subset.count for subset in choices.subsets], float)[
        choices.subset
    ]
    whole = np.array([subset.usable.all() for subset in choices.subsets])[
        choices.subset
    ]
    total, host = float(groups.sizes.sum()), float(np.median(groups.host_sizes))
    copies = replicate * shard
    batch = request.global_batch / copies
    compute = sums.flops / slow
    held = sums.parameters / (pp * tp)
    memory = least * request.context.memory_fraction
    wide = np.where(tp * cp > host, typical, inside)
    across = np.where(counts / pp > host, typical, inside)
    gradient = 8 * held / across
    tensor = 6 * sums.stream * request.global_batch / copies / wide * (tp > 1)
    units = len(request.context.graph.units)
    columns = [
        *(np.log2(axis) / 3 for axis in (pp, replicate, shard, cp, tp, ep)),
        np.log2(counts / total),
        np.log2(tp * cp / host) / 3,
        np.log2(counts / pp / host) / 3,
        np.log2(batch) / 3,
        np.log2(np.maximum(batch / pp, 1e-3)) / 3,
        np.log2(units / pp) / 3,
        (tp > 1).astype(float),
        (pp > 1).astype(float),
        (shard > 1).astype(float),
        (replicate > 1).astype(float),
        (cp > 1).astype(float),
        (ep > 1).astype(float),
        whole.astype(float),
        _log(_STATE_BYTES * held / memory, 1.0),
        _log(_STATE_BYTES * held / shard / memory, 1.0),
        _log(sums.saved / (pp * tp * cp) / memory, 1.0),
        np.log2(slow / power[:, 0].max()) / 2,
        np.log2(summed / power[:, 1].max()) / 2,
        _log(gradient / compute * (copies > 1), 1.0, 2.0),
        np.tanh(gradient / compute * (copies > 1)),
        np.tanh(tensor / compute),
        np.tanh((pp - 1) / np.maximum(batch, 1.0)),
        np.log2(np.maximum(counts % (tp * cp * host), 1)) / 6,
        _log(typical / worst, 1.0),
    ]
    return np.asarray(np.clip(np.stack(columns, axis=1), -6.0, 6.0))


def _whole_features(request: Request, groups: DeviceGroups, sums: _Sums) -> Wide:
    context = request.context
    graph, types = context.graph, context.cluster.device_types
    compute = context.precision.compute
    speed = np.array([peak_flops_per_s(kind, compute) for kind in types])[groups.kinds]
    memory = np.array([kind.memory_bytes for kind in types])[groups.kinds]
    power, room = float(speed @ groups.sizes), float(memory @ groups.sizes)
    objective = [float(request.objective == name) for name in OBJECTIVES]
    return np.array(
        [
            float(_log(sums.flops / power, 1.0, 2.0)),
            float(_log(sums.parameters, 1e9, 2.0)),
            float(_log(request.global_batch, 64.0)),
            float(_log(sums.saved, 1e9, 2.0)),
            float(_log(sums.stream, 1e7, 2.0)),
            float(_log(_STATE_BYTES * sums.parameters / room, 1.0)),
            np.log2(groups.sizes.sum()) / 5,
            np.log2(len(groups)) / 5,
            np.log2(len(graph.units)) / 5,
            float(graph.num_experts > 0),
            context.memory_fraction,
            float(request.devices == "any"),
            *objective,
        ]
    )


def observe(request: Request, groups: DeviceGroups, choices: Choices) -> Observed:
    """Compute the features of a request.

    Args:
        request: The request.
        groups: Groups of its devices.
        choices: Its meshes.
    """
    sums = _sums(request)
    units, unit_edges = _unit_features(request.context.graph)
    of_groups, group_edges, pairs = _group_features(request, groups)
    return Observed(
        units=units.astype(np.float32),
        unit_edges=unit_edges,
        groups=of_groups.astype(np.float32),
        group_edges=group_edges,
        pairs=pairs.astype(np.float32),
        meshes=_mesh_features(request, groups, choices, sums).astype(np.float32),
        whole=_whole_features(request, groups, sums).astype(np.float32),
    )
