"""Lines of sums by send tables, in place of a communication library's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.traffic.collectives import LinkShares
from planner.schema.buckets import BUCKET_BYTES
from planner.schema.send_tables import SendTable
from planner.simulate.send_tables import Network, table_seconds

__all__ = ["reached_network", "table_lines"]


def reached_network(network: Network, shares: LinkShares) -> Network:
    """Return a network at the rates that transfers reach of it."""
    shared = tuple(
        links
        if links.capacity is None
        else replace(links, capacity=shares.reached(links.capacity))
        for links in network.shared
    )
    return replace(network, bandwidth=shares.reached(network.bandwidth), shared=shared)


def table_lines(
    table: SendTable, network: Network, step_s: float = 0.0
) -> NDArray[np.float64]:
    """Two equal lines in the size of a bucket, as of a library's two algorithms.

    A table's time bends upwards with the size: the line from nothing to a bucket of 25
    MiB lies above it everywhere between.

    Args:
        table: An all-reduce.
        network: At the rates that are reached.
        step_s: Seconds of host work that each step takes.
    Returns:
        Fixed seconds and seconds per byte. Shape [2, 2].
    """
    none, bucket = table_seconds(table, network, [0.0, BUCKET_BYTES])
    line = (none + table.steps * step_s, (bucket - none) / BUCKET_BYTES)
    return np.array([line, line])
