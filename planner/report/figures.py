"""Figures of the page as SVG, each in a wide and in a narrow form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.report.data import MeasuredData, ParetoPoint
from planner.report.markup import escape
from planner.units import format_bytes, format_seconds

__all__ = ["pareto_figure", "steps_figure", "ticks"]

#: A limit is left out where all points are below this share of it.
_FAR = 0.25
#: Bars of a run that a figure shows.
_MOST_STEPS = 200


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from low to high, about ``count`` of them."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / max(count, 1)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(s * scale for s in (1, 2, 2.5, 5, 10) if s * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A plane with logarithmic time from left to right, and memory upwards."""

    width: float
    height: float
    fastest_s: float
    slowest_s: float
    most_bytes: float
    left: float = 62
    right: float = 16
    top: float = 14
    bottom: float = 46

    def x(self, seconds: float) -> float:
        place = math.log(seconds / self.fastest_s) / math.log(
            self.slowest_s / self.fastest_s
        )
        return self.left + place * (self.width - self.left - self.right)

    def y(self, size: float) -> float:
        high = self.height - self.bottom - self.top
        return self.top + (1 - size / self.most_bytes) * high


def _seconds_ticks(frame: _Frame, apart: float) -> list[float]:
    """1, 2, 5 of each power of ten; fewer where they would touch."""
    low = math.floor(math.log10(frame.fastest_s))
    high = math.ceil(math.log10(frame.slowest_s))
    places = [
        digit * 10.0**power for power in range(low, high + 1) for digit in (1, 2, 5)
    ]
    inside = [p for p in places if frame.fastest_s <= p <= frame.slowest_s]
    if len(inside) < 2:
        inside = ticks(frame.fastest_s, frame.slowest_s, 4)
    kept: list[float] = []
    for place in inside:
        if not kept or frame.x(place) - frame.x(kept[-1]) >= apart:
            kept.append(place)
    return kept


def _mark(kind: int, x: float, y: float, size: float, css: str, tip: str) -> str:
    """A circle, square, triangle or diamond: one for each number of devices."""
    told = (
        f'class="{css}" data-tip="{escape(tip)}" tabindex="0" role="img" '
        f'aria-label="{escape(tip)}"'
    )
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


def pareto_figure(
    points: Sequence[ParetoPoint],
    limit_bytes: float | None,
    scale: Sequence[ParetoPoint],
) -> str:
    """Step time against memory; shape and colour say how many devices.

    Args:
        points: Of the report.
        limit_bytes: What a device may use; None where devices differ.
        scale: Points that the axes have room for.
    """
    counts = sorted({point.devices for point in points}, reverse=True)
    # The fewest share the last shape where there are more counts than shapes.
    kind = {count: min(index, 3) for index, count in enumerate(counts)}
    legend = "".join(
        '<li><svg viewBox="0 0 16 16" style="width:16px;height:16px" '
        'aria-hidden="true">'
        f"{_plain(_mark(kind[count], 8, 8, 5, f'dot c{kind[count]}', ''))}</svg>"
        f"{count:,} {'device' if count == 1 else 'devices'}</li>"
        for count in counts
    )
    chosen = (
        '<li><svg viewBox="0 0 16 16" style="width:16px;height:16px" '
        'aria-hidden="true"><circle cx="8" cy="8" r="6" class="chosen"/></svg>'
        "the chosen one</li>"
    )
    return f'<ul class="legend" aria-label="Legend">{legend}{chosen}</ul>' + "".join(
        f'<div class="{css}">'
        f"{_pareto(points, scale, kind, limit_bytes, width, height)}</div>"
        for css, width, height in (("wide", 900, 380), ("narrow", 350, 320))
    )


def _plain(mark: str) -> str:
    """A mark of a legend, which is no point and has no tip."""
    return mark.replace(' data-tip="" tabindex="0" role="img" aria-label=""', "")


