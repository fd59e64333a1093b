"""Schedules of many shapes, for tests that hold for all."""

from __future__ import annotations

import itertools

from planner.schema.schedules import schedule_names, schedule_spec

__all__ = ["legal", "violation"]


def violation(schedule: str, *sizes: int) -> str | None:
    """Why torch refuses sizes (pp, virtual, microbatches); None if it does not."""
    return schedule_spec(schedule).violation(*sizes)


def legal(
    pps: tuple[int, ...], virtuals: tuple[int, ...], microbatches: tuple[int, ...]
) -> list[tuple[str, int, int, int]]:
    """Every legal (schedule, pp, virtual_stages, num_microbatches) of a grid."""
    grid = itertools.product(schedule_names(), pps, virtuals, microbatches)
    return [case for case in grid if violation(*case) is None]
