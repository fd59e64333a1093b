"""What the page's script draws from: grid and timeline, small enough for a phone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.report.data import DeviceGrid, ReportData
from planner.report.timeline import SPAN_KINDS, StageFacts, TimelineData, TimelineRow

__all__ = ["MOST_SPANS", "payload", "rows_apart"]

#: Spans of all plans of a page; a longer timeline keeps every second, third … row.
MOST_SPANS = 150_000
#: Times are whole numbers of this share of a step: a pixel at the deepest zoom.
_TICKS = 10_000_000
_BUBBLE = SPAN_KINDS.index("bubble")


def payload(
    report: ReportData, name: str, most_spans: int = MOST_SPANS
) -> dict[str, Any]:
    """Data of one plan, for JSON.

    Args:
        report: The plan's.
        name: What the page calls the plan; empty if it is the only one.
        most_spans: Of the timeline.
    """
    return {
        "name": name,
        "grid": _grid(report.grid),
        "timeline": None
        if report.timeline is None
        else _timeline(report.timeline, most_spans),
        "stages": [_stage(stage) for stage in report.stages],
    }


def _runs(values: NDArray[np.int64], step: int) -> list[list[int]]:
    """[first value, count] of runs that grow by ``step``."""
    if not len(values):
        return []
    breaks = np.flatnonzero(np.diff(values) != step) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff([*starts.tolist(), len(values)])
    pairs: list[list[int]] = np.stack([values[starts], counts], axis=1).tolist()
    return pairs


def _grid(grid: DeviceGrid) -> dict[str, Any]:
    used = grid.rank >= 0
    # Ranks grow by one; devices that are not used are runs of equal -1.
    pieces: list[list[int]] = []
    edges = np.flatnonzero(np.diff(used.astype(int))) + 1
    for part in np.split(grid.rank, edges):
        pieces += _runs(part, 1) if len(part) and part[0] >= 0 else [[-1, len(part)]]
    sizes = np.bincount(grid.host)
    return {
        "degrees": dict(grid.degrees),
        "ranks": pieces,
        "hosts": _runs(sizes[sizes > 0].astype(np.int64), 0),
        "types": list(grid.device_types),
        "typeRuns": _runs(grid.device_type, 0),
    }


def rows_apart(timeline: TimelineData, most_spans: int) -> int:
    """1 if every row of a timeline is drawn, 2 for every second, and so on."""
    return max(1, -(-timeline.num_spans // most_spans))


def _timeline(timeline: TimelineData, most_spans: int) -> dict[str, Any]:
    every = rows_apart(timeline, most_spans)
    rows: Sequence[TimelineRow] = timeline.rows[::every]
    return {
        "step": timeline.step_time_s,
        "ticks": _TICKS,
        "kinds": list(SPAN_KINDS),
        "every": every,
        "rows": [_row(row, timeline.step_time_s) for row in rows],
    }


def _row(row: TimelineRow, step_s: float) -> dict[str, Any]:
    """Kind, stage, microbatch, gap before and duration of each span, one list."""
    shown = row.kind != _BUBBLE
    scale = _TICKS / (step_s or 1.0)
    start = np.rint(row.start_s[shown] * scale).astype(np.int64)
    end = np.rint(row.end_s[shown] * scale).astype(np.int64)
    gap = start - np.concatenate([[0], end[:-1]])
    columns = np.stack(
        [row.kind[shown], row.stage[shown], row.microbatch[shown], gap, end - start],
        axis=1,
    )
    return {
        "rank": row.rank,
        "devices": row.devices,
        "first": row.first_rank,
        "type": row.device_type,
        "spans": columns.reshape(-1).tolist(),
    }


def _stage(stage: StageFacts) -> dict[str, Any]:
    first, last, count = stage.modules
    return {
        "rank": stage.rank,
        "units": [first, last, count],
        "recompute": stage.recompute,
        "forward": stage.forward_s,
        "forwardTalk": stage.forward_communication_s,
        "backward": stage.backward_s,
        "backwardTalk": stage.backward_communication_s,
    }
