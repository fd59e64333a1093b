"""The algorithm of a sum over a group of ranks that is fastest on its links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schema.send_tables import SendTable
from planner.schema.strategy import Collective
from planner.search.communication.fractions import balanced_fractions
from planner.search.communication.orders import ring_order
from planner.simulate.send_tables import Network, table_seconds

__all__ = ["Choice", "candidates", "choose"]

IntArray = NDArray[np.int64]

#: Pieces of a tree that are tried: short messages want few.
_PIECES = (1, 4, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm and its time.

    Attributes:
        collective: The algorithm; None of a table that was found for the topology.
        table: Its messages.
        seconds: Of the sum.
    """

    collective: Collective | None
    table: SendTable
    seconds: float


def candidates(
    network: Network, domains: Sequence[IntArray], size_bytes: float
) -> Iterator[Collective]:
    """Yield the algorithms that are compared.

    Args:
        network: Of the ranks.
        domains: Host, then switch of each level, of each rank.
        size_bytes: Of the tensor.
    """
    n = network.ranks
    order = tuple(ring_order(network, size_bytes / n))
    yield Collective(algorithm="ring", order=() if order == tuple(range(n)) else order)
    yield Collective(algorithm="halving")
    for pieces in _PIECES:
        yield Collective(algorithm="tree", pieces=pieces)
    yield Collective(algorithm="direct")
    rates = _rates(network)
    if np.ptp(rates):
        yield Collective(algorithm="direct", parts=_parts(rates))
    levels = [level.tolist() for level in domains if 1 < len(set(level.tolist())) < n]
    for count in range(1, len(levels) + 1):
        own = tuple(map(tuple, levels[:count]))
        yield Collective(algorithm="hierarchy", domains=own)
        outer = np.unique(levels[count - 1], return_inverse=True)[1]
        sums = np.asarray(np.bincount(outer, weights=rates), dtype=np.float64)
        yield Collective(algorithm="hierarchy", domains=own, parts=_parts(sums))


def _rates(network: Network) -> NDArray[np.float64]:
    """Bytes/s that each rank sends to all others at a time. Shape [ranks]."""
    n = network.ranks
    off = ~np.eye(n, dtype=bool)
    rates = (n - 1) / np.where(off, 1 / network.bandwidth, 0.0).sum(axis=1)
    for links in network.shared:
        if links.within is None and links.capacity is not None:
            members = np.bincount(links.domain)
            rates = np.minimum(rates, (links.capacity / members)[links.domain])
    return np.asarray(rates)


def _parts(rates: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(balanced_fractions(rates.tolist()).tolist())


def choose(network: Network, domains: Sequence[IntArray], size_bytes: float) -> Choice:
    """Return the fastest algorithm for a tensor, the first of equals.

    Args:
        network: Of the ranks.
        domains: As :func:`candidates`.
        size_bytes: Of the tensor.
    """
    best: Choice | None = None
    for collective in candidates(network, domains, size_bytes):
        table = collective.table(network.ranks)
        seconds = float(table_seconds(table, network, size_bytes))
        if best is None or seconds < best.seconds:
            best = Choice(collective=collective, table=table, seconds=seconds)
    assert best is not None
    return best
