"""Messages of our own for the sums of a chosen plan, where links are unlike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.cost.traffic.tables import reached_network
from planner.schema.buckets import BUCKET_BYTES
from planner.schema.strategy import Communication
from planner.search.base import Candidate, Request, score
from planner.search.communication.choose import choose
from planner.simulate.send_tables import Network
from planner.space import OWN_TARGETS

__all__ = ["with_own_sums"]

#: Ranks of the largest group: a ring of n has 2 n (n - 1) messages.
_MOST_RANKS = 128
#: What our own messages must save of a step, or the library's are kept.
_LEAST_GAIN = 0.01


def with_own_sums(request: Request, candidate: Candidate) -> Candidate:
    """Return a candidate whose replicas sum gradients as suits their links.

    It is the same one where links are alike, where the library is as fast, and where
    nothing of our own can run: only plain replicas are summed by send tables.

    Args:
        request: What was asked.
        candidate: The best one.
    """
    strategy = candidate.strategy
    copies = strategy.mesh.dp_replicate * strategy.mesh.cp
    asked = request.context.regime.communication
    if (
        request.target not in OWN_TARGETS
        or asked.replicas.algorithm != "library"
        or not strategy.may_use_own_buckets
        or strategy.gradient_compression != "none"
        or not 2 <= copies <= _MOST_RANKS
    ):
        return candidate
    context = request.context.reordered(np.array(strategy.device_ids()))
    (network,) = context.networks(copies, 1)
    if _is_even(network):
        return candidate
    devices = context.order
    domains = [level[devices] for level in context.cluster.topology.domains]
    reached = reached_network(network, context.link_shares)
    found = choose(reached, domains, BUCKET_BYTES).collective
    assert found is not None
    communication = Communication(boundary=asked.boundary, replicas=found)
    regime = replace(context.regime, communication=communication)
    other = strategy.model_copy(update={"communication": communication})
    cost = CostModel(replace(context, regime=regime)).cost(other)
    figure = [
        score(one, strategy.mesh.num_devices, request.objective)
        for one in (cost, candidate.cost)
    ]
    if not cost.fits or figure[0] > (1 - _LEAST_GAIN) * figure[1]:
        return candidate
    return Candidate(strategy=other, cost=cost)


def _is_even(network: Network) -> bool:
    """Return True if all ranks of a host, and all hosts, have the same links."""
    off = ~np.eye(network.ranks, dtype=bool)
    slowest = np.where(off, network.bandwidth, np.inf).min(axis=1)
    fastest = np.where(off, network.bandwidth, 0.0).max(axis=1)
    return bool(np.ptp(slowest) == 0 and np.ptp(fastest) == 0)
