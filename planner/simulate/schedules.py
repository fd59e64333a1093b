"""Exact action order of every torch pipeline schedule, and when one is legal."""

from __future__ import annotations

from functools import lru_cache

from planner.errors import StrategyError, UnknownNameError
from planner.schema.strategy import SCHEDULES, V_SCHEDULES
from planner.simulate.actions import ActionTable, IntArray
from planner.simulate.folded import dual_pipe_rows, zero_bubble_rows
from planner.simulate.looped import (
    breadth_first_rows,
    fill_drain_rows,
    interleaved_rows,
    one_forward_one_backward_rows,
)

__all__ = ["actions", "why_not"]

#: Schedules that hold one stage a rank.
_SINGLE_STAGE = frozenset({"GPipe", "1F1B"})
#: Schedules that run microbatches in rounds of about pp.
_IN_ROUNDS = frozenset({"Interleaved1F1B", "InterleavedZeroBubble"})


def why_not(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    """Why torch refuses a pipeline; None if it runs it.

    Args:
        schedule: torch's name, one of :data:`planner.schema.SCHEDULES`.
        pp: Ranks.
        virtual_stages: Virtual stages of each rank.
        num_microbatches: Microbatches in a step.
    Returns:
        One line with the values, the rule and the remedy, or None.
    Raises:
        UnknownNameError: If the schedule has no such name.
    Source: constructors in torch.distributed.pipelining.schedules, torch 2.13.
    """
    if schedule not in SCHEDULES:
        raise UnknownNameError("pipeline schedule", schedule, SCHEDULES)
    for name, value in (
        ("pp", pp),
        ("virtual_stages", virtual_stages),
        ("num_microbatches", num_microbatches),
    ):
        if value < 1:
            return f"{name}={value} is not positive; use 1 or more"
    if schedule in _SINGLE_STAGE and virtual_stages != 1:
        return (
            f"virtual_stages={virtual_stages} with schedule {schedule}, which holds "
            f"one stage a rank; use 1, or Interleaved1F1B"
        )
    if schedule in V_SCHEDULES and virtual_stages != 2:
        return (
            f"virtual_stages={virtual_stages} with schedule {schedule}, which folds "
            f"exactly two stages onto a rank; use 2"
        )
    return _why_not_microbatches(schedule, pp, virtual_stages, num_microbatches)


def _why_not_microbatches(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> str | None:
    least = {"1F1B": pp, "DualPipeV": pp * virtual_stages}.get(schedule, 1)
    if num_microbatches < least:
        return (
            f"num_microbatches={num_microbatches} is below the {least} stages that "
            f"schedule {schedule} must fill; use {least} or more"
        )
    if schedule in _IN_ROUNDS:
        rounds = max(1, num_microbatches // pp)
        if num_microbatches % rounds:
            return (
                f"num_microbatches={num_microbatches} does not divide into the "
                f"{rounds} rounds that schedule {schedule} makes of it at pp={pp}; "
                f"use {num_microbatches // pp * pp}, a multiple of pp"
            )
    return None


def actions(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> ActionTable:
    """What each rank does in a step, in torch's order.

    Args:
        schedule: torch's name, one of :data:`planner.schema.SCHEDULES`.
        pp: Ranks.
        virtual_stages: Virtual stages of each rank.
        num_microbatches: Microbatches in a step.
    Returns:
        The table; the same object for the same arguments while it is kept.
    Raises:
        UnknownNameError: If the schedule has no such name.
        StrategyError: If torch refuses the combination; see :func:`why_not`.
    """
    reason = why_not(schedule, pp, virtual_stages, num_microbatches)
    if reason is not None:
        raise StrategyError(reason)
    return _table(schedule, pp, virtual_stages, num_microbatches)


@lru_cache(maxsize=512)
def _table(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> ActionTable:
    rows = [
        _rank_rows(schedule, rank, pp, virtual_stages, num_microbatches)
        for rank in range(pp)
    ]
    return ActionTable.from_rows(schedule, pp, virtual_stages, num_microbatches, rows)


def _rank_rows(
    schedule: str, rank: int, pp: int, virtual_stages: int, num_microbatches: int
) -> IntArray:
    if schedule == "GPipe":
        return fill_drain_rows(rank, num_microbatches)
    if schedule == "1F1B":
        return one_forward_one_backward_rows(rank, pp, num_microbatches)
    if schedule == "LoopedBFS":
        return breadth_first_rows(rank, pp, virtual_stages, num_microbatches)
    if schedule == "ZBVZeroBubble":
        return zero_bubble_rows(rank, pp, num_microbatches)
    if schedule == "DualPipeV":
        return dual_pipe_rows(rank, pp, num_microbatches)
    return interleaved_rows(
        rank,
        pp,
        virtual_stages,
        num_microbatches,
        split_backward=schedule == "InterleavedZeroBubble",
    )
