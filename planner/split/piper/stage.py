"""What a stage of a Piper task takes by its degrees and by what it keeps in flight.

A stage runs its layers on t x d devices. A sample takes of it the layers' times and
transfers over d, and its share of the weights' synchronisation. With s the sum of the
data-parallel degrees from this stage to the last one, ceil(s / d) microbatches are in
flight. Source: Tarnawski et al. 2021 (Piper), section 3; the factor 4 of the
synchronisation is the parameter server's of Narayanan et al. 2019 (PipeDream).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.simulate.compiled import compiled, inlined
from planner.split.piper.task import PiperTask
from planner.split.task import Array, Index

__all__ = ["Flags", "Layers", "layers_of", "members", "stage_time"]

Flags = NDArray[np.int8]

_LEAST = 1e-9  # bytes that count as memory saved


class Layers(NamedTuple):
    """A task in the form compiled code takes; see :class:`PiperTask`.

    Attributes:
        time: Shape [n, t, o].
        weight: Shape [n, t, o].
        each: Shape [n, t, o].
        once: Shape [n, t, o].
        touch_start: Where a layer's edges start in ``touch``. Shape [n + 1].
        touch: The layer at the other end. Shape [2 e].
        moved: Bytes that such an edge moves by degree and option of the layer, both
            ways, if the other end is in another stage. Shape [2 e, t, o].
        memory: Bytes of a device.
        bandwidth: Bytes by unit of time.
        microbatches: In a batch.
    """

    time: Array
    weight: Array
    each: Array
    once: Array
    touch_start: Index
    touch: Index
    moved: Array
    memory: float
    bandwidth: float
    microbatches: float


def layers_of(task: PiperTask) -> Layers:
    """The task's arrays."""
    near = np.concatenate([task.edge_source, task.edge_target])
    far = np.concatenate([task.edge_target, task.edge_source])
    moved = np.concatenate([task.sync_out, task.sync_in])
    moved += np.concatenate([task.edge_bytes, task.edge_bytes])[:, None, None]
    order = np.argsort(near, kind="stable")
    counts = np.bincount(near, minlength=len(task))
    return Layers(
        time=task.time,
        weight=task.weight_bytes,
        each=task.memory_each,
        once=task.memory_once,
        touch_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        touch=far[order].astype(np.int64),
        moved=2 * moved[order],
        memory=float(task.memory_bytes),
        bandwidth=float(task.bandwidth),
        microbatches=float(task.microbatches),
    )


@inlined
def members(whole: Flags, rest: Flags, inside: Flags, nodes: Index) -> int:
    """The layers of the stage between two suffixes.

    Args:
        whole: 1 for each layer of the larger one. Shape [n].
        rest: Likewise of the smaller one. Shape [n].
        inside: Filled in with 1 for each layer of the stage. Shape [n].
        nodes: Filled in with its layers. Shape [n].

    Returns:
        How many there are.
    """
    count = 0
    for v in range(len(whole)):
        inside[v] = whole[v] - rest[v]
        if inside[v]:
            nodes[count] = v
            count += 1
    return count


@compiled
def _lighter(
    cost: Array, held: Array, nodes: Index, chosen: Index, excess: float
) -> tuple[int, int]:
    """The change of an option that buys memory at the least time; (-1, -1) if none."""
    least, node, option = np.inf, -1, -1
    for v in nodes:
        for o in range(cost.shape[1]):
            saved = held[v, chosen[v]] - held[v, o]
            if saved > _LEAST and cost[v, o] < np.inf:
                price = (cost[v, o] - cost[v, chosen[v]]) / min(saved, excess)
                if price < least:
                    least, node, option = price, v, o
    return node, option


@compiled
def _choose_options(
    cost: Array, held: Array, nodes: Index, memory: float, chosen: Index
) -> float:
    """Least time of a stage in its memory, and the option of each layer.

    From the fastest options on, the change that saves memory at the least time is made
    until all fits. This is what the paper does (appendix C, where it is seldom found
    not to be the optimum), and what its optima are of.

    Args:
        cost: Time by layer and option, infinite where there is none. Shape [n, o].
        held: Bytes likewise. Shape [n, o].
        nodes: The stage's layers.
        memory: Bytes there are.
        chosen: Filled in with the options. Shape [n].

    Returns:
        The time; infinite if nothing fits.
    """
    total, needed = 0.0, 0.0
    for v in nodes:
        lightest = np.inf
        chosen[v] = 0
        for o in range(cost.shape[1]):
            if cost[v, o] < cost[v, chosen[v]]:
                chosen[v] = o
            if cost[v, o] < np.inf:
                lightest = min(lightest, held[v, o])
        total += held[v, chosen[v]]
        needed += lightest
    if total > memory:
        if needed > memory:
            return np.inf
        excess = total - memory
        while excess > _LEAST:
            node, option = _lighter(cost, held, nodes, chosen, excess)
            if node < 0:
                return np.inf
            excess -= held[node, chosen[node]] - held[node, option]
            chosen[node] = option
    time = 0.0
    for v in nodes:
        time += cost[v, chosen[v]]
    return time


@compiled
def stage_time(
    layers: Layers,
    inside: Flags,
    nodes: Index,
    t: int,
    d: int,
    flight: int,
    cost: Array,
    held: Array,
    chosen: Index,
) -> float:
    """Time per sample of a stage; infinite if it does not fit.

    Args:
        layers: Of the task.
        inside: 1 for each layer of the stage. Shape [n].
        nodes: Its layers. Where one has no option of the degree the time is infinite.
        t: Place of the tensor-parallel degree.
        d: Data-parallel degree.
        flight: Microbatches in flight.
        cost: Filled in with times by layer and option. Shape [n, o].
        held: Filled in with bytes likewise. Shape [n, o].
        chosen: Filled in with the layers' options. Shape [n].
    """
    bandwidth = layers.bandwidth
    share = 4 * (d - 1) / d / layers.microbatches
    for v in nodes:
        for o in range(cost.shape[1]):
            moved = 0.0
            for i in range(layers.touch_start[v], layers.touch_start[v + 1]):
                if not inside[layers.touch[i]]:
                    moved += layers.moved[i, t, o]
            moving = (moved / d + share * layers.weight[v, t, o]) / bandwidth
            cost[v, o] = moving + layers.time[v, t, o] / d
            held[v, o] = layers.each[v, t, o] * flight + layers.once[v, t, o]
    return float(_choose_options(cost, held, nodes, layers.memory, chosen))
