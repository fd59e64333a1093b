"""Figures of a plan as SVG: wide and narrow ones of the page, and the sheet of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from planner.errors import PlanFileError
from planner.report.data import (
    MEMORY_CATEGORIES,
    BreakdownPart,
    MeasuredData,
    ParetoPoint,
    ReportData,
    filled_share,
    memory_parts,
)
from planner.report.markup import escape
from planner.report.svg import (
    SHEET_WIDTH,
    Drawing,
    Plane,
    absent_drawing,
    block,
    blocks,
    fitted,
    hint,
    key,
    label,
    palette,
    png_or_svg,
    sheet,
    ticks,
)
from planner.report.timeline import SPAN_KINDS, TimelineData, TimelineRow
from planner.schema import StageMemory
from planner.units import format_bytes, format_seconds

__all__ = [
    "breakdown_figure",
    "figure_sheet",
    "limit_is_near",
    "memory_figure",
    "memory_name",
    "pareto_figure",
    "plan_sheet",
    "steps_figure",
]

#: Limits are left out where bars, or points, are below these shares of them.
_FAR_BARS, _FAR_POINTS = 0.1, 0.25
#: Bars of a run that a figure shows.
_MOST_STEPS = 200
#: Columns of a row of the timeline that has more blocks than these.
_MOST_BLOCKS = 400
#: Part of a step to the swatch of its kind.
_PART_SWATCH: Mapping[str, str] = {
    "compute": "k-forward",
    "recompute": "k-recompute",
    "tensor": "k-communication",
    "context": "k-communication",
    "expert": "k-communication",
    "data_parallel": "k-communication",
    "pipeline_transfer": "k-transfer",
    "pipeline_bubble": "k-bubble",
    "shared_cores": "k-bubble",
    "optimizer": "k-optimizer",
}
_MEMORY_NAMES: Mapping[str, str] = {
    "optimizer": "optimizer states",
    "reserve": "context, allocator",
    "buffers": "communication buffers",
}


def plan_sheet(report: ReportData) -> str:
    """Timeline, memory against limits, breakdown and Pareto front as one SVG file.

    Args:
        report: Report of one plan; panels that cannot be drawn say why.
    """
    plan = report.plan
    timeline = [absent_drawing(report.missing.get("timeline", ""))]
    if report.timeline is not None:
        timeline = [_timeline(report.timeline), key(_timeline_key(report.timeline))]
    parts = [absent_drawing("The plan does not say what its step is made of.")]
    if report.breakdown:
        parts = [_breakdown(report.breakdown, report.breakdown[0].seconds, SHEET_WIDTH)]
    counts = _kinds(report.pareto)
    return sheet(
        (f"{plan.model.name} on {plan.cluster.name}", plan.strategy.label()),
        (
            ("Timeline of a step, by pp rank", timeline),
            (
                "Peak memory of a device, by pp rank",
                [
                    _memory(report, report.memory, SHEET_WIDTH),
                    key(
                        [_swatch(f"m-{p}", memory_name(p)) for p in _held(report)],
                        columns=2,
                    ),
                ],
            ),
            ("Where the time goes, on the critical path", parts),
            (
                "Strategies: time, memory, devices",
                [
                    _pareto(
                        report.pareto,
                        report.pareto,
                        counts,
                        _one_limit(report.memory),
                        (SHEET_WIDTH, 230),
                    ),
                    key(_pareto_key(counts)),
                ],
            ),
        ),
    )


def figure_sheet(reports: Sequence[ReportData], form: Literal["png", "svg"]) -> bytes:
    """The sheet of the only plan as a file.

    Args:
        reports: One.
        form: Format of the file; PNG has 300 dots an inch.

    Raises:
        PlanFileError: If there are two, or a PNG cannot be made.
    """
    if len(reports) != 1:
        raise PlanFileError(
            f"a sheet of figures is of one plan, not of {len(reports)}; name one"
        )
    return png_or_svg(plan_sheet(reports[0]), form)


def _swatch(css: str, name: str) -> tuple[str, str]:
    return block(css, 0, 2, 15, 11), name


def _timeline(timeline: TimelineData) -> Drawing:
    """Each pp rank a row of blocks; numbers are microbatches."""
    rows = timeline.rows
    high = min(max(200 / len(rows), 3), 19)
    plane = Plane(
        left=42,
        right=SHEET_WIDTH - 8,
        top=2,
        floor=2 + high * len(rows),
        x_range=(0.0, timeline.step_time_s),
        y_range=(len(rows), 0.0),
    )
    body = ""
    for place, row in enumerate(rows):
        body += _timeline_row(row, plane, place, 0.84 * high)
    body += _rank_labels(plane, [row.rank for row in rows], high)
    places = ticks(0, timeline.step_time_s, 5)
    body += plane.x_axis([(s, format_seconds(s) if s else "0") for s in places])
    return Drawing(body=body, width=SHEET_WIDTH, height=plane.floor + 24)


def _timeline_row(row: TimelineRow, plane: Plane, place: int, high: float) -> str:
    y = plane.y(place) + 0.08 * high
    if len(row) > _MOST_BLOCKS:
        return _columns(row, plane, y, high)
    body = ""
    for number, name in enumerate(SPAN_KINDS):
        mine = row.kind == number
        pairs = zip(row.start_s[mine].tolist(), row.end_s[mine].tolist(), strict=True)
        body += blocks(
            f"k-{name.replace(' ', '-')}",
            [(plane.x(a), y, plane.x(b) - plane.x(a), high) for a, b in pairs],
        )
    for span in row.spans():
        x, wide = plane.x(span.start_s), plane.x(span.end_s) - plane.x(span.start_s)
        if wide > 2.5:
            body += (
                f'<rect x="{x + wide - 0.4:.2f}" y="{y:.1f}" width=".4" '
                f'height="{high:.1f}" fill="#fff"/>'
            )
        text = str(span.microbatch)
        if span.microbatch < 0 or span.kind == "transfer" or high < 11:
            continue
        if wide < 5.5 * len(text) + 4:
            continue
        kind = span.kind.replace(" ", "-")
        # A plain patch under the number, so that no hatching runs through it.
        body += (
            f'<rect class="{f"k-{kind}"}" x="{x + wide / 2 - 3 * len(text) - 1:.1f}" '
            f'y="{y + high / 2 - 5:.1f}" width="{6 * len(text) + 2}" height="10"/>'
            f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 3:.1f}" '
            f'text-anchor="middle" style="font-size: 8.5px; '
            f'fill: {palette()[f"{kind}-ink"]}">{text}</text>'
        )
    return body


def _columns(row: TimelineRow, plane: Plane, y: float, high: float) -> str:
    """Columns of equal time instead of blocks, each kind as high as its share."""
    edges = np.linspace(*plane.x_range, _MOST_BLOCKS + 1)
    wide = (plane.right - plane.left) / _MOST_BLOCKS
    floor = np.full(_MOST_BLOCKS, y + high)
    body = ""
    for number, name in enumerate(SPAN_KINDS):
        mine = row.kind == number
        long = np.where(mine, row.end_s - row.start_s, 0.0)
        times = np.append(row.start_s, row.end_s[-1:])
        spent = np.interp(edges, times, np.concatenate([[0.0], np.cumsum(long)]))
        size = np.diff(spent) / np.diff(edges) * high
        floor = floor - size
        body += blocks(
            f"k-{name.replace(' ', '-')}",
            [
                (plane.left + wide * i, float(floor[i]), wide, float(size[i]))
                for i in np.flatnonzero(size > 0.01 * high).tolist()
            ],
        )
    return body


def _timeline_key(timeline: TimelineData) -> list[tuple[str, str]]:
    present = {int(k) for row in timeline.rows for k in set(row.kind.tolist())}
    return [
        _swatch(f"k-{name.replace(' ', '-')}", name)
        for number, name in enumerate(SPAN_KINDS)
        if number in present
    ]


def _rank_labels(plane: Plane, ranks: Sequence[int], high: float) -> str:
    """Numbers left of rows, of as many as there is room for."""
    every = math.ceil(13 / high)
    return "".join(
        label(plane.left - 8, plane.y(place + 0.5) + 3.5, f"rank {rank}", "end")
        for place, rank in enumerate(ranks)
        if place % every == 0
    )


def memory_name(part: str) -> str:
    """A category of memory as people call it."""
    return _MEMORY_NAMES.get(part, part)


def _held(report: ReportData) -> list[str]:
    return [
        part
        for part in MEMORY_CATEGORIES
        if any(memory_parts(row)[part] > 0 for row in report.memory)
    ]


def limit_is_near(rows: Sequence[StageMemory]) -> bool:
    """True if bars leave room for the limit of a device.

    Args:
        rows: Entries of all plans that share a scale.
    """
    limit = max(row.limit_bytes for row in rows)
    return max(row.total_bytes for row in rows) >= _FAR_BARS * limit


def memory_figure(report: ReportData, scale: Sequence[StageMemory]) -> str:
    """Each pp rank's devices: what fills them, and their limit.

    Args:
        report: Report of one plan.
        scale: Rows of all plans, that bars have room for.
    """
    return _both(
        lambda width: _memory(report, scale, width),
        "Peak memory of each device, by pp rank",
    )


def _memory(report: ReportData, scale: Sequence[StageMemory], width: float) -> Drawing:
    rows = report.memory
    near, several = limit_is_near(scale), len({row.device_type for row in rows}) > 1
    most = max(row.total_bytes for row in scale)
    if near:
        most = max(most, *(row.limit_bytes for row in scale))
    wide = width > SHEET_WIDTH
    high = min(max((900 if wide else 560) / len(rows), 5), 26 if wide else 19)
    plane = Plane(
        left=150 if wide else 46,
        right=width - (200 if wide else 96),
        top=4,
        floor=4 + high * len(rows),
        x_range=(0.0, most or 1.0),
        y_range=(len(rows), 0.0),
    )
    every, body = math.ceil(13 / high), ""
    for place, row in enumerate(rows):
        y = plane.y(place) + 0.12 * high
        body += block("idle", plane.left, y, plane.right - plane.left, 0.76 * high)
        x = plane.left
        for part, size in memory_parts(row).items():
            if size > 0:
                long = plane.x(size) - plane.left
                tip = f"{memory_name(part)}\n{format_bytes(size)}"
                body += block(f"m-{part}", x, y, long, 0.76 * high, tip)
                x += long
        if near:
            x = plane.x(row.limit_bytes)
            body += (
                f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1.5:.1f}" '
                f'y2="{y + 0.76 * high + 1.5:.1f}"/>'
            )
        if place % every == 0:
            foot = plane.y(place + 0.5) + 4
            body += label(
                0,
                foot,
                _rank_name(row, report.devices_alike if wide else 0, several),
                css="ink",
            )
            body += label(width, foot, _fill_told(row, wide=wide), "end", "ink")
    return Drawing(body=body, width=width, height=plane.floor + 6)


def _rank_name(row: StageMemory, devices: int, several: bool) -> str:
    if not devices:
        return f"rank {row.rank}"
    many = f" × {devices:,}" if devices > 1 else ""
    return fitted(
        f"rank {row.rank}{many}{f' {row.device_type}' if several else ''}", 140
    )


def _fill_told(row: StageMemory, *, wide: bool) -> str:
    """Memory in use of what there is, and its share."""
    share = filled_share(row)
    percent = f"{share:.0%}" if share >= 0.01 else "<1%"
    of = f" of {format_bytes(row.limit_bytes)}" if wide else ""
    over = " over" if share > 1 else ""
    return f"{format_bytes(row.total_bytes)}{of}, {percent}{over}"


def breakdown_figure(parts: Sequence[BreakdownPart], largest_s: float) -> str:
    """Parts of the step on its critical path, largest first.

    Args:
        parts: Parts of one plan's step.
        largest_s: Seconds that the longest bar stands for.
    """
    return _both(lambda width: _breakdown(parts, largest_s, width), "Parts of the step")


def _breakdown(
    parts: Sequence[BreakdownPart], largest_s: float, width: float
) -> Drawing:
    wide = width > SHEET_WIDTH
    high, left, right = (28, 230.0, 130.0) if wide else (20, 186.0, 98.0)
    body = ""
    for place, part in enumerate(parts):
        y, name = place * high + 0.14 * high, part.name[0].upper() + part.name[1:]
        long = max(part.seconds / largest_s * (width - left - right), 1.0)
        foot = y + 0.36 * high + 4
        body += label(0, foot, fitted(name, left + 20), css="ink")
        body += block(
            _PART_SWATCH.get(part.part, "k-communication"), left, y, long, 0.72 * high
        )
        body += label(
            width - (60 if wide else 46),
            foot,
            format_seconds(part.seconds),
            "end",
            "ink",
        )
        body += label(width, foot, f"{part.share:.1%}", "end", "ink")
    return Drawing(body=body, width=width, height=float(high * len(parts)))


def _both(draw: Callable[[float], Drawing], name: str, role: str = "img") -> str:
    """A wide and a narrow drawing, of which the style sheet shows one."""
    return "".join(
        f'<div class="{css}">{draw(width).element(name, role)}</div>'
        for css, width in (("wide", 900), ("narrow", SHEET_WIDTH))
    )


def _one_limit(rows: Sequence[StageMemory]) -> float | None:
    """Bytes that may be used of any device; None where devices differ."""
    limits = {row.limit_bytes for row in rows}
    return limits.pop() if len(limits) == 1 else None


def _kinds(points: Sequence[ParetoPoint]) -> dict[int, int]:
    """Shape of each number of devices; the fewest share the last one."""
    counts = sorted({point.devices for point in points}, reverse=True)
    return {count: min(index, 3) for index, count in enumerate(counts)}


def _mark(kind: int, x: float, y: float, size: float, css: str, tip: str = "") -> str:
    """A circle, square, triangle or diamond: one for each number of devices."""
    told = f'class="{css}"{hint(tip)}'
    if tip:
        told += f' tabindex="0" role="img" aria-label="{escape(tip)}"'
    if kind == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}" {told}/>'
    if kind == 1:
        side = size * 1.75
        return (
            f'<rect x="{x - side / 2:.1f}" y="{y - side / 2:.1f}" width="{side:.1f}" '
            f'height="{side:.1f}" {told}/>'
        )
    around = {
        2: ((0, -1.25), (1.15, 0.85), (-1.15, 0.85)),
        3: ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    }[kind]
    corners = " ".join(f"{x + a * size:.1f},{y + b * size:.1f}" for a, b in around)
    return f'<polygon points="{corners}" {told}/>'


def _pareto_key(kinds: Mapping[int, int]) -> list[tuple[str, str]]:
    return [
        (
            _mark(kind, 8, 8, 5, f"dot c{kind}"),
            f"{count:,} {'device' if count == 1 else 'devices'}",
        )
        for count, kind in kinds.items()
    ] + [('<circle cx="8" cy="8" r="6" class="chosen"/>', "the chosen one")]


def pareto_figure(report: ReportData, scale: Sequence[ParetoPoint]) -> str:
    """Step time against memory; shape and colour say how many devices.

    Args:
        report: Report of one plan.
        scale: Points of all plans, that the axes have room for.
    """
    kinds, limit = _kinds(report.pareto), _one_limit(report.memory)
    legend = "".join(
        f'<li><svg viewBox="0 0 16 16" style="width:16px;height:16px" '
        f'aria-hidden="true">{mark}</svg>{name}</li>'
        for mark, name in _pareto_key(kinds)
    )
    return f'<ul class="legend" aria-label="Legend">{legend}</ul>' + _both(
        lambda width: _pareto(
            report.pareto, scale, kinds, limit, (width, 380 if width > 400 else 320)
        ),
        "Step time against peak memory of the strategies that fit",
        "group",
    )


def _pareto(
    points: Sequence[ParetoPoint],
    scale: Sequence[ParetoPoint],
    kinds: Mapping[int, int],
    limit_bytes: float | None,
    size: tuple[float, float],
) -> Drawing:
    seconds = [point.step_time_s for point in scale if point.step_time_s > 0] or [1.0]
    sizes = [point.peak_memory_bytes for point in scale]
    if limit_bytes and max(sizes) < _FAR_POINTS * limit_bytes:
        limit_bytes = None
    most = max(*sizes, limit_bytes or 0.0, 1.0) * 1.06
    plane = Plane(
        left=62,
        right=size[0] - 16,
        top=14,
        floor=size[1] - 46,
        x_range=(min(seconds) / 1.08, max(seconds) * 1.08),
        y_range=(0.0, most),
        log_x=True,
    )
    body = plane.y_axis(
        [(b, format_bytes(b) if b else "0") for b in ticks(0, most, 5)]
    ) + plane.x_axis(
        [(s, format_seconds(s)) for s in _seconds_ticks(plane, 56)],
        "step time (logarithmic)",
    )
    if limit_bytes:
        body += plane.level(limit_bytes, "limit")
        body += label(
            plane.right, plane.y(limit_bytes) - 5, "limit of a device", "end", "strong"
        )
    for devices in kinds:
        front = sorted(
            (p.step_time_s, p.peak_memory_bytes)
            for p in points
            if p.devices == devices and p.on_front and p.step_time_s > 0
        )
        if len(front) > 1:
            line = " ".join(f"{plane.x(a):.1f},{plane.y(b):.1f}" for a, b in front)
            body += f'<polyline class="front" points="{line}"/>'
    # The chosen one last, so that nothing lies on top of it.
    for point in sorted(points, key=lambda p: (p.origin == "chosen", p.origin)):
        if point.step_time_s > 0:
            body += _point(plane, point, kinds[point.devices])
    return Drawing(body=body, width=size[0], height=size[1])


def _seconds_ticks(plane: Plane, apart: float) -> list[float]:
    """1, 2, 5 of each power of ten; fewer where they would touch."""
    low, high = plane.x_range
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    inside = [place for place in places if low <= place <= high]
    if len(inside) < 2:
        inside = ticks(low, high, 4)
    kept: list[float] = []
    for place in inside:
        if not kept or plane.x(place) - plane.x(kept[-1]) >= apart:
            kept.append(place)
    return kept


def _point(plane: Plane, point: ParetoPoint, kind: int) -> str:
    x, y = plane.x(point.step_time_s), plane.y(point.peak_memory_bytes)
    tip = (
        f"{point.label}\n{format_seconds(point.step_time_s)}, "
        f"{format_bytes(point.peak_memory_bytes)}, {point.devices:,} devices\n"
        f"{point.origin}{'' if point.on_front else ', beaten by another'}"
    )
    size = {"chosen": 5.5, "runner-up": 5.5, "closed form": 3.6}[point.origin]
    mark = _mark(kind, x, y, size, f"dot c{kind}", tip)
    if point.origin != "chosen":
        return mark
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" class="chosen"/>{mark}'


def steps_figure(predicted_s: float, run: MeasuredData) -> str:
    """The steps of a run as bars, and the prediction as a line."""
    return _both(
        lambda width: _steps(predicted_s, run, width), "Measured time of each step"
    )


def _steps(predicted_s: float, run: MeasuredData, width: float) -> Drawing:
    steps = run.step_times_s[:_MOST_STEPS]
    most = max(*steps, predicted_s) * 1.1 or 1.0
    plane = Plane(
        left=62,
        right=width - 16,
        top=18,
        floor=140,
        x_range=(0.0, len(steps)),
        y_range=(0.0, most),
    )
    body = plane.y_axis(
        [(s, format_seconds(s) if s else "0") for s in ticks(0, most, 3)]
    )
    bar = min(max((plane.right - plane.left) / len(steps) * 0.7, 1.0), 36.0)
    for index, seconds in enumerate(steps):
        css = "warm" if index < run.warm_up_steps else "c0"
        y = plane.y(seconds)
        tip = f"step {index + 1}\n{format_seconds(seconds)}"
        body += block(css, plane.x(index + 0.5) - bar / 2, y, bar, 140 - y, tip)
    body += plane.level(predicted_s, "limit")
    middle = (plane.left + plane.right) / 2
    body += label(middle, 162, "step of the run, first to last", "middle")
    return Drawing(body=body, width=width, height=170)
