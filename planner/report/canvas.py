"""The two figures that the page's script draws: their data, small enough for a phone,
and what stands around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.report.data import DeviceGrid, ReportData
from planner.report.markup import (
    absent,
    canvas,
    details,
    escape,
    figure,
    legend,
    note,
    table,
    titled,
    zoom_tools,
)
from planner.report.timeline import SPAN_KINDS, StageFacts, TimelineData, TimelineRow
from planner.units import format_seconds

__all__ = ["MOST_SPANS", "devices_pane", "payload", "timeline_body"]

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
        name: Name of the plan on the page; empty if it is the only one.
        most_spans: Largest number of spans of the timeline.
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


def _rows_apart(timeline: TimelineData, most_spans: int) -> int:
    """1 if every row of a timeline is drawn, 2 for every second, and so on."""
    return max(1, -(-timeline.num_spans // most_spans))


def _timeline(timeline: TimelineData, most_spans: int) -> dict[str, Any]:
    every = _rows_apart(timeline, most_spans)
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


def devices_pane(report: ReportData, index: int) -> str:
    """The device grid, coloured by the axis that one picks."""
    grid = report.grid
    hosts = len(set(grid.host.tolist()))
    used = report.plan.strategy.mesh.num_devices
    axes = ", ".join(f"{a} {d}" for a, d in grid.degrees.items() if d > 1) or "no axis"
    words = (
        f"{len(grid):,} devices on {hosts:,} {'host' if hosts == 1 else 'hosts'}, "
        f"{used:,} used; degrees: {axes}"
    )
    ep = (
        f" The {grid.ep} innermost devices of dp_shard x cp x tp share the experts "
        f"(ep)."
        if grid.ep > 1
        else ""
    )
    return figure(
        '<div class="tools"><span class="named">Colour by</span></div>'
        '<ul class="legend" aria-label="Legend"></ul>'
        + canvas("grid", words, "Arrow keys go from device to device.", plan=index),
        f"{words}. Numbers are coordinates along the axis. Point at a device, tap it, "
        f"or go to it by arrow keys: rank, host, coordinates, stages.{ep}",
    )


def timeline_body(
    reports: Sequence[ReportData], names: Sequence[str], most_spans: int
) -> str:
    """The steps of all plans on one scale of time, and who does what how long."""
    timed = [report.timeline is not None for report in reports]
    body = ""
    if any(timed):
        present = {
            int(kind)
            for report in reports
            if report.timeline is not None
            for row in report.timeline.rows
            for kind in set(row.kind.tolist())
        }
        body += legend(
            (f"k-{name.replace(' ', '-')}", name)
            for index, name in enumerate(SPAN_KINDS)
            if index in present
        )
    for index, (report, name) in enumerate(zip(reports, names, strict=True)):
        body += titled(_timeline_pane(report, index, most_spans), name)
    return f'<div class="stack">{body}</div>'


def _timeline_pane(report: ReportData, index: int, most_spans: int) -> str:
    timeline = report.timeline
    if timeline is None:
        return absent(report.missing.get("timeline", ""))
    many = len(timeline.rows)
    words = (
        f"One step of {format_seconds(timeline.step_time_s)}, "
        f"{many} {'row' if many == 1 else 'rows'}"
    )
    caption = (
        "A row is what each device of a pp rank does. F is a forward, B a backward, I "
        "and W its input and weight halves, with the number of the microbatch; the "
        "dotted foot of a block is the share of it that is communication. Blocks too "
        "thin to tell apart are columns, each kind as high as its share. Zoom by wheel "
        "after a click, by pinching, by + and −; drag or use arrow keys to move."
    )
    every = _rows_apart(timeline, most_spans)
    if every > 1:
        caption += (
            f" One pp rank in {every} is drawn, so that the page stays small; the "
            f"table has all."
        )
    warned = note(timeline.caveat) if timeline.caveat else ""
    return (
        warned
        + figure(
            zoom_tools("step")
            + canvas(
                "timeline",
                words,
                "Plus and minus zoom, arrow keys move, 0 shows all of it.",
                plan=index,
            ),
            caption,
        )
        + details("Seconds by rank", _spent(report))
        + details("Stages", _stages(report))
    )


def _spent(report: ReportData) -> str:
    timeline = report.timeline
    if timeline is None:
        return ""
    spent = [row.seconds() for row in timeline.rows]
    kinds = [k for k in SPAN_KINDS if any(each[k] > 0 for each in spent)]
    return table(
        ("pp rank", "devices", *kinds),
        [
            (
                f"{row.rank}",
                f"{row.devices:,}",
                *(escape(format_seconds(each[kind])) for kind in kinds),
            )
            for row, each in zip(timeline.rows, spent, strict=True)
        ],
        caption="What each device of a pp rank spends a step on; rows sum to the step",
        numbers=range(1, 2 + len(kinds)),
    )


def _stages(report: ReportData) -> str:
    def time(value: float | None) -> str:
        return "" if value is None else escape(format_seconds(value))

    return table(
        ("stage", "pp rank", "units", "of them", "recompute", "forward", "backward"),
        [
            (
                f"{stage.stage}",
                f"{stage.rank}",
                f"{stage.modules[2]}",
                f"<code>{escape(stage.modules[0])}</code> … "
                f"<code>{escape(stage.modules[1])}</code>",
                escape(stage.recompute),
                time(stage.forward_s),
                time(stage.backward_s),
            )
            for stage in report.stages
        ],
        caption="Virtual stages, and one microbatch on each",
        numbers=(1, 2, 5, 6),
    )
