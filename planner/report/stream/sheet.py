"""Figures of one job stream on one sheet, for a column of a paper: PNG or SVG."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from planner.errors import PlanFileError
from planner.report.frame import asset
from planner.report.palette import palette
from planner.report.sheet import require_matplotlib, saved_sheet, sheet_style
from planner.report.stream.build import Stream, StreamReport
from planner.report.stream.curves import blocking, devices_in_use
from planner.report.stream.data import StreamData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_stream_sheet", "stream_sheet"]

#: A column of a paper of two columns, in inches; room left, right, and for a title.
_WIDTH, _LEFT, _RIGHT, _TITLE = 3.5, 0.42, 0.12, 0.3
#: Below a panel for its ticks, and for its legend too.
_TICKS, _LEGEND = 0.2, 0.45
#: Models in a line of the key, height of a line, and where it begins below bars.
_KEY_COLUMNS, _KEY_LINE, _KEY_BELOW = 3, 0.14, 0.2
_DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)))
#: Colours of models, as the page's.
_MODELS = (
    "forward",
    "backward-input",
    "optimizer",
    "backward-weight",
    "transfer",
    "backward",
    "communication",
    "reserve",
)
_HATCH = ("", "////", "----", "....")


@cache
def _line_colours() -> Mapping[str, str]:
    """Of policies, by the page's names; of the light theme."""
    found: dict[str, str] = {}
    for name, colour in re.findall(r"--(p\d):\s*(#\w{6});", asset("stream.css")):
        found.setdefault(name, colour)
    return found


def stream_sheet(report: StreamReport, form: Literal["png", "svg"]) -> bytes:
    """Blocking rate and devices in use of all policies, and who ran where.

    Args:
        report: Of one stream.
        form: Of the file.

    Raises:
        PlanFileError: If there are several streams, or matplotlib is not installed.
    """
    return saved_sheet(draw_stream_sheet(report), form)


def draw_stream_sheet(report: StreamReport) -> Figure:
    """The sheet as a figure of matplotlib's, to be changed further.

    Args:
        report: Of one stream.

    Raises:
        PlanFileError: If there are several streams, or matplotlib is not installed.
    """
    if len(report.streams) != 1:
        raise PlanFileError(
            f"a sheet of figures is of one stream, not of {len(report.streams)}; name "
            f"the records of one"
        )
    require_matplotlib()
    with sheet_style():
        return _figure(report, report.streams[0])


def _figure(report: StreamReport, stream: Stream) -> Figure:
    from matplotlib.figure import Figure

    from planner.report.panels import drawable

    head = textwrap.wrap(drawable(f"{stream.name} on {report.first.cluster.name}"), 48)
    top = 0.08 + 0.13 * len(head[:2])
    gantts = len(stream.runs)
    _, unit = _unit(report.first.horizon_s)
    panels = [
        (f"Blocking rate so far, {unit}", 1.1, _LEGEND),
        (f"Devices in use, {unit}", 0.9, _TICKS),
    ]
    high = min(max(0.06 * len(stream.runs[0].host_of_device), 0.8), 2.2)
    panels += [
        (drawable(f"Who ran where, {unit}: {run.name}")[:56], high, _TICKS + 0.05)
        for run in stream.runs
    ]
    tall = top + sum(_TITLE + size + below for _, size, below in panels)
    # The key of models is below the last one.
    rows = -(-len(report.first.models) // _KEY_COLUMNS)
    tall += 0.1 + _KEY_LINE * rows
    figure = Figure(figsize=(_WIDTH, tall))
    edge = 0.06 / _WIDTH
    figure.text(edge, 1 - 0.05 / tall, "\n".join(head[:2]), va="top", fontsize=7.5)
    for number, (title, size, below) in enumerate(panels):
        top += _TITLE
        figure.text(
            edge, 1 - (top - 0.07) / tall, title, fontsize=7.5, fontweight="bold"
        )
        wide = (_WIDTH - _LEFT - _RIGHT) / _WIDTH
        axes = figure.add_axes(
            (_LEFT / _WIDTH, 1 - (top + size) / tall, wide, size / tall)
        )
        if number < 2:
            _draw_lines(axes, stream, rate=number == 0)
        else:
            run = stream.runs[number - 2]
            _draw_bars(axes, run, high=size if number == gantts + 1 else None)
        top += size + below
    return figure


def _unit(horizon_s: float) -> tuple[float, str]:
    for size, name in ((86_400.0, "days"), (3_600.0, "hours"), (60.0, "minutes")):
        if horizon_s >= 2 * size:
            return size, name
    return 1.0, "seconds"


def _draw_lines(axes: Axes, stream: Stream, *, rate: bool) -> None:
    from planner.report.panels import drawable

    horizon_s = stream.runs[0].record.horizon_s
    unit_s, _ = _unit(horizon_s)
    colours = _line_colours()
    for number, run in enumerate(stream.runs):
        style: dict[str, Any] = {
            "color": colours[f"p{number % 8}"],
            "linestyle": _DASHES[number % len(_DASHES)],
            "linewidth": 0.9,
        }
        if rate:
            line = blocking(run)
            axes.plot(
                line.time_s / unit_s, line.rate, label=drawable(run.name), **style
            )
        else:
            use = devices_in_use(run, most=200)
            times = np.append(use.time_s, horizon_s) / unit_s
            values = np.append(use.value, use.value[-1:])
            axes.step(times, values, where="post", **style)
    axes.set_xlim(0, horizon_s / unit_s)
    axes.set_ylim(bottom=0)
    if rate:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.05, -0.16),
            ncols=min(3, len(stream.runs)),
        )


def _draw_bars(axes: Axes, run: StreamData, *, high: float | None) -> None:
    """Every job on each of its runs of devices; with a key if ``high`` is in inches."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    from planner.report.panels import drawable

    unit_s, _ = _unit(run.record.horizon_s)
    colours, keys = palette(), []
    sets, which = run.record.device_sets, run.record.jobs.devices
    for number, model in enumerate(run.record.models):
        corners = []
        for job in np.flatnonzero(run.ran & (run.model == number)).tolist():
            left, right = run.start_s[job] / unit_s, run.until_s[job] / unit_s
            for first, last in sets[which[job]]:
                low, up = first + 0.05, last + 0.95
                corners.append([(left, low), (left, up), (right, up), (right, low)])
        style: dict[str, Any] = {
            "facecolor": colours[_MODELS[number % len(_MODELS)]],
            "hatch": _HATCH[number // len(_MODELS) % len(_HATCH)],
        }
        # Vectors of ten thousands of bars make a file that no paper takes.
        axes.add_collection(
            PolyCollection(corners, linewidth=0, rasterized=True, **style)
        )
        if corners:
            keys.append(Patch(label=drawable(model.name), linewidth=0, **style))
    axes.set_xlim(0, run.record.horizon_s / unit_s)
    axes.set_ylim(len(run.host_of_device), 0)
    axes.set_ylabel("device")
    if high is not None:
        axes.legend(
            handles=keys,
            loc="upper left",
            bbox_to_anchor=(-0.05, -_KEY_BELOW / high),
            ncols=_KEY_COLUMNS,
        )
