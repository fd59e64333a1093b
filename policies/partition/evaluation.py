"""Compare a partitioner with others on the same worlds, each with the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from envs.partition.graphs import GraphStore
from envs.partition.world import World
from planner.errors import StrategyError
from planner.search import Partitioner, Request
from planner.search.base import score

__all__ = ["Compared", "Pair", "compare", "summarise"]

#: Ratios closer to 1 than this count as neither won nor lost.
_EVEN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Scores on one world.

    Attributes:
        world: Name of the world.
        kind: Kind of the world.
        score: Score of the partitioner under test; infinite if it found nothing that
            fits.
        others: Scores of the others, by name.
    """

    world: str
    kind: str
    score: float
    others: dict[str, float]

    @property
    def ratio(self) -> float | None:
        """Score over the best of the others; None unless both found a plan."""
        best = min(self.others.values())
        if math.isfinite(self.score) and math.isfinite(best):
            return self.score / best
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Comparison on the worlds of one kind.

    Attributes:
        kind: Kind of the worlds.
        worlds: Number of worlds.
        ratio: Geometric mean of the ratios; below 1 is better than the others. None
            if there is no ratio.
        low: Lower end of its 95 % interval, from a normal distribution of the
            logarithms; None with fewer than two ratios.
        high: Upper end of the interval.
        wins: Worlds with a smaller score than the best of the others.
        losses: Worlds with a larger one.
    """

    kind: str
    worlds: int
    ratio: float | None
    low: float | None
    high: float | None
    wins: int
    losses: int


def compare(
    worlds: Iterable[World],
    judged: Partitioner,
    others: Sequence[Partitioner],
    *,
    budget_s: float,
    graphs: GraphStore | None = None,
    watch: Callable[[], None] | None = None,
) -> list[Pair]:
    """Plan worlds with a partitioner and with others.

    Args:
        worlds: Problems.
        judged: The partitioner under test.
        others: At least one.
        budget_s: Seconds that each of them has for a world, not counting reading it.
        graphs: Store of model graphs.
        watch: Called after each world.

    Raises:
        StrategyError: If the time is not a number of seconds, or there are no others.
    """
    if not 0 <= budget_s < math.inf:
        raise StrategyError(f"budget_s={budget_s} is not a number of seconds from 0 on")
    if not others:
        raise StrategyError("there is nobody to compare with; name a partitioner")
    found = []
    for world in worlds:
        request = replace(world.request(graphs), time_budget_s=budget_s)
        found.append(
            Pair(
                world=world.name,
                kind=world.kind,
                score=_best(judged, request),
                others={one.name: _best(one, request) for one in others},
            )
        )
        if watch is not None:
            watch()
    return found


def _best(partitioner: Partitioner, request: Request) -> float:
    result = partitioner.search(request)
    if not result.candidates:
        return math.inf
    best = result.candidates[0]
    return score(best.cost, best.strategy.mesh.num_devices, request.objective)


def summarise(pairs: Sequence[Pair]) -> list[Compared]:
    """Summarise by kind, in the order in which the kinds occur."""
    return [
        _of_kind(kind, [pair for pair in pairs if pair.kind == kind])
        for kind in dict.fromkeys(pair.kind for pair in pairs)
    ]


def _of_kind(kind: str, pairs: Sequence[Pair]) -> Compared:
    logs = [math.log(pair.ratio) for pair in pairs if pair.ratio is not None]
    mean = fmean(logs) if logs else None
    low = high = None
    if mean is not None and len(logs) > 1:
        half = 1.96 * stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(mean - half), math.exp(mean + half)
    best = [min(pair.others.values()) for pair in pairs]
    return Compared(
        kind=kind,
        worlds=len(pairs),
        ratio=None if mean is None else math.exp(mean),
        low=low,
        high=high,
        wins=sum(
            pair.score < other * (1 - _EVEN)
            for pair, other in zip(pairs, best, strict=True)
        ),
        losses=sum(
            other < pair.score * (1 - _EVEN)
            for pair, other in zip(pairs, best, strict=True)
        ),
    )
