"""Exact action order of every registered pipeline schedule."""

from __future__ import annotations

from functools import lru_cache

from planner.errors import StrategyError
from planner.plugins import load_object
from planner.schema.schedules import schedule_spec
from planner.simulate.actions import ActionTable, PipelineRank

__all__ = ["actions"]


def actions(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> ActionTable:
    """Order in which each rank acts in a step.

    Args:
        schedule: Name of a schedule, see :mod:`planner.schema.schedules`.
        pp: Ranks.
        virtual_stages: Virtual stages of each rank.
        num_microbatches: Microbatches in a step.

    Returns:
        The table; the same object for the same arguments while it is kept.
    Raises:
        UnknownNameError: If the schedule has no such name.
        StrategyError: If torch refuses the combination; see
            :meth:`planner.schema.schedules.ScheduleSpec.violation`.
    """
    spec = schedule_spec(schedule)
    reason = spec.violation(pp, virtual_stages, num_microbatches)
    if reason is not None:
        raise StrategyError(reason)
    return _table(schedule, spec.order, pp, virtual_stages, num_microbatches)


@lru_cache(maxsize=512)
def _table(
    schedule: str, order: str, pp: int, virtual_stages: int, num_microbatches: int
) -> ActionTable:
    write = load_object(order)
    rows = [
        write(PipelineRank(rank, pp, virtual_stages, num_microbatches))
        for rank in range(pp)
    ]
    return ActionTable.from_rows(schedule, pp, virtual_stages, num_microbatches, rows)
