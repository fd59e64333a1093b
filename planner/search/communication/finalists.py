"""Messages of our own for the sums of a chosen plan, where links are unlike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cost import CostModel, PricingContext
from planner.cost.traffic.tables import reached_network
from planner.schema import Communication, Strategy
from planner.schema.buckets import BUCKET_BYTES
from planner.schema.violations import executor_violations
from planner.search.base import Candidate, Request, score, scores_of
from planner.search.communication.choose import choose_for_all
from planner.search.refine import candidates_of_row
from planner.simulate.send_tables import Network
from planner.space import OWN_TARGETS, enumerate_strategies
from planner.units import dtype_bytes

__all__ = ["with_own_sums"]

IntArray = NDArray[np.int64]

#: Ranks of the largest group: a ring of n has 2 n (n - 1) messages.
_MOST_RANKS = 128
#: What our own messages must save of a step, or the library's are kept.
_LEAST_GAIN = 0.01
#: Times that links of one level are faster than those of the next where libraries'
#: algorithms leave much to others.
_UNLIKE = 4.0
#: Share of the library's seconds that messages of our own take at best, about: a ring
#: sends everything twice past its slowest link, which one rank must do once.
_BEST_SHARE = 0.5
#: Candidates, and rows of the space, for which messages are looked for.
_MOST_CANDIDATES, _MOST_ROWS = 2, 2


def with_own_sums(request: Request, ranked: Sequence[Candidate]) -> Candidate:
    """Return the best candidate, whose copies sum gradients as suits their links.

    It is the first one where links are alike, where the library is as fast, and where
    nothing of our own can run. Otherwise candidates whose copies may sum by send tables
    are compared, and strategies that the library's sums had kept from being any.

    Args:
        request: What was asked.
        ranked: Candidates, the one to choose first; at least one.
    """
    first, context = ranked[0], request.context
    regime, precision = context.regime, context.precision
    if (
        request.target not in OWN_TARGETS
        or regime.synchronisation.apart
        or not precision.parameter == precision.reduce == "float32"
        or regime.communication.replicas.algorithm != "library"
        or regime.gradient_compression != "none"
        or any(context.cluster.topology.aggregates)
        or _is_even(context.cluster)
    ):
        return first
    best, seen = first, set()
    least = (1 - _LEAST_GAIN) * _figure(request, first)
    for candidate in _promising(request, ranked, least):
        label = candidate.strategy.label()
        if label in seen or _without_sums(request, candidate) >= least:
            continue
        seen.add(label)
        found = _summed(request, candidate)
        if found is None or _figure(request, found) >= least:
            continue
        # Not by caution alone.
        if request.objective == "memory" or _seconds(found) < _seconds(first):
            best, least = found, _figure(request, found)
    return best


def _is_even(cluster: Cluster) -> bool:
    """Return True if all hosts have the same links to all others, about."""
    if not cluster.topology.has_equal_links:
        return False
    rates = [level.link.bandwidth_bytes_per_s for level in cluster.document.levels]
    return not rates or _UNLIKE * min(rates) > max(rates)


def _seconds(candidate: Candidate) -> float:
    """Step of a candidate over the efficiency of its samples."""
    return candidate.cost.step_time_s / candidate.cost.efficiency


def _figure(request: Request, candidate: Candidate) -> float:
    devices = candidate.strategy.mesh.num_devices
    return score(candidate.cost, devices, request.objective)


def _without_sums(request: Request, candidate: Candidate) -> float:
    """Figure of a candidate if keeping copies alike took no time."""
    cost = candidate.cost
    seconds = cost.step_time_s - cost.breakdown_s.get("data_parallel", 0.0)
    freed = replace(cost, step_time_s=seconds)
    return _figure(request, replace(candidate, cost=freed))


def _may_sum(strategy: Strategy) -> bool:
    return (
        strategy.may_sum_by_table
        and strategy.gradient_compression == "none"
        and 2 <= strategy.copies <= _MOST_RANKS
    )


def _promising(
    request: Request, ranked: Sequence[Candidate], least: float
) -> Iterator[Candidate]:
    """Yield candidates that may be faster by other sums, and such rows of the space."""
    found: list[tuple[float, int, Candidate]] = []
    for one in ranked:
        if one.cost.fits and _may_sum(one.strategy):
            figure, without = _figure(request, one), _without_sums(request, one)
            hope = figure - (1 - _BEST_SHARE) * (figure - without)
            if hope < least:
                found.append((hope, len(found), one))
    yield from (one for *_, one in sorted(found)[:_MOST_CANDIDATES])
    if request.objective != "memory":
        yield from _rows(request, least)


def _rows(request: Request, least: float) -> Iterator[Candidate]:
    """Yield candidates of the rows with copies that look best with faster sums."""
    context = request.context
    model = CostModel(replace(context, sum_share=_BEST_SHARE))
    found: list[tuple[float, int, dict[str, int]]] = []
    for table in enumerate_strategies(
        request.facts, num_devices=len(context.order), pins=request.pins
    ):
        copies = table.dp_replicate * np.where(table.zero_stage > 0, 1, table.cp)
        table = table[(copies > 1) & (copies <= _MOST_RANKS)]
        if not len(table):
            continue
        figures = scores_of(model.table(table), table, request.objective)
        for row in np.argsort(figures)[:_MOST_ROWS].tolist():
            if figures[row] < least:
                found.append((float(figures[row]), len(found), table.row(row)))
    exact = CostModel(context)
    for _, _, row in sorted(found)[:_MOST_ROWS]:
        for candidate in candidates_of_row(exact, row, most=1, limits=None):
            if candidate.cost.fits and _may_sum(candidate.strategy):
                yield candidate


def _summed(request: Request, candidate: Candidate) -> Candidate | None:
    """Return a candidate with the sums that suit its links; None if it does not fit."""
    strategy = candidate.strategy
    context = request.context.reordered(np.array(strategy.device_ids()))
    ways = strategy.mesh.shards if strategy.zero_stage else 1
    stride = ways * strategy.mesh.tp
    networks, domains = _distinct(context, strategy.copies, stride)
    size = float(BUCKET_BYTES)
    if not strategy.has_plain_replicas:
        scalars = context.graph.num_parameters / stride / len(context.graph.units)
        size = min(size, scalars * dtype_bytes(strategy.precision.reduce))
    found = choose_for_all(networks, domains, size).collective
    assert found is not None
    asked = context.regime.communication
    summed = [
        _priced(
            context, strategy, asked.model_copy(update={"replicas": found, **order})
        )
        for order in ({}, {"buckets": "needed"})
    ]
    plain, ahead = summed
    if not _may_run_ahead(plain, ahead):
        ahead = plain
    shorter = ahead.cost.step_time_s <= (1 - _LEAST_GAIN) * plain.cost.step_time_s
    best = ahead if shorter else plain
    return best if best.cost.fits else None


def _priced(
    context: PricingContext, strategy: Strategy, communication: Communication
) -> Candidate:
    regime = replace(context.regime, communication=communication)
    other = strategy.model_copy(update={"communication": communication})
    cost = CostModel(replace(context, regime=regime)).cost(other)
    return Candidate(strategy=other, cost=cost)


def _may_run_ahead(plain: Candidate, ahead: Candidate) -> bool:
    """Return True if weights of a candidate can be updated bucket by bucket."""
    before = set(executor_violations(plain.strategy))
    return not set(executor_violations(ahead.strategy)) - before


def _distinct(
    context: PricingContext, copies: int, stride: int
) -> tuple[list[Network], list[list[IntArray]]]:
    """Return unlike networks of the groups that sum, and the domains of their ranks."""
    groups = context.axis_groups(copies, stride)
    levels = context.cluster.topology.domains
    found: dict[bytes, tuple[Network, list[IntArray]]] = {}
    networks = context.networks(copies, stride)
    for group, network in zip(groups, networks, strict=True):
        domains = [level[group] for level in levels]
        even = [np.unique(one, return_inverse=True)[1] for one in domains]
        key = b"".join(
            np.ascontiguousarray(one).tobytes()
            for one in (network.bandwidth, network.latency, *even)
        )
        if key not in found:
            found[key] = (reached_network(network, context.link_shares), domains)
    pairs = list(found.values())
    return [network for network, _ in pairs], [domains for _, domains in pairs]
