"""Partitioners, which choose strategies, behind one protocol."""

from planner.search.base import (
    OBJECTIVES,
    Candidate,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    preference,
    said,
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
    "get_partitioner",
    "partitioner_names",
    "preference",
    "said",
    "score",
]
