"""Messages between pipeline stages that tp ranks share, where that shortens a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.cost import CostModel
from planner.schema import Strategy
from planner.schema.violations import executor_violations
from planner.search.base import Candidate, Request, score
from planner.space import OWN_TARGETS

__all__ = ["with_shared_boundaries"]

#: What scattered messages must save of a step, or stages send all that they hold.
_LEAST_GAIN = 0.01
#: Candidates that are tried, none of which is this much worse than the first.
_MOST_CANDIDATES, _WORSE = 4, 1.25


def with_shared_boundaries(request: Request, ranked: Sequence[Candidate]) -> Candidate:
    """Return the best candidate, whose stages scatter what they send if that is faster.

    It is the first one unless ``communication.boundary = "scattered"`` makes it, or one
    of the next, 1 % faster. Scattered messages are tried where tp ranks hold the same
    and a message between stages crosses hosts, and where the executors can run them.

    Args:
        request: What was asked.
        ranked: Candidates, the one to choose first; at least one.
    """
    first = ranked[0]
    if (
        request.target not in OWN_TARGETS
        or request.objective == "memory"
        or request.context.regime.communication.boundary != "direct"
    ):
        return first
    best, least = first, (1 - _LEAST_GAIN) * _figure(request, first)
    worst = _WORSE * _figure(request, first)
    tried = [
        one
        for one in ranked
        if one.cost.fits
        and _figure(request, one) <= worst
        and _crosses_hosts(request, one.strategy)
    ]
    for candidate in tried[:_MOST_CANDIDATES]:
        found = _scattered(request, candidate)
        if found is not None and _figure(request, found) < least:
            best, least = found, _figure(request, found)
    return best


def _figure(request: Request, candidate: Candidate) -> float:
    devices = candidate.strategy.mesh.num_devices
    return score(candidate.cost, devices, request.objective)


def _crosses_hosts(request: Request, strategy: Strategy) -> bool:
    """Return True if tp ranks hold the same and send it to stages of other hosts."""
    mesh = strategy.mesh
    if mesh.pp == 1 or mesh.tp == 1 or strategy.sharding.sequence_parallel:
        return False
    hosts = np.asarray(request.context.cluster.host_of_device)
    stages = hosts[np.array(strategy.device_ids())].reshape(mesh.pp, -1)
    # The last stage sends to the first where ranks hold several.
    return bool((stages != np.roll(stages, 1, axis=0)).any())


def _scattered(request: Request, candidate: Candidate) -> Candidate | None:
    """Return a candidate with scattered messages; None if they cannot be used."""
    strategy = candidate.strategy
    communication = strategy.communication.model_copy(update={"boundary": "scattered"})
    other = strategy.model_copy(update={"communication": communication})
    if set(executor_violations(other)) - set(executor_violations(strategy)):
        return None
    context = request.context.reordered(np.array(strategy.device_ids()))
    regime = replace(context.regime, communication=communication)
    cost = CostModel(replace(context, regime=regime)).cost(other)
    return Candidate(strategy=other, cost=cost) if cost.fits else None
