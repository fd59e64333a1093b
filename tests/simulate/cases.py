"""Schedules of many shapes, for tests that hold for all."""

from __future__ import annotations

import itertools

from planner.schema import SCHEDULES
from planner.simulate import why_not

__all__ = ["legal"]


def legal(
    pps: tuple[int, ...], virtuals: tuple[int, ...], microbatches: tuple[int, ...]
) -> list[tuple[str, int, int, int]]:
    """Every legal (schedule, pp, virtual_stages, num_microbatches) of a grid."""
    grid = itertools.product(SCHEDULES, pps, virtuals, microbatches)
    return [case for case in grid if why_not(*case) is None]
