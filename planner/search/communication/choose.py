"""The algorithm of a sum over a group of ranks that is fastest on its links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.schema.send_tables import SendTable
from planner.schema.strategy_parts import Collective
from planner.search.communication.fractions import balanced_fractions
from planner.search.communication.orders import ring_order
from planner.simulate.send_tables import Network, table_seconds

__all__ = ["Choice", "candidates", "choose", "choose_for_all"]

IntArray = NDArray[np.int64]

#: Pieces of a tree that are tried: short messages want few.
_PIECES = (1, 4, 16)
#: Pieces of direct sums and hierarchies, and messages of the longest table of them.
_PIPED, _MOST_MESSAGES = (1, 8), 2**12


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
    levels = [level.tolist() for level in domains if 1 < len(set(level.tolist())) < n]
    # With domains, sums between ranks of all of them are many messages for little.
    if not levels or n * (n - 1) <= _MOST_MESSAGES:
        for parts in ((), *_unlike_parts(network, np.arange(n))):
            for pieces in _pieces(2 * n * (n - 1)):
                yield Collective(algorithm="direct", parts=parts, pieces=pieces)
    for count in range(1, len(levels) + 1):
        own = tuple(map(tuple, levels[:count]))
        yield Collective(algorithm="hierarchy", domains=own)
        # Domains come in the order of their first ranks.
        _, first, outer = np.unique(
            levels[count - 1], return_index=True, return_inverse=True
        )
        place = np.argsort(np.argsort(first))[outer]
        for parts in _unlike_parts(network, place):
            for pieces in _pieces(2 * n * len(parts)):
                yield Collective(
                    algorithm="hierarchy", domains=own, parts=parts, pieces=pieces
                )


def _pieces(messages: int) -> tuple[int, ...]:
    """Numbers of pieces to try for a table of so many messages a piece."""
    return tuple(one for one in _PIPED if one == 1 or one * messages <= _MOST_MESSAGES)


def _unlike_parts(network: Network, domain: IntArray) -> list[tuple[float, ...]]:
    """Return parts of domains by their bandwidth, none where ranks are alike.

    Args:
        network: Of the ranks.
        domain: Of each rank, from 0. Shape [ranks].
    """
    found: list[tuple[float, ...]] = []
    for rates in (_rates(network), _interfaces(network)):
        sums = np.asarray(np.bincount(domain, weights=rates), dtype=np.float64)
        if not np.isfinite(sums).all():
            continue
        if np.ptp(sums) or len(sums) < len(domain):
            parts = tuple(balanced_fractions(sums.tolist()).tolist())
            if parts not in found:
                found.append(parts)
    return found


def _interfaces(network: Network) -> NDArray[np.float64]:
    """Bytes/s of what ranks share with others to send outside; infinite if nothing."""
    rates = np.full(network.ranks, np.inf)
    for links in network.shared:
        if links.within is None and links.capacity is not None:
            each = links.capacity / np.bincount(links.domain)
            rates = np.minimum(rates, each[links.domain])
    return rates


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


def choose(network: Network, domains: Sequence[IntArray], size_bytes: float) -> Choice:
    """Return the fastest algorithm for a tensor, the first of equals.

    Args:
        network: Of the ranks.
        domains: As :func:`candidates`.
        size_bytes: Of the tensor.
    """
    return choose_for_all([network], [domains], size_bytes)


def choose_for_all(
    networks: Sequence[Network],
    domains: Sequence[Sequence[IntArray]],
    size_bytes: float,
) -> Choice:
    """Return the algorithm whose slowest group is fastest, the first of equals.

    Args:
        networks: Of groups of equally many ranks, which sum at the same time.
        domains: As :func:`candidates`, of each group.
        size_bytes: Of each group's tensor.
    """
    best: Choice | None = None
    seen: set[Collective] = set()
    for network, places in zip(networks, domains, strict=True):
        for collective in candidates(network, places, size_bytes):
            if collective in seen:
                continue
            seen.add(collective)
            table = collective.table(network.ranks)
            seconds = max(
                float(table_seconds(table, each, size_bytes)) for each in networks
            )
            if best is None or seconds < best.seconds:
                best = Choice(collective=collective, table=table, seconds=seconds)
    assert best is not None
    return best
