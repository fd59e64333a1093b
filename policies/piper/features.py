"""What the network sees of a task: numbers of layers and of cuts, without units.

Times are relative to the mean layer and to a device's fair share, bytes to a device's
memory, places to the longest path: tasks of all sizes look alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.split import PiperTask
from planner.split.task import Array, Index, Mask, summed
from policies.piper.candidates import PLACES, Layout

__all__ = ["CUTS", "LAYERS", "WHOLE", "Observation", "observe"]

#: Names of the numbers of a task as a whole.
WHOLE = (
    "devices",
    "microbatches",
    "devices_by_microbatches",
    "layers",
    "degrees",
    "once",
    "each",
    "lightest_each",
    "fastest_memory",
    "traffic",
    "synchronising",
    "largest_layer",
    "largest_memory",
)

#: Names of the numbers of a layer, in their order.
LAYERS = (
    "work",
    "share",
    "gain_of_degrees",
    "weight",
    "once",
    "each",
    "lightest_each",
    "slower",
    "gives",
    "takes",
    "followers",
    "leaders",
    *PLACES,
    *WHOLE,
)

#: Names of the numbers of a suffix, in their order.
CUTS = (
    "work",
    "from_whole_devices",
    "layers",
    "once",
    "each",
    "moved",
    "moved_share",
    "crossing",
    "orders",
)

_FEW = 32  # devices, up to which it counts how whole their number is
_TINY = 1e-12


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Observation:
    """A task as the network reads it.

    Attributes:
        nodes: Shape [n, len(LAYERS)].
        edges: Producers and consumers. Shape [2, e].
        whole: Shape [len(WHOLE)].
        cuts: Shape [s, len(CUTS)].
        crossing: Part of each edge in what a suffix cuts; rows add up to 1, or to 0.
            Shape [s, e].
    """

    nodes: NDArray[np.float32]
    edges: Index
    whole: NDArray[np.float32]
    cuts: NDArray[np.float32]
    crossing: NDArray[np.float32]


@dataclass(frozen=True, eq=False, slots=True)
class _Amounts:
    """What layers take by their smallest degree and fastest option. Shapes [n]."""

    work: Array
    gain: Array
    weight: Array
    once: Array
    each: Array
    lightest: Array
    slower: Array
    held: Array


def _over(part: Array, whole: Array | float) -> Array:
    found: Array = part / np.maximum(whole, _TINY)
    return found


def _amounts(task: PiperTask) -> _Amounts:
    """By the smallest degree that a layer has; gains by the largest."""
    there: Mask = np.isfinite(task.time.min(axis=2))
    rows = np.arange(len(task))
    low = there.argmax(axis=1)
    high = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
    time, each = task.time[rows, low], task.memory_each[rows, low]
    once = task.memory_once[rows, low]
    fast = time.argmin(axis=1)
    light = np.where(np.isfinite(time), each, np.inf).argmin(axis=1)
    work = task.degrees[low] * time[rows, fast]
    far = task.degrees[high] * task.time[rows, high].min(axis=1)
    return _Amounts(
        work,
        np.where(far > 0, _over(work, far), 1.0),
        task.weight_bytes[rows, low, fast],
        once[rows, fast],
        each[rows, fast],
        each[rows, light],
        np.where(time[rows, fast] > 0, _over(time[rows, light], time[rows, fast]), 1.0),
        once[rows, fast] + each[rows, fast],
    )


def _whole(task: PiperTask, of: _Amounts) -> Array:
    devices, memory = task.devices, task.memory_bytes
    share = max(float(of.work.sum()) / devices, _TINY)
    room = devices * memory
    moved = 2 * float(task.edge_bytes.sum()) / task.bandwidth
    sync = 4 * float(of.weight.sum()) / task.microbatches / task.bandwidth
    return np.array(
        [
            np.log2(devices) / 8,
            np.log2(task.microbatches) / 12,
            np.log(devices / task.microbatches) / 4,
            np.log(len(task)) / 5,
            len(task.degrees) / 4,
            np.log(of.once.sum() / room + _TINY) / 4,
            np.log(of.each.sum() / room + _TINY) / 4,
            np.log(of.lightest.sum() / room + _TINY) / 4,
            np.log(of.held.sum() / memory + _TINY) / 4,
            np.log1p(moved / share / len(task)),
            np.log1p(sync / share),
            np.log1p(float(of.work.max()) / share),
            np.log(of.held.max() / memory + _TINY) / 4,
        ]
    )


def _nodes(task: PiperTask, layout: Layout, of: _Amounts, whole: Array) -> Array:
    n, share = len(task), max(float(of.work.sum()) / task.devices, _TINY)
    per_share = 2 / task.bandwidth / share
    columns = (
        np.log1p(_over(of.work, of.work.mean())),
        np.log1p(of.work / share),
        of.gain,
        np.log1p(_over(of.weight, of.weight.mean())),
        np.log1p(n * of.once / task.memory_bytes),
        np.log1p(n * of.each / task.memory_bytes),
        np.log1p(n * of.lightest / task.memory_bytes),
        of.slower,
        np.log1p(summed(task.edge_source, task.edge_bytes, n) * per_share),
        np.log1p(summed(task.edge_target, task.edge_bytes, n) * per_share),
        np.log1p(np.bincount(task.edge_source, minlength=n)),
        np.log1p(np.bincount(task.edge_target, minlength=n)),
    )
    every = np.tile(whole, (n, 1))
    return np.concatenate([np.stack(columns, axis=1), layout.places, every], axis=1)


def _cuts(task: PiperTask, layout: Layout, of: _Amounts, crossing: Array) -> Array:
    has = layout.has.astype(np.float64)
    share = max(float(of.work.sum()) / task.devices, _TINY)
    work = _over(has @ of.work, float(of.work.sum()))
    apart = np.abs(work * task.devices - np.round(work * task.devices))
    moved = crossing @ task.edge_bytes
    count = crossing.sum(axis=1)
    columns = (
        work,
        apart if task.devices <= _FEW else np.full(len(has), 0.25),
        has.mean(axis=1),
        _over(has @ of.once, float(of.once.sum())),
        _over(has @ of.each, float(of.each.sum())),
        np.log1p(2 * moved / task.bandwidth / share),
        np.log1p(_over(moved, moved.mean())),
        np.log1p(count),
        layout.share,
    )
    return np.stack(columns, axis=1)


def observe(task: PiperTask, layout: Layout) -> Observation:
    """The numbers of a task's layers and of where it may be cut.

    Args:
        task: What is planned.
        layout: Of its layers.
    """
    of = _amounts(task)
    whole = _whole(task, of)
    inside = layout.has.astype(np.bool_)
    over = inside[:, task.edge_target] & ~inside[:, task.edge_source]
    crossing = over.astype(np.float64)
    counts = np.maximum(crossing.sum(axis=1, keepdims=True), 1)
    return Observation(
        nodes=_nodes(task, layout, of, whole).astype(np.float32),
        edges=np.stack([task.edge_source, task.edge_target]),
        whole=whole.astype(np.float32),
        cuts=_cuts(task, layout, of, crossing).astype(np.float32),
        crossing=(crossing / counts).astype(np.float32),
    )
