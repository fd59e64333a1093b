"""The fastest pipeline of a Piper task: dynamic programming over suffixes.

For a time per sample asked for, the fewest devices that reach it are found for every
suffix of the graph (a set of layers with all that come after them) and every sum of
data-parallel degrees; the least time is found by bisection. Source: Tarnawski et al.
2021 (Piper), section 4, where the table holds times for numbers of devices instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.simulate.compiled import compiled
from planner.split.piper import PiperTask
from planner.split.piper_stage import Layers, choose_options, layers_of, stage_parts
from planner.split.task import Array, Index, Mask, NodeId

__all__ = ["PiperPlan", "PiperStage", "solve_piper"]

_TABLE_BYTES = 1_500_000_000
_ORDERS = 16  # whose suffixes are looked at where there are too many
_MANY = np.iinfo(np.int32).max // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperStage:
    """Layers that run together.

    Attributes:
        nodes: Their ids.
        data_parallel: Replicas.
        tensor_parallel: Devices of a replica.
        options: Name of the option by layer.
    """

    nodes: tuple[NodeId, ...]
    data_parallel: int
    tensor_parallel: int
    options: dict[NodeId, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperPlan:
    """A pipeline.

    Attributes:
        time_per_sample: Of the slowest stage, in the task's unit; infinite if nothing
            fits, and then there are no stages.
        stages: From the first one on.
        exact: Whether all suffixes were looked at; otherwise those along some orders.
    """

    time_per_sample: float
    stages: tuple[PiperStage, ...]
    exact: bool


def _suffixes(task: PiperTask, most: int) -> list[int] | None:
    """Sets of layers with all that come after, as bits; None if more than ``most``."""
    n = len(task)
    after, before = [0] * n, [0] * n
    for u, v in zip(task.edge_source.tolist(), task.edge_target.tolist(), strict=True):
        after[u] |= 1 << v
        before[v] |= 1 << u
    seen, found = {0}, [0]
    for suffix in found:
        for v in range(n):
            grown = suffix | 1 << v
            if not suffix >> v & 1 and after[v] & ~suffix == 0 and grown not in seen:
                seen.add(grown)
                found.append(grown)
                if len(found) > most:
                    return None
    return sorted(found, key=lambda bits: (bits.bit_count(), bits))


def _chain(task: PiperTask, rng: np.random.Generator | None) -> list[int]:
    """The suffixes of one order: depth first, or by chance."""
    n = len(task)
    waits = np.bincount(task.edge_target, minlength=n)
    ready = np.flatnonzero(waits == 0).tolist()
    order = []
    while ready:
        node = ready.pop(-1 if rng is None else int(rng.integers(len(ready))))
        order.append(node)
        for after in task.edge_target[task.edge_source == node]:
            waits[after] -= 1
            if waits[after] == 0:
                ready.append(int(after))
    found = [0]
    for node in reversed(order):
        found.append(found[-1] | 1 << node)
    return found


def _some_suffixes(task: PiperTask, orders: int) -> list[int]:
    """Those of a few orders, together."""
    found = set(_chain(task, None))
    for seed in range(1, orders):
        found.update(_chain(task, np.random.default_rng(seed)))
    return sorted(found, key=lambda bits: (bits.bit_count(), bits))


def _matrix(suffixes: list[int], n: int) -> Mask:
    return np.array(
        [[bits >> v & 1 for v in range(n)] for bits in suffixes], dtype=bool
    )


@compiled
def _pairs(suffixes: Mask) -> Index:
    """Pairs of a suffix and a smaller one inside it. Shape [pairs, 2]."""
    count, n = suffixes.shape
    found = []
    for i in range(count):
        for j in range(i):
            inside = True
            for v in range(n):
                if suffixes[j, v] and not suffixes[i, v]:
                    inside = False
                    break
            if inside:
                found.append((i, j))
    pairs = np.empty((len(found), 2), dtype=np.int64)
    for k in range(len(found)):
        pairs[k, 0], pairs[k, 1] = found[k]
    return pairs


@compiled
def _stage_time(
    layers: Layers,
    inside: Mask,
    t: int,
    d: int,
    flight: int,
    limits: Array,
    chosen: Index,
) -> float:
    """Time per sample of a stage; infinite if it does not fit.

    Args:
        limits: Bytes of memory, bandwidth and microbatches. Shape [3].
        chosen: Filled in with the layers' options. Shape [n].
    """
    n, options = layers.time.shape[0], layers.time.shape[2]
    moved, cost, held = np.empty((3, n, options))
    if not stage_parts(layers, inside, t, moved, cost):
        return np.inf
    nodes = np.flatnonzero(inside)
    for v in nodes:
        for o in range(options):
            sync = 4 * (d - 1) * cost[v, o] / d / limits[2]
            moving = (moved[v, o] / d + sync) / limits[1]
            cost[v, o] = moving + layers.time[v, t, o] / d
            held[v, o] = layers.each[v, t, o] * flight + layers.once[v, t, o]
    return float(choose_options(cost, held, nodes, limits[0], chosen))


@compiled
def _fewest(
    layers: Layers,
    suffixes: Mask,
    pairs: Index,
    degrees: Index,
    replicas: Index,
    columns: Index,
    limits: Array,
    devices: int,
    asked: float,
    least: Array,
    known: Array,
    fewest: Index,
    took: Index,
) -> int:
    """Fewest devices of all layers; by suffix and sum of degrees in ``fewest``.

    Args:
        replicas: Data-parallel degrees that may be. Shape [d].
        columns: Where those of a degree start in ``known``; column ``columns[d] + y``
            is of y microbatches in flight. Shape [d + 1].
        asked: Time per sample.
        least: Time by pair, degree and replicas with memory without end; NaN where not
            yet known. Shape [pairs, t, d].
        known: Time by pair, degree and column likewise. Shape [pairs, t, columns].
        fewest: Filled in. Shape [suffixes, sums + 1].
        took: Filled in with pair, degree and replicas. Shape [suffixes, sums + 1, 3].
    """
    sums, chosen = fewest.shape[1] - 1, np.empty(suffixes.shape[1], dtype=np.int64)
    endless = np.array([np.inf, limits[1], limits[2]])
    fewest[:] = _MANY
    fewest[0] = 0
    for k in range(len(pairs)):
        whole, rest = pairs[k]
        inside = suffixes[whole] & ~suffixes[rest]
        for t in range(len(degrees)):
            for r in range(len(replicas)):
                d = replicas[r]
                if np.isnan(least[k, t, r]):
                    least[k, t, r] = _stage_time(
                        layers, inside, t, d, 1, endless, chosen
                    )
                uses = degrees[t] * d
                if least[k, t, r] > asked or uses > devices:
                    continue
                for s in range(d, sums + 1):
                    if fewest[rest, s - d] + uses >= fewest[whole, s]:
                        continue
                    flight = (s + d - 1) // d
                    at = columns[r] + flight
                    if np.isnan(known[k, t, at]):
                        known[k, t, at] = _stage_time(
                            layers, inside, t, d, flight, limits, chosen
                        )
                    if known[k, t, at] == np.inf:
                        break
                    if known[k, t, at] <= asked:
                        fewest[whole, s] = fewest[rest, s - d] + uses
                        took[whole, s] = np.array([k, t, r])
    return int(fewest[len(suffixes) - 1].min())


class _Solver:
    """Tables of one task, kept between the times asked for."""

    def __init__(self, task: PiperTask, suffixes: Mask, pairs: Index) -> None:
        self.task, self.suffixes, self.pairs = task, suffixes, pairs
        self.layers = layers_of(task)
        self.sums = min(task.microbatches, task.devices)
        self.replicas, self.columns = _replicas(task)
        self.limits = np.array([task.memory_bytes, task.bandwidth, task.microbatches])
        shape = (len(pairs), len(task.degrees))
        self.least = np.full((*shape, len(self.replicas)), np.nan)
        self.known = np.full((*shape, int(self.columns[-1])), np.nan)
        self.fewest = np.zeros((len(suffixes), self.sums + 1), dtype=np.int64)
        self.took = np.full((*self.fewest.shape, 3), -1, dtype=np.int64)

    def reaches(self, asked: float) -> bool:
        """Whether the devices are enough for a time per sample."""
        need = _fewest(
            self.layers,
            self.suffixes,
            self.pairs,
            self.task.degrees,
            self.replicas,
            self.columns,
            self.limits,
            self.task.devices,
            asked,
            self.least,
            self.known,
            self.fewest,
            self.took,
        )
        return need <= self.task.devices

    def plan(self, exact: bool) -> PiperPlan:
        """What the last time that was reached is reached with."""
        at = len(self.suffixes) - 1
        s, slowest, stages = int(self.fewest[at].argmin()), 0.0, []
        chosen = np.zeros(len(self.task), dtype=np.int64)
        while at:
            k, t, r = (int(x) for x in self.took[at, s])
            d, rest = int(self.replicas[r]), int(self.pairs[k, 1])
            inside = self.suffixes[at] & ~self.suffixes[rest]
            flight = -(-s // d)
            slowest = max(
                slowest,
                _stage_time(self.layers, inside, t, d, flight, self.limits, chosen),
            )
            members = np.flatnonzero(inside).tolist()
            ids, names = self.task.nodes, self.task.option_names
            stages.append(
                PiperStage(
                    nodes=tuple(ids[v] for v in members),
                    data_parallel=d,
                    tensor_parallel=int(self.task.degrees[t]),
                    options={ids[v]: names[v][t][chosen[v]] for v in members},
                )
            )
            at, s = rest, s - d
        return PiperPlan(time_per_sample=slowest, stages=tuple(stages), exact=exact)


def _replicas(task: PiperTask) -> tuple[Index, Index]:
    """Data-parallel degrees that may be, and where each one's columns start."""
    sums = min(task.microbatches, task.devices)
    found = [d for d in range(1, sums + 1) if task.microbatches % d == 0]
    replicas = np.array(found, dtype=np.int64)
    widths = -(-sums // replicas) + 1
    return replicas, np.concatenate([[0], np.cumsum(widths)]).astype(np.int64)


def _tables(task: PiperTask, most: int) -> tuple[Mask, Index, bool]:
    """Suffixes and pairs that fit in memory, and whether they are all there are."""
    replicas, columns = _replicas(task)
    row_bytes = 8 * len(task.degrees) * (int(columns[-1]) + len(replicas))
    every = _suffixes(task, most)
    if every is not None:
        suffixes = _matrix(every, len(task))
        pairs = _pairs(suffixes)
        if len(pairs) * row_bytes <= _TABLE_BYTES:
            return suffixes, pairs, True
    orders = _ORDERS
    while True:
        suffixes = _matrix(_some_suffixes(task, orders), len(task))
        pairs = _pairs(suffixes)
        if orders == 1 or len(pairs) * row_bytes <= _TABLE_BYTES:
            return suffixes, pairs, False
        orders //= 2


def solve_piper(task: PiperTask, *, most_suffixes: int = 4000) -> PiperPlan:
    """The pipeline of least time per sample.

    Args:
        task: What is planned.
        most_suffixes: Of graphs with more, those along some orders are looked at.
    """
    suffixes, pairs, exact = _tables(task, most_suffixes)
    solver = _Solver(task, suffixes, pairs)
    low = float(task.time.min(axis=(1, 2)).sum()) / max(task.devices, 1) / 2
    if not solver.reaches(np.finfo(np.float64).max):
        return PiperPlan(time_per_sample=np.inf, stages=(), exact=exact)
    best = solver.plan(exact)
    while best.time_per_sample > low * (1 + 1e-12):
        asked = (low + best.time_per_sample) / 2
        if solver.reaches(asked):
            best = solver.plan(exact)
        else:
            low = asked
    return best
