"""Partitioners, which choose strategies, behind one protocol."""

from planner.search.base import (
    OBJECTIVES,
    Candidate,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    expressible,
    preference,
    score,
)
from planner.search.registry import GROUP, get_partitioner, partitioner_names

__all__ = [
    "GROUP",
    "OBJECTIVES",
    "Candidate",
    "Objective",
    "Partitioner",
    "Request",
    "SearchResult",
    "expressible",
    "get_partitioner",
    "partitioner_names",
    "preference",
    "score",
]
