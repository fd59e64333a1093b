"""Fewer meshes where there are too many to choose from, spread over all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.search.arranging.fleets import Choices

__all__ = ["subset", "thinned"]

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


def subset(choices: Choices, kept: Index) -> Choices:
    """Some of the choices, over the same fleets."""
    return Choices(
        fleets=choices.fleets, mesh=choices.mesh[kept], fleet=choices.fleet[kept]
    )
