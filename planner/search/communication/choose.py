"""The algorithm of a sum over a group of ranks that is fastest on its links."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schema.send_tables import (
    SendTable,
    direct,
    halving,
    hierarchy,
    ring,
    tree,
)
from planner.search.communication.fractions import balanced_fractions
from planner.search.communication.orders import ring_order
from planner.simulate.send_tables import Network, table_seconds

__all__ = ["Choice", "candidates", "choose"]

IntArray = NDArray[np.int64]

#: Pieces of a tree that are tried: short messages want few.
_PIECES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm and its time.

    Attributes:
        algorithm: A key of :data:`planner.schema.send_tables.ALGORITHMS`.
        table: Its messages.
        seconds: Of the sum.
    """

    algorithm: str
    table: SendTable
    seconds: float


_Named = tuple[str, Callable[[], SendTable]]


def candidates(
    network: Network, domains: Sequence[IntArray], size_bytes: float
) -> Iterator[_Named]:
    """Yield the algorithms that are compared, with what makes their tables.

    Args:
        network: Of the ranks.
        domains: Host, then switch of each level, of each rank.
        size_bytes: Of the tensor.
    """
    n = network.ranks
    plain = list(range(n))
    order = ring_order(network, size_bytes / n)
    yield "ring", lambda: ring(order)
    yield "halving", lambda: halving(plain)
    for pieces in _PIECES:
        yield "tree", lambda pieces=pieces: tree(plain, pieces)  # type: ignore[misc]
    rates = np.where(np.eye(n, dtype=bool), 0.0, network.bandwidth).max(axis=1)
    for links in network.shared:
        if links.within is None and links.capacity is not None:
            members = np.bincount(links.domain)
            rates = np.minimum(rates, (links.capacity / members)[links.domain])
    yield "direct", lambda: direct([1 / n] * n)
    yield "direct", lambda: direct(list(balanced_fractions(list(rates))))
    levels = [level.tolist() for level in domains if 1 < len(set(level)) < n]
    for count in range(1, len(levels) + 1):
        yield (
            "hierarchy",
            lambda count=count: hierarchy(plain, levels[:count]),  # type: ignore[misc]
        )
        outer = np.unique(levels[count - 1], return_inverse=True)[1]
        sums = np.bincount(outer, weights=rates)
        parts = balanced_fractions(sums.tolist()).tolist()
        yield (
            "hierarchy",
            lambda count=count, parts=parts: hierarchy(  # type: ignore[misc]
                plain, levels[:count], parts
            ),
        )


def choose(network: Network, domains: Sequence[IntArray], size_bytes: float) -> Choice:
    """Return the fastest algorithm for a tensor, the first of equals.

    Args:
        network: Of the ranks.
        domains: As :func:`candidates`.
        size_bytes: Of the tensor.
    """
    best: Choice | None = None
    for name, make in candidates(network, domains, size_bytes):
        table = make()
        seconds = float(table_seconds(table, network, size_bytes))
        if best is None or seconds < best.seconds:
            best = Choice(algorithm=name, table=table, seconds=seconds)
    assert best is not None
    return best
