"""A program as what the event loops need: what each op sends, to whom, what is next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.durations import FloatArray
from planner.simulate.program import Program, compile_table

__all__ = ["COLUMNS", "MAX_RANKS", "NONE", "Flow", "Indices", "flow_of"]

#: Unsigned, which spares the kernels a check for negative ones.
Indices = NDArray[np.uint32]

#: Fields of an op in :attr:`Flow.rows`: its duration row; of what it sends the op that
#: takes it, that op's rank and the transfer row; the same of the gradient that the end
#: of a pair sends besides, NONE if nothing; the next op on its rank.
COLUMNS = 8

#: An op that sends once.
NONE = 2**32 - 1

#: Ranks that the key of an event has bits for.
MAX_RANKS = 2**12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A program with the ops of each rank in one piece.

    So that the loops need no questions asked, what an op without a taker sends goes to
    op ``ops + 1`` on rank ``pp``, which nobody reads, and after the last op of a rank
    comes op ``ops``, whose input never arrives.

    Attributes:
        program: The program.
        rows: See :data:`COLUMNS`, op after op. Shape [(ops + 1) * COLUMNS].
        arrival: When the input of each op is there if nothing is sent: at the start, or
            never. Shape [ops + 2].
        first: First op of each rank. Shape [pp].
        place: Op of each op of the program. Shape [ops].
    """

    program: Program
    rows: Indices
    arrival: FloatArray
    first: Indices
    place: IntArray

    def __len__(self) -> int:
        return len(self.program)


@lru_cache(maxsize=256)
def flow_of(table: ActionTable) -> Flow:
    """Lay out the ops of a table's program.

    Raises:
        StrategyError: If ranks wait for each other in a circle, or there are more than
            an event has bits for.
    """
    if table.pp > MAX_RANKS:
        raise StrategyError(
            f"pp={table.pp} is more than the {MAX_RANKS} ranks that can share links; "
            f"use fewer, or the static engine"
        )
    program = compile_table(table)
    ops = len(program)
    order = np.argsort(program.rank, kind="stable")
    place = np.empty(ops, dtype=np.int64)
    place[order] = np.arange(ops)
    rows = np.zeros((ops + 1, COLUMNS), dtype=np.uint32)
    rows[place, 0] = program.duration_row
    rows[:, 1], rows[:, 2], rows[:, 4] = ops + 1, table.pp, NONE
    waits = program.producer > 0
    for gradient in (False, True):
        takers = np.flatnonzero(
            waits & ((program.kind != ActionKind.FORWARD) == gradient)
        )
        senders = place[program.producer[takers] - 1]
        # The gradient goes second where a forward has been sent already.
        column = np.where(rows[senders, 1] <= ops, 4, 1)
        rows[senders, column] = place[takers]
        rows[senders, column + 1] = program.rank[takers]
        rows[senders, column + 2] = program.delay_row[takers]
    ends = np.cumsum(np.bincount(program.rank, minlength=table.pp))
    rows[:ops, 7] = np.arange(1, ops + 1)
    rows[ends - 1, 7] = ops
    arrival = np.full(ops + 2, np.inf)
    arrival[place] = np.where(waits, np.inf, 0.0)
    return Flow(
        program=program,
        rows=rows.ravel(),
        arrival=arrival,
        first=np.concatenate([[0], ends[:-1]]).astype(np.uint32),
        place=place,
    )
