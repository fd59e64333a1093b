"""Suffixes that a pipeline may be cut at: those along a few orders of the layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.split import PiperTask, order_by_priority
from planner.split.piper.stage import Flags
from planner.split.task import Array, Graph, Index, Mask, precedence
from policies.split.features import both_ways, walks
from policies.split.orders import sample_orders

__all__ = ["MOST", "PLACES", "Layout", "distinct", "lay_out", "neighbours_of"]

#: Suffixes at most, however many orders there are; those of one order in any case.
MOST = 400

#: Names of a layer's places.
PLACES = (
    "level_down",
    "level_up",
    "path_down",
    "path_up",
    "depth_first",
    "depth_first_back",
    "first_come",
)

_DRAWN = 16  # orders, besides the four that are always there
_STEEP = 30.0  # log odds from the first to the last of a priority


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """A task's layers in their places, and where it may be cut.

    Attributes:
        places: Of each layer, 0 to 1. Shape [n, len(PLACES)].
        has: 1 for each layer of a suffix; the smallest ones first, from the empty one
            to that of all layers. Shape [s, n].
        share: Of the orders, that each suffix is of. Shape [s].
    """

    places: Array
    has: Flags
    share: Array


def lay_out(task: PiperTask, seed: int = 0) -> Layout:
    """Put a task's layers in orders.

    Four are always the same (depth first from either side, longest paths from either
    end); if they differ, others are drawn that keep near to them.

    Args:
        task: Whose layers.
        seed: Of the orders drawn.
    """
    n = len(task)
    graph = precedence(task.edge_source, task.edge_target, n)
    first = order_by_priority(graph, np.zeros(n))
    levels = both_ways(graph, first, np.ones(n))
    paths = both_ways(graph, first, task.time.min(axis=(1, 2)))
    steps = walks(graph, first)
    priors = np.stack([-steps[0], -steps[1], -paths[0], paths[1]])
    orders = _orders(graph, priors, np.random.default_rng(seed))
    has, share = _suffixes(orders)
    places = np.stack([*levels, *paths, *steps], axis=1)
    return Layout(places=places, has=has, share=share)


def _orders(graph: Graph, priors: Array, rng: np.random.Generator) -> Index:
    own = np.stack([order_by_priority(graph, prior) for prior in priors])
    if (own == own[0]).all():
        return own
    scores = np.tile(_STEEP * priors, (_DRAWN // len(priors), 1))
    return np.concatenate([own, sample_orders(graph, scores, rng)[0]])


def _suffixes(orders: Index) -> tuple[Flags, Array]:
    """Those of some orders, and the share of the orders that each is of."""
    count, n = orders.shape
    place = np.empty_like(orders)
    np.put_along_axis(place, orders, np.tile(np.arange(n), (count, 1)), axis=1)
    cuts = np.arange(n, -1, -1)
    has = (place[:, None, :] >= cuts[None, :, None]).reshape(-1, n)
    at, times = _first_of_each(has)
    if len(at) > MOST:
        # Orders that are always there come first. The first one has both ends.
        kept = np.argsort(at, kind="stable")[: max(MOST, n + 1)]
        at, times = at[kept], times[kept]
    found = has[at]
    by_size = np.argsort(found.sum(axis=1), kind="stable")
    return found[by_size].astype(np.int8), times[by_size] / count


def _first_of_each(has: Mask) -> tuple[Index, Index]:
    """Where each row is first, and how often it is there."""
    packed = np.ascontiguousarray(np.packbits(has, axis=1))
    rows = packed.view(np.dtype((np.void, packed.shape[1])))[:, 0]
    _, at, times = np.unique(rows, return_index=True, return_counts=True)
    return at, times


def distinct(has: Flags) -> Flags:
    """Each suffix once, smaller ones first. Shape [s, n]."""
    found = has[_first_of_each(has.astype(np.bool_))[0]]
    return found[np.argsort(found.sum(axis=1), kind="stable")]


def neighbours_of(task: PiperTask, has: Flags) -> Flags:
    """Suffixes that have one layer more or less than some of these. Shape [s, n].

    Args:
        task: Whose layers.
        has: 1 for each layer of a suffix. Shape [s, n].
    """
    inside = has.astype(np.bool_).T
    lacks, keeps = np.zeros(inside.shape), np.zeros(inside.shape)
    np.add.at(lacks, task.edge_source, ~inside[task.edge_target])
    np.add.at(keeps, task.edge_target, inside[task.edge_source])
    may = np.where(inside, keeps, lacks) == 0
    nodes, rows = np.nonzero(may)
    made = has[rows]
    made[np.arange(len(rows)), nodes] ^= 1
    return made
