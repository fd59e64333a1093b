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

from planner.simulate.compiled import compiled
from planner.split.piper import PiperTask
from planner.split.task import Array, Index, Mask

__all__ = ["Layers", "choose_options", "layers_of", "stage_parts"]


class Layers(NamedTuple):
    """A task in the form compiled code takes; see :class:`PiperTask`."""

    time: Array
    weight: Array
    each: Array
    once: Array
    source: Index
    target: Index
    moved: Array
    sync_in: Array
    sync_out: Array


def layers_of(task: PiperTask) -> Layers:
    """The task's arrays."""
    return Layers(
        time=task.time,
        weight=task.weight_bytes,
        each=task.memory_each,
        once=task.memory_once,
        source=task.edge_source,
        target=task.edge_target,
        moved=task.edge_bytes,
        sync_in=task.sync_in,
        sync_out=task.sync_out,
    )


@compiled
def stage_parts(
    layers: Layers, inside: Mask, t: int, divided: Array, weight: Array
) -> bool:
    """What of a stage's time shrinks with its data-parallel degree, and its weights.

    Args:
        layers: Of the task.
        inside: Which layers the stage has. Shape [n].
        t: Place of the tensor-parallel degree.
        divided: Filled in with bytes moved by layer and option. Shape [n, o].
        weight: Filled in with bytes synchronised. Shape [n, o].

    Returns:
        Whether all layers have an option of that degree.
    """
    n, options = divided.shape
    for v in range(n):
        if inside[v]:
            some = False
            for o in range(options):
                divided[v, o] = 0.0
                weight[v, o] = layers.weight[v, t, o]
                some = some or layers.time[v, t, o] < np.inf
            if not some:
                return False
    for e in range(len(layers.source)):
        u, v = layers.source[e], layers.target[e]
        if inside[u] == inside[v]:
            continue
        for o in range(options):
            if inside[v]:
                divided[v, o] += 2 * (layers.moved[e] + layers.sync_in[e, t, o])
            else:
                divided[u, o] += 2 * (layers.moved[e] + layers.sync_out[e, t, o])
    return True


@compiled
def _lighter(
    cost: Array, held: Array, nodes: Index, chosen: Index, excess: float
) -> tuple[int, int]:
    """The change of an option that buys memory at the least time; (-1, -1) if none."""
    least, node, option = np.inf, -1, -1
    for v in nodes:
        for o in range(cost.shape[1]):
            saved = held[v, chosen[v]] - held[v, o]
            if saved > 1e-9 and cost[v, o] < np.inf:
                price = (cost[v, o] - cost[v, chosen[v]]) / min(saved, excess)
                if price < least:
                    least, node, option = price, v, o
    return node, option


@compiled
def choose_options(
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
        while excess > 1e-9:
            node, option = _lighter(cost, held, nodes, chosen, excess)
            if node < 0:
                return np.inf
            excess -= held[node, chosen[node]] - held[node, option]
            chosen[node] = option
    time = 0.0
    for v in nodes:
        time += cost[v, chosen[v]]
    return time
