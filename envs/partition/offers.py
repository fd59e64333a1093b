"""Fewer meshes where there are too many to choose from, spread over all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.search import Request
from planner.search.arranging.fleets import Choices
from planner.space import MESH_COLUMNS, expand_meshes

__all__ = ["subset", "thinned", "with_rows"]

Index = NDArray[np.int64]


def _shares(many: Index, most: int) -> Index:
    """How many of each fleet are kept: equal shares, what one leaves goes on. [n]."""
    share = np.zeros(len(many), dtype=np.int64)
    left = most
    while left > 0 and (open_ := np.flatnonzero(share < many)).size:
        each = max(1, left // len(open_))
        for fleet in open_.tolist():
            more = min(each, int(many[fleet] - share[fleet]), left)
            share[fleet] += more
            left -= more
    return share


def thinned(choices: Choices, among: Index, most: int) -> Index:
    """Some choices that stand for many: of every fleet, evenly over its meshes.

    Meshes of a fleet are in the order of their degrees, so that what is kept of them
    ranges from the shallowest pipeline to the deepest. The same choices always give the
    same ones.

    Args:
        choices: All meshes.
        among: Those to keep some of, ascending. Shape [n].
        most: How many to keep; with fewer than there are fleets, the first fleets
            keep one each.
    Returns:
        Shape [min(n, most)], ascending.
    """
    if len(among) <= most:
        return among
    fleet = choices.fleet[among]
    numbers, many = np.unique(fleet, return_counts=True)
    kept = []
    for number, share in zip(numbers, _shares(many, most).tolist(), strict=True):
        mine = among[fleet == number]
        kept.append(mine[np.linspace(0, len(mine) - 1, share).round().astype(int)])
    return np.sort(np.concatenate(kept))


def with_rows(request: Request, choices: Choices) -> Index:
    """Choices of which some strategy is legal, ascending. Shape [n].

    Of meshes whose degrees divide what they must, the other rules refuse a half or
    more: they would take the place of what may be chosen.
    """
    kept = []
    for number in range(len(choices.fleets)):
        mine = np.flatnonzero(choices.fleet == number)
        table = expand_meshes(choices.mesh[mine], request.facts, request.pins)
        rows = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
        both = np.concatenate([np.unique(rows, axis=0), choices.mesh[mine]])
        _, which = np.unique(both, axis=0, return_inverse=True)
        which = which.reshape(-1)
        many = len(both) - len(mine)
        kept.append(mine[np.isin(which[many:], which[:many])])
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)


def subset(choices: Choices, kept: Index) -> Choices:
    """Some of the choices, over the same fleets."""
    return Choices(
        fleets=choices.fleets, mesh=choices.mesh[kept], fleet=choices.fleet[kept]
    )
