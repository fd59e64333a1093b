"""Exact action order of every registered pipeline schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.plugins import load_object
from planner.schema.schedules import ScheduleSpec, schedule_spec, schedules
from planner.simulate.actions import ActionTable, PipelineRank

__all__ = ["actions", "schedule_columns"]

#: What compiled code may ask of a schedule, by name.
_COLUMNS: dict[str, Callable[[ScheduleSpec], int]] = {
    "folded": lambda spec: spec.folded,
    "splits_backward": lambda spec: spec.splits_backward,
    "forwards_first": lambda spec: spec.forwards_first,
    "waits_for_sends": lambda spec: spec.waits_for_sends,
    "textbook": lambda spec: spec.has_textbook_time,
    "one_by_one": lambda spec: spec.closed_form == "one_by_one",
    "rounds": lambda spec: spec.closed_form == "rounds",
    "holds_all": lambda spec: spec.in_flight.all,
    "per_pp": lambda spec: spec.in_flight.per_pp,
    "constant": lambda spec: spec.in_flight.constant,
    "fewer_per_rank": lambda spec: spec.in_flight.fewer_per_rank,
    "in_rounds": lambda spec: spec.in_flight.in_rounds,
    "more_waiting_per_rank": lambda spec: spec.in_flight.more_waiting_per_rank,
}


def schedule_columns(*names: str) -> NDArray[np.int64]:
    """Facts of all schedules as numbers, for compiled code.

    Such code is kept on disk, so that it takes these as an argument: schedules and
    their codes may change while it stays.

    Args:
        names: Keys of ``_COLUMNS``.

    Returns:
        A row a code, -1 where no schedule has it. Shape [codes, names].
    """
    known = schedules()
    rows = np.full((known[-1].code + 1, len(names)), -1, dtype=np.int64)
    for spec in known:
        rows[spec.code] = [int(_COLUMNS[name](spec)) for name in names]
    return rows


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
