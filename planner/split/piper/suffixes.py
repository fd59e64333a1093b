"""Suffixes of a graph of layers: sets that hold with a layer all that come after it.

A stage is what a suffix has and a smaller one inside it lacks. Of each such pair, and
of each suffix, there are bounds on what its stages take whatever options are chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from planner.simulate.compiled import compiled
from planner.split.ideals import Words
from planner.split.linear import depth_first, order_by_priority
from planner.split.piper.stage import Flags, Layers, layers_of
from planner.split.piper.task import PiperTask
from planner.split.task import Array, Index, precedence

__all__ = [
    "Suffixes",
    "all_suffixes",
    "chain_of",
    "draw_orders",
    "least_work",
    "rows_of",
    "tables_of",
]


class Suffixes(NamedTuple):
    """Suffixes, smaller ones first, and the pairs of them that are stages.

    Attributes:
        has: 1 for each layer of a suffix. Shape [s, n].
        start: Where the pairs of a smaller suffix start. Shape [s + 1].
        whole: The larger suffix of each pair. Shape [p].
        moved: Fewest bytes that a stage moves, by degree. Shape [p, t].
        time: Least time of a suffix's layers, by degree. Shape [s, t].
        weight: Fewest bytes of theirs to synchronise. Shape [s, t].
        each: Fewest bytes for each microbatch in flight. Shape [s, t].
        once: Fewest bytes besides. Shape [s, t].
        lacking: How many of its layers have no option of a degree. Shape [s, t].
        before: Least time x devices of all other layers. Shape [s].
    """

    has: Flags
    start: Index
    whole: Index
    moved: Array
    time: Array
    weight: Array
    each: Array
    once: Array
    lacking: Index
    before: Array


def all_suffixes(task: PiperTask, most: int) -> list[int] | None:
    """All suffixes, as bits; None if there are more than ``most``."""
    n = len(task)
    after = [0] * n
    for u, v in zip(task.edge_source.tolist(), task.edge_target.tolist(), strict=True):
        after[u] |= 1 << v
    seen, found = {0}, [0]
    for suffix in found:
        for v in range(n):
            grown = suffix | 1 << v
            if not suffix >> v & 1 and after[v] & ~suffix == 0 and grown not in seen:
                seen.add(grown)
                found.append(grown)
                if len(found) > most:
                    return None
    return found


def chain_of(order: Index) -> list[int]:
    """The suffixes of an order of all layers, producers first, as bits. Shape [n]."""
    found = [0]
    for node in reversed(order.tolist()):
        found.append(found[-1] | 1 << node)
    return found


def draw_orders(task: PiperTask, count: int, seed: int = 0) -> list[Index]:
    """Orders of the layers, producers first: depth first, then others by chance."""
    graph = precedence(task.edge_source, task.edge_target, len(task))
    rng = np.random.default_rng(seed)
    chances = (rng.random(len(graph)) for _ in range(count - 1))
    others = [order_by_priority(graph, chance) for chance in chances]
    return [depth_first(graph, reverse=False), *others]


def _words(has: Flags) -> Words:
    """Rows of zeros and ones as 64-bit words. Shape [s, words]."""
    wide = np.zeros((len(has), -(-has.shape[1] // 64) * 64), dtype=np.uint8)
    wide[:, : has.shape[1]] = has
    return np.packbits(wide, axis=1, bitorder="little").view(np.uint64)


@compiled
def _count_pairs(words: Words, start: Index) -> None:
    """Fill in where the pairs of each smaller suffix start. Shape [s + 1]."""
    count, width = words.shape
    for j in range(count):
        found = 0
        for i in range(j + 1, count):
            inside = True
            for k in range(width):
                if words[j, k] & ~words[i, k]:
                    inside = False
                    break
            if inside:
                found += 1
        start[j + 1] = start[j] + found


@compiled
def _fill_pairs(words: Words, start: Index, whole: Index) -> None:
    count, width = words.shape
    for j in range(count):
        at = start[j]
        for i in range(j + 1, count):
            inside = True
            for k in range(width):
                if words[j, k] & ~words[i, k]:
                    inside = False
                    break
            if inside:
                whole[at] = i
                at += 1


@compiled
def _fill_moved(
    layers: Layers, has: Flags, start: Index, whole: Index, least: Array, moved: Array
) -> None:
    """Fill in the fewest bytes that stages move; ``least`` is by edge and degree."""
    degrees = moved.shape[1]
    for rest in range(len(has)):
        for p in range(start[rest], start[rest + 1]):
            for v in range(has.shape[1]):
                if has[whole[p], v] == has[rest, v]:
                    continue
                for i in range(layers.touch_start[v], layers.touch_start[v + 1]):
                    far = layers.touch[i]
                    if has[whole[p], far] == has[rest, far]:
                        for t in range(degrees):
                            moved[p, t] += least[i, t]


def _least(task: PiperTask, values: Array) -> Array:
    """Of each layer and degree, over options there are; 0 if none. Shape [n, t]."""
    there = np.isfinite(task.time)
    found: Array = np.where(there, values, np.inf).min(axis=2)
    return np.where(np.isfinite(found), found, 0.0)


def rows_of(suffixes: Iterable[int], n: int) -> Flags:
    """Suffixes of ``n`` layers as rows, smaller ones first. Shape [s, n]."""
    ordered = sorted(suffixes, key=lambda bits: (bits.bit_count(), bits))
    width = -(-n // 8)
    packed = b"".join(bits.to_bytes(width, "little") for bits in ordered)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(-1, width)
    return np.unpackbits(rows, axis=1, count=n, bitorder="little").astype(np.int8)


def least_work(task: PiperTask) -> Array:
    """Least time x devices of each layer. Shape [n]."""
    least = task.time.min(axis=2) * task.degrees
    found: Array = least.min(axis=1)
    return found


def tables_of(
    task: PiperTask, has: Flags, most_bytes: float = np.inf
) -> Suffixes | None:
    """Tables of some suffixes, among them the empty one and that of all layers.

    Args:
        task: Whose layers.
        has: 1 for each layer of a suffix, smaller ones first. Shape [s, n].
        most_bytes: Of memory.

    Returns:
        The tables; None if they are larger.
    """
    degrees = len(task.degrees)
    words, start = _words(has), np.zeros(len(has) + 1, dtype=np.int64)
    _count_pairs(words, start)
    pairs = int(start[-1])
    if pairs * 8 * (1 + degrees) > most_bytes:
        return None
    whole = np.empty(pairs, dtype=np.int64)
    _fill_pairs(words, start, whole)
    layers = layers_of(task)
    moved = np.zeros((pairs, degrees))
    _fill_moved(layers, has, start, whole, layers.moved.min(axis=2), moved)
    every = has.astype(np.float64)
    lacking = ~np.isfinite(task.time).any(axis=2)
    work = least_work(task)
    return Suffixes(
        has=has,
        start=start,
        whole=whole,
        moved=moved,
        time=every @ _least(task, task.time),
        weight=every @ _least(task, task.weight_bytes),
        each=every @ _least(task, task.memory_each),
        once=every @ _least(task, task.memory_once),
        lacking=has.astype(np.int64) @ lacking.astype(np.int64),
        before=work.sum() - every @ work,
    )
