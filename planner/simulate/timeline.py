"""Start and end of each action of one candidate: tables, bubbles, Perfetto."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from planner.schema.base import write_atomically
from planner.simulate.actions import ActionKind, ActionTable, IntArray
from planner.simulate.durations import Durations, FloatArray, stage_durations
from planner.simulate.engine import op_ends
from planner.simulate.program import compile_table
from planner.simulate.shared import Sharing, shared_op_times

__all__ = ["Timeline", "timeline"]

_NAMES = ("forward", "backward", "backward input", "backward weight")
#: Colour names of the Chrome trace viewer, one per kind.
_COLOURS = ("good", "bad", "terrible", "yellow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Start and end of every action, by rank, then by time.

    The two halves of an OVERLAP_F_B are rows of their own.

    Attributes:
        pp: Ranks.
        rank: Shape [rows].
        kind: Forward, backward, backward input or backward weight; see
            :class:`planner.simulate.ActionKind`. Shape [rows].
        stage: Virtual stage. Shape [rows].
        microbatch: Shape [rows].
        start_s: Shape [rows].
        end_s: Shape [rows].
    """

    pp: int
    rank: IntArray
    kind: IntArray
    stage: IntArray
    microbatch: IntArray
    start_s: FloatArray
    end_s: FloatArray

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def makespan_s(self) -> float:
        """End of the last action."""
        return float(self.end_s.max())

    @property
    def bubble_fraction(self) -> FloatArray:
        """Share of the step in which each rank runs no action. Shape [pp]."""
        spent = np.bincount(
            self.rank, weights=self.end_s - self.start_s, minlength=self.pp
        )
        whole = self.makespan_s
        return 1.0 - spent / whole if whole > 0 else np.zeros(self.pp)

    def chrome_trace(self) -> dict[str, object]:
        """Chrome-trace JSON data, times in microseconds; opens in Perfetto.

        Source: Trace Event Format, Google, 2016 (catapult).
        """
        events: list[dict[str, object]] = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"pp rank {rank}"},
            }
            for rank in range(self.pp)
        ]
        columns = (
            self.rank,
            self.kind,
            self.stage,
            self.microbatch,
            self.start_s,
            self.end_s,
        )
        for rank, kind, stage, microbatch, start, end in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            events.append(
                {
                    "name": f"{stage}{ActionKind(kind).letter}{microbatch}",
                    "cat": _NAMES[kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": start * 1e6,
                    "dur": (end - start) * 1e6,
                    "cname": _COLOURS[kind],
                    "args": {"stage": stage, "microbatch": microbatch},
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`chrome_trace` to a file, atomically.

        Raises:
            PlanFileError: If the place cannot be written.
        """
        write_atomically(path, json.dumps(self.chrome_trace()).encode())


def timeline(
    table: ActionTable,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    weight_s: ArrayLike | None = None,
    send_forward_s: ArrayLike | None = None,
    send_backward_s: ArrayLike | None = None,
    *,
    sharing: Sharing | None = None,
) -> Timeline:
    """Time each action of one candidate.

    Args:
        table: The schedule.
        forward_s: As in :func:`planner.simulate.makespan`. Shape [stages].
        backward_s: Shape [stages].
        weight_s: Shape [stages].
        send_forward_s: Shape [stages - 1].
        send_backward_s: Shape [stages - 1].
        sharing: Links and cores that are shared, from
            :func:`planner.simulate.check_sharing`; none if left out.
    Returns:
        Rows sorted by rank, then by time.
    Raises:
        StrategyError: If a shape does not fit, a duration is negative, or the ranks
            wait for each other in a circle.
    """
    times = stage_durations(
        table, forward_s, backward_s, weight_s, send_forward_s, send_backward_s
    )
    program = compile_table(table)
    starts, ends = _op_times(table, times, sharing)
    order = np.argsort(program.rank, kind="stable")
    return Timeline(
        pp=table.pp,
        rank=program.rank[order],
        kind=program.kind[order],
        stage=program.stage[order],
        microbatch=program.microbatch[order],
        start_s=starts[order],
        end_s=ends[order],
    )


def _op_times(
    table: ActionTable, times: Durations, sharing: Sharing | None
) -> tuple[FloatArray, FloatArray]:
    if sharing is not None:
        return shared_op_times(table, times, sharing)
    ends = op_ends(table, times)[1:]
    spent = times.compute_s[0, compile_table(table).duration_row]
    return np.maximum(ends - spent, 0.0), ends
