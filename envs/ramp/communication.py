"""Seconds of messages on RAMP, in the benchmark's own arithmetic.

The rate of a link is divided by the number of transceivers twice in a collective, and a
pair within one rack costs nothing: faults of the benchmark that a replay keeps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from envs.ramp.topology import RampTopology
from planner.simulate.compiled import compiled

__all__ = ["LinkRates", "collective_s", "link_rates", "message_s"]

#: FLOP/s of a server's reduction, bound by memory and at most. Source: the package's
#: paper, its RAMP environment; an A100's memory bandwidth of 2e12 B/s.
_MEMORY_BYTES_PER_S, _PEAK_FLOPS_PER_S = 2e12, 130e12


class LinkRates(NamedTuple):
    """Rates and shape of a topology, for compiled code.

    Attributes:
        racks: Of each group.
        servers: Of each rack.
        transceivers: Links of a server: as many as there are groups.
        link_bytes_per_s: Of one link.
        fixed_s: Of any message.
    """

    racks: int
    servers: int
    transceivers: int
    link_bytes_per_s: float
    fixed_s: float


def link_rates(topology: RampTopology) -> LinkRates:
    """Of a topology."""
    return LinkRates(
        racks=topology.racks,
        servers=topology.servers,
        transceivers=topology.groups,
        link_bytes_per_s=topology.bandwidth_bytes_per_s / topology.groups,
        fixed_s=topology.propagation_s + 2 * topology.input_output_s,
    )


@compiled
def message_s(size_bytes: float, rates: LinkRates) -> float:
    """Of one edge between two servers; of nothing, nothing."""
    if size_bytes == 0.0:
        return 0.0
    seconds: float = rates.fixed_s + size_bytes / rates.link_bytes_per_s
    return seconds


@compiled
def collective_s(
    size_bytes: float, groups: int, racks: int, servers: int, rates: LinkRates
) -> float:
    """A reduce-scatter and an all-gather over four subgroups in turn.

    Args:
        size_bytes: Sum over the edges of the collective.
        groups: How many communication groups it touches.
        racks: How many different racks, by their number in a group.
        servers: How many different servers, by their number in a rack.
        rates: Of the topology.
    """
    ways = rates.transceivers
    per_link = rates.link_bytes_per_s / ways
    sent, reduced, left = 0.0, 0.0, size_bytes
    for part in (groups, min(groups, servers), racks, -(-servers // ways)):
        left = math.ceil(left / part)
        if part > 1:
            rate = min(ways, ways // (part - 1)) * per_link
            sent += rates.fixed_s + left / rate
            ops = math.ceil(math.log2(part))
            speed = _MEMORY_BYTES_PER_S * ops / ((part + 1) * 2)
            reduced += ops * left / 2 / min(speed, _PEAK_FLOPS_PER_S)
    return 2 * sent + reduced
