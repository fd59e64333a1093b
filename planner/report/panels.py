"""The panels of the sheet of figures, each drawn into axes of matplotlib's."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.report.data import MEMORY_CATEGORIES, ReportData
from planner.report.figures import ticks
from planner.report.palette import palette
from planner.report.timeline import SPAN_KINDS, TimelineRow
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BELOW_IN",
    "draw_breakdown",
    "draw_memory",
    "draw_pareto",
    "draw_timeline",
    "drawable",
]

#: From the foot of a panel to its legend, in inches: ticks and their unit.
BELOW_IN = 0.34
#: From so many blocks on they are pixels, also in SVG.
_MOST_SHAPES = 4000
#: Narrower or lower blocks have no number, in inches.
_ROOM_IN = 0.115
#: Limits are left out where they would be far off the scale.
_FAR_BARS, _FAR_POINTS = 0.1, 0.25
_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6))
#: Colour of each category of memory, where it is not its name.
_MEMORY = {"optimizer": ("states", "optimizer states")} | {
    "reserve": ("reserve", "context, allocator")
}
_PARTS = {
    "compute": "forward",
    "recompute": "forward",
    "pipeline_transfer": "transfer",
    "pipeline_bubble": "idle-mark",
    "shared_cores": "idle-mark",
    "optimizer": "optimizer",
}
_COUNTS = (
    ("o", "forward"),
    ("s", "backward-input"),
    ("^", "optimizer"),
    ("D", "backward-weight"),
)


def draw_timeline(axes: Axes, report: ReportData) -> None:
    """Each pp rank a row of blocks."""
    timeline = report.timeline
    if timeline is None:
        _absent(axes, report.missing["timeline"])
        return
    unit, scale = next(
        (one for one in _UNITS if timeline.step_time_s * one[1] >= 1), _UNITS[-1]
    )
    colours = palette()
    present = sorted({int(k) for row in timeline.rows for k in set(row.kind.tolist())})
    pixels = timeline.num_spans > _MOST_SHAPES
    for kind in present:
        name = SPAN_KINDS[kind]
        idle = name == "bubble"
        for place, row in enumerate(timeline.rows):
            mine = row.kind == kind
            axes.broken_barh(
                [
                    (begin * scale, (end - begin) * scale)
                    for begin, end in zip(
                        row.start_s[mine].tolist(),
                        row.end_s[mine].tolist(),
                        strict=True,
                    )
                ],
                (place - 0.42, 0.84),
                facecolor=colours["idle" if idle else name.replace(" ", "-")],
                edgecolor=colours["idle-mark" if idle else "paper"],
                linewidth=0 if idle or pixels else 0.3,
                label=name if place == 0 else "_",
                rasterized=pixels,
            )
    # Whoever comes first in the legend may not be in the first row.
    _number(axes, timeline.rows, scale, timeline.step_time_s)
    _ranks(axes, [row.rank for row in timeline.rows])
    axes.set_xlim(0, timeline.step_time_s * scale)
    axes.set_xlabel(unit)
    from matplotlib.patches import Patch

    keys = [
        Patch(
            facecolor=colours[
                "idle" if SPAN_KINDS[k] == "bubble" else SPAN_KINDS[k].replace(" ", "-")
            ],
            label=SPAN_KINDS[k],
        )
        for k in present
    ]
    _legend(axes, keys)


def _number(
    axes: Axes, rows: Sequence[TimelineRow], scale: float, step_s: float
) -> None:
    """Microbatches in the blocks that have room for them."""
    width, height = _size_in(axes)
    if height / max(len(rows), 1) < _ROOM_IN:
        return
    colours = palette()
    for place, row in enumerate(rows):
        for span in row.spans():
            long = (span.end_s - span.start_s) / step_s * width
            if span.microbatch < 0 or span.kind == "transfer" or long < _ROOM_IN:
                continue
            axes.text(
                (span.start_s + span.end_s) / 2 * scale,
                place,
                str(span.microbatch),
                ha="center",
                va="center_baseline",
                fontsize=5.5,
                color=colours[f"{span.kind.replace(' ', '-')}-ink"],
            )


def _size_in(axes: Axes) -> tuple[float, float]:
    """Width and height in inches."""
    box, sheet = axes.get_position(), axes.figure.bbox
    dots = axes.figure.dpi
    return box.width * sheet.width / dots, box.height * sheet.height / dots


def _ranks(axes: Axes, ranks: Sequence[int]) -> None:
    """Rank 0 on top; labels of as many as there is room for."""
    every = -(-len(ranks) // 8)
    axes.set_yticks(range(0, len(ranks), every), [str(r) for r in ranks[::every]])
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_ylabel("pp rank")
    axes.tick_params(axis="y", length=0)


def draw_memory(axes: Axes, report: ReportData) -> None:
    """Each pp rank a bar of what fills its devices; the line is their limit."""
    rows, colours = report.memory, palette()
    left = np.zeros(len(rows))
    for part in MEMORY_CATEGORIES:
        size = np.array([row.parts_bytes[part] for row in rows]) / 1e9
        if not size.any():
            continue
        colour, name = _MEMORY.get(part, (part, part))
        axes.barh(
            range(len(rows)),
            size,
            left=left,
            height=0.7,
            color=colours[colour],
            label=name,
        )
        left += size
    limits = np.array([row.limit_bytes for row in rows]) / 1e9
    fullest = float(left.max())
    if fullest >= _FAR_BARS * limits.max():
        place = np.arange(len(rows))
        axes.vlines(
            limits, place - 0.45, place + 0.45, colors=colours["ink"], label="limit"
        )
        axes.set_xlim(0, 1.04 * max(fullest, limits.max()))
        axes.set_xlabel("GB")
    else:
        axes.set_xlim(0, 1.04 * fullest)
        least = format_bytes(1e9 * float(limits.min()))
        axes.set_xlabel(f"GB; the limit, {least}, is off the scale")
    _ranks(axes, [row.rank for row in rows])
    _legend(axes)


def draw_breakdown(axes: Axes, report: ReportData) -> None:
    """Parts of the step on its critical path."""
    parts = report.breakdown
    if not parts:
        _absent(axes, "The plan does not say what its step is made of.")
        return
    colours = palette()
    seconds = [part.seconds for part in parts]
    axes.barh(
        range(len(parts)),
        seconds,
        height=0.7,
        color=[colours[_PARTS.get(part.part, "communication")] for part in parts],
        hatch=["////" if part.part == "recompute" else "" for part in parts],
        edgecolor=colours["paper"],
        linewidth=0,
    )
    for place, part in enumerate(parts):
        axes.text(
            part.seconds + 0.02 * seconds[0],
            place,
            f"{format_seconds(part.seconds)}, {part.share:.1%}",
            va="center_baseline",
        )
    axes.set_yticks(range(len(parts)), [drawable(part.name) for part in parts])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    # Room for the numbers beside the longest.
    axes.set_xlim(0, 1.75 * seconds[0])
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)


def draw_pareto(axes: Axes, report: ReportData) -> None:
    """Step time against memory; shapes and colours are numbers of devices."""
    points = [p for p in report.pareto if p.step_time_s > 0]
    colours = palette()
    counts = sorted({p.devices for p in points}, reverse=True)
    for index, count in enumerate(counts):
        marker, colour = _COUNTS[min(index, len(_COUNTS) - 1)]
        mine = [p for p in points if p.devices == count]
        front = sorted(
            (p.step_time_s, p.peak_memory_bytes / 1e9) for p in mine if p.on_front
        )
        axes.plot(
            [x for x, _ in front], [y for _, y in front], lw=0.6, color=colours["muted"]
        )
        axes.scatter(
            [p.step_time_s for p in mine],
            [p.peak_memory_bytes / 1e9 for p in mine],
            s=[10 if p.origin == "closed form" else 24 for p in mine],
            marker=marker,
            color=colours[colour],
            edgecolor=colours["ink"],
            linewidth=0.4,
            zorder=3,
            label=f"{count:,} {'device' if count == 1 else 'devices'}",
        )
    chosen = [p for p in points if p.origin == "chosen"]
    axes.scatter(
        [p.step_time_s for p in chosen],
        [p.peak_memory_bytes / 1e9 for p in chosen],
        s=90,
        facecolor="none",
        edgecolor=colours["ink"],
        linewidth=1,
        zorder=4,
        label="chosen",
    )
    _scales(axes, report)
    _legend(axes)


def _scales(axes: Axes, report: ReportData) -> None:
    """Logarithmic seconds with round ticks; the limit where it is near."""
    most = max((p.peak_memory_bytes for p in report.pareto), default=1.0) or 1.0
    limits = {row.limit_bytes for row in report.memory}
    if len(limits) == 1 and most >= _FAR_POINTS * (limit := limits.pop()):
        axes.axhline(limit / 1e9, color=palette()["ink"], lw=1, label="limit")
        most = max(most, limit)
    axes.set_ylim(0, 1.1 * most / 1e9)
    axes.set_ylabel("GB of a device")
    axes.set_xlabel("step time")
    seconds = [p.step_time_s for p in report.pareto if p.step_time_s > 0] or [1.0]
    low, high = min(seconds) / 1.15, max(seconds) * 1.15
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    places = [
        digit * 10.0**power
        for power in range(-7, 8)
        for digit in (1, 2, 5)
        if low <= digit * 10.0**power <= high
    ]
    if len(places) < 3:
        places = [place for place in ticks(low, high, 4) if place > 0]
    places = places[:: -(-len(places) // 6)]
    axes.set_xticks(places, [format_seconds(place) for place in places])
    axes.set_xticks([], minor=True)


def _legend(axes: Axes, handles: Sequence[Any] | None = None) -> None:
    """Below the panel, where it hides nothing."""
    width, height = _size_in(axes)
    place = (-0.3 / width, -BELOW_IN / height)
    more = {} if handles is None else {"handles": handles}
    axes.legend(loc="upper left", bbox_to_anchor=place, ncols=3, **more)


def _absent(axes: Axes, why: str) -> None:
    axes.axis("off")
    lines = textwrap.wrap(drawable(f"Not shown. {why}"), 52)[:5]
    axes.text(0, 1, "\n".join(lines), va="top", transform=axes.transAxes)


def drawable(text: str) -> str:
    """Without what the font has no sign for."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont("DejaVu Sans")).get_charmap()
    return "".join(
        " " if sign.isspace() else sign if ord(sign) in known else "\u25a1"
        for sign in text
    )
