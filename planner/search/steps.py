"""Searches in small steps: generators that pause between steps and return a result.

A race (:mod:`planner.search.race`) deals its time out step by step, so that a search
that pauses often uses no more than its share.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

__all__ = ["Steps", "completed"]

T = TypeVar("T")

#: A search that pauses after each step and returns its result at the end.
Steps = Generator[None, None, T]


def completed(steps: Steps[T]) -> T:
    """Run all steps of a search without a pause, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
