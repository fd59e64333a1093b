"""Division of a fleet of unlike machines into members that train one model apart."""

from planner.search.federation.balance import balance, cut_evenly
from planner.search.federation.genetic import (
    GeneticResult,
    Nodes,
    genetic_search,
    spread_of,
)
from planner.search.federation.segments import (
    Division,
    SegmentPricer,
    best_divisions,
    divide,
)

__all__ = [
    "Division",
    "GeneticResult",
    "Nodes",
    "SegmentPricer",
    "balance",
    "best_divisions",
    "cut_evenly",
    "divide",
    "genetic_search",
    "spread_of",
]
