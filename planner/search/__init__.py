"""Partitioners, which choose strategies, behind one protocol."""

from planner.search.base import (
    GROUP,
    OBJECTIVES,
    Candidate,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    expressible,
    get_partitioner,
    partitioner_names,
    preference,
    score,
)

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