def _pareto(
    points: Sequence[ParetoPoint],
    scale: Sequence[ParetoPoint],
    kind: dict[int, int],
    limit_bytes: float | None,
    width: float,
    height: float,
) -> str:
    seconds = [point.step_time_s for point in scale if point.step_time_s > 0] or [1.0]
    sizes = [point.peak_memory_bytes for point in scale]
    if limit_bytes and max(sizes) < _FAR * limit_bytes:
        limit_bytes = None
    frame = _Frame(
        width=width,
        height=height,
        fastest_s=min(seconds) / 1.08,
        slowest_s=max(seconds) * 1.08,
        most_bytes=max(*sizes, limit_bytes or 0.0, 1.0) * 1.06,
    )
    parts = [_axes(frame, limit_bytes)]
    for devices in kind:
        front = sorted(
            (p.step_time_s, p.peak_memory_bytes)
            for p in points
            if p.devices == devices and p.on_front and p.step_time_s > 0
        )
        if len(front) > 1:
            line = " ".join(f"{frame.x(a):.1f},{frame.y(b):.1f}" for a, b in front)
            parts.append(f'<polyline class="front" points="{line}"/>')
    # The chosen one last, so that nothing lies on top of it.
    parts += [
        _point(frame, point, kind[point.devices])
        for point in sorted(points, key=lambda p: (p.origin == "chosen", p.origin))
        if point.step_time_s > 0
    ]
    title = "Step time against peak memory of the strategies that fit"
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="group" '
        f'aria-label="{title}">{"".join(parts)}</svg>'
    )


def _point(frame: _Frame, point: ParetoPoint, kind: int) -> str:
    x, y = frame.x(point.step_time_s), frame.y(point.peak_memory_bytes)
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


def _axes(frame: _Frame, limit_bytes: float | None) -> str:
    right, floor = frame.width - frame.right, frame.height - frame.bottom
    parts = []
    for size in ticks(0, frame.most_bytes, 5):
        y = frame.y(size)
        parts.append(
            f'<line class="rule" x1="{frame.left}" x2="{right}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text x="{frame.left - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{escape(format_bytes(size) if size else "0")}</text>'
        )
    for seconds in _seconds_ticks(frame, 56):
        x = frame.x(seconds)
        parts.append(
            f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" '
            f'y2="{floor + 5}"/><text x="{x:.1f}" y="{floor + 19}" '
            f'text-anchor="middle">{escape(format_seconds(seconds))}</text>'
        )
    parts.append(
        f'<line class="axis" x1="{frame.left}" x2="{right}" y1="{floor}" y2="{floor}"/>'
        f'<text x="{(frame.left + right) / 2:.0f}" y="{frame.height - 6}" '
        f'text-anchor="middle">step time (logarithmic)</text>'
    )
    if limit_bytes:
        y = frame.y(limit_bytes)
        parts.append(
            f'<line class="limit" x1="{frame.left}" x2="{right}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text class="strong" x="{right}" y="{y - 5:.1f}" '
            f'text-anchor="end">limit of a device</text>'
        )
    return "".join(parts)


def steps_figure(predicted_s: float, run: MeasuredData) -> str:
    """The steps of a run as bars, and the prediction as a line."""
    steps = run.step_times_s[:_MOST_STEPS]
    most = max(*steps, predicted_s) * 1.1 or 1.0
    return "".join(
        f'<div class="{css}">{_steps(steps, predicted_s, run, most, width)}</div>'
        for css, width in (("wide", 900), ("narrow", 350))
    )


def _steps(
    steps: Sequence[float],
    predicted_s: float,
    run: MeasuredData,
    most: float,
    width: float,
) -> str:
    left, floor, high = 62.0, 140.0, 122.0
    each = (width - left - 16) / len(steps)
    parts = []
    for seconds in ticks(0, most, 3):
        y = floor - seconds / most * high
        parts.append(
            f'<line class="rule" x1="{left}" x2="{width - 16}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/><text x="{left - 8}" y="{y + 4:.1f}" '
            f'text-anchor="end">{escape(format_seconds(seconds) if seconds else "0")}'
            f"</text>"
        )
    bar = min(max(each * 0.7, 1.0), 36.0)
    for index, seconds in enumerate(steps):
        size = seconds / most * high
        css = "warm" if index < run.warm_up_steps else "c0"
        tip = escape(f"step {index + 1}\n{format_seconds(seconds)}")
        parts.append(
            f'<rect class="{css}" x="{left + (index + 0.5) * each - bar / 2:.1f}" '
            f'y="{floor - size:.1f}" width="{bar:.1f}" height="{size:.1f}" '
            f'data-tip="{tip}"/>'
        )
    y = floor - predicted_s / most * high
    parts.append(
        f'<line class="limit" x1="{left}" x2="{width - 16}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{(left + width - 16) / 2:.0f}" y="162" text-anchor="middle">'
        f"step of the run, first to last</text>"
    )
    return (
        f'<svg viewBox="0 0 {width:.0f} 170" role="img" '
        f'aria-label="Measured time of each step">{"".join(parts)}</svg>'
    )
