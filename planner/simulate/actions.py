"""Orders in which pipeline ranks act, as compact arrays, for every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.plugins import load_object
from planner.schema.schedules import ScheduleSpec, schedule_spec, schedules

__all__ = [
    "Action",
    "ActionKind",
    "ActionTable",
    "IntArray",
    "PipelineRank",
    "actions",
    "rank_of_stages",
    "schedule_columns",
]

#: Integers of any width.
IntArray = NDArray[np.integer[Any]]


class ActionKind(IntEnum):
    """Kind of work that a rank does with one microbatch on one virtual stage.

    ``OVERLAP_F_B`` holds a forward and a full backward that torch may interleave; by
    default it runs them one after the other and sends both results afterwards.
    Source: torch.distributed.pipelining.schedules, torch 2.13.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    OVERLAP_F_B = 4

    @property
    def letter(self) -> str:
        """The letter that torch writes for it: F, B, I, W, OVERLAP_F_B."""
        return ("F", "B", "I", "W", "OVERLAP_F_B")[self]


class Action(NamedTuple):
    """One row of an :class:`ActionTable`, for people and tests.

    For ``OVERLAP_F_B`` stage and microbatch are those of the forward, the paired ones
    those of the backward; the paired ones are -1 otherwise.
    """

    kind: ActionKind
    stage: int
    microbatch: int
    paired_stage: int = -1
    paired_microbatch: int = -1

    def __str__(self) -> str:
        if self.kind is ActionKind.OVERLAP_F_B:
            return (
                f"({self.stage}F{self.microbatch};"
                f"{self.paired_stage}B{self.paired_microbatch})OVERLAP_F_B"
            )
        return f"{self.stage}{self.kind.letter}{self.microbatch}"


class PipelineRank(NamedTuple):
    """One rank of a pipeline, as the functions take it that write its actions."""

    rank: int
    pp: int
    virtual_stages: int
    num_microbatches: int


def rank_of_stages(schedule: str, pp: int, virtual_stages: int) -> IntArray:
    """Rank that holds each virtual stage.

    Returns:
        Shape [pp * virtual_stages], int32.
    Raises:
        UnknownNameError: If the schedule has no such name.
    """
    spec = schedule_spec(schedule)
    ranks = [spec.rank_of_stage(stage, pp) for stage in range(pp * virtual_stages)]
    return np.array(ranks, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionTable:
    """Actions of each rank, in order. Made by :func:`planner.simulate.actions`.

    Two tables are the same if they are one object: :func:`planner.simulate.actions`
    keeps the tables it made, so that compiled programs can be kept with them.

    Attributes:
        schedule: torch's name.
        pp: Ranks.
        virtual_stages: Virtual stages of each rank.
        num_microbatches: Microbatches in a step.
        kind: :class:`ActionKind` of each action, ranks one after the other.
            Shape [actions], int8.
        stage: Virtual stage. Shape [actions], int32.
        microbatch: Shape [actions], int32.
        paired_stage: Stage of the backward of an OVERLAP_F_B, else -1.
            Shape [actions], int32.
        paired_microbatch: Microbatch of that backward, else -1. Shape [actions], int32.
        offsets: Rank r has the actions ``offsets[r] : offsets[r + 1]``.
            Shape [pp + 1], int64.
        rank_of_stage: Shape [pp * virtual_stages], int32.
    """

    schedule: str
    pp: int
    virtual_stages: int
    num_microbatches: int
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    paired_stage: IntArray
    paired_microbatch: IntArray
    offsets: IntArray
    rank_of_stage: IntArray

    @property
    def num_stages(self) -> int:
        """Virtual stages of all ranks."""
        return self.pp * self.virtual_stages

    def __len__(self) -> int:
        return len(self.kind)

    def rank(self, rank: int) -> Iterator[Action]:
        """Yield the actions of one rank, in order.

        Raises:
            StrategyError: If there is no such rank.
        """
        if not 0 <= rank < self.pp:
            raise StrategyError(
                f"rank={rank} is not in a pipeline of pp={self.pp}; "
                f"use 0 to {self.pp - 1}"
            )
        rows = slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))
        columns = (
            column[rows].tolist()
            for column in (
                self.kind,
                self.stage,
                self.microbatch,
                self.paired_stage,
                self.paired_microbatch,
            )
        )
        for kind, *rest in zip(*columns, strict=True):
            yield Action(ActionKind(kind), *rest)

    @classmethod
    def from_rows(
        cls,
        schedule: str,
        pp: int,
        virtual_stages: int,
        num_microbatches: int,
        rows: list[IntArray],
    ) -> ActionTable:
        """Pack the rows of every rank into one table.

        Args:
            schedule: torch's name.
            pp: Ranks.
            virtual_stages: Of each rank.
            num_microbatches: In a step.
            rows: Per rank, columns as in :class:`Action`. Shape [actions, 3] or
                [actions, 5].
        """
        counts = [len(part) for part in rows]
        offsets = np.zeros(pp + 1, dtype=np.int64)
        np.cumsum(counts, out=offsets[1:])
        table = np.full((5, int(offsets[-1])), -1, dtype=np.int32)
        for rank, part in enumerate(rows):
            table[: part.shape[1], offsets[rank] : offsets[rank + 1]] = part.T
        table.setflags(write=False)
        kind = table[0].astype(np.int8)
        for array in (kind, offsets):
            array.setflags(write=False)
        return cls(
            schedule=schedule,
            pp=pp,
            virtual_stages=virtual_stages,
            num_microbatches=num_microbatches,
            kind=kind,
            stage=table[1],
            microbatch=table[2],
            paired_stage=table[3],
            paired_microbatch=table[4],
            offsets=offsets,
            rank_of_stage=rank_of_stages(schedule, pp, virtual_stages),
        )


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
