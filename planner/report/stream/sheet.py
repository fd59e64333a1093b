"""Figures of one job stream on one sheet, for a column of a paper."""

from __future__ import annotations

from typing import Literal

from planner.errors import PlanFileError
from planner.report.stream.build import Stream, StreamReport
from planner.report.stream.data import StreamData, blocking, devices_in_use
from planner.report.stream.payload import kept_jobs
from planner.report.svg import (
    SHEET_WIDTH,
    Drawing,
    Plane,
    block,
    blocks,
    key,
    label,
    png_or_svg,
    sheet,
    ticks,
    time_unit,
)

__all__ = ["stream_drawing", "stream_sheet"]

#: Jobs of a figure of who ran where; of more, the page's choice of them.
_MOST_JOBS = 10_000
_DASHES = ("none", "5 2", "1 1.5", "6 1.5 1 1.5")
#: Colours of models, and patterns over those that come after them, as the page's.
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
_HATCH = ("", "k-transfer", "k-backward", "k-communication")


def stream_sheet(report: StreamReport, form: Literal["png", "svg"]) -> bytes:
    """Blocking rate and devices in use of all policies, and who ran where, as a file.

    Args:
        report: Report of one stream.
        form: Format of the file; PNG has 300 dots an inch.

    Raises:
        PlanFileError: If there are several streams, or a PNG cannot be made.
    """
    return png_or_svg(stream_drawing(report), form)


def stream_drawing(report: StreamReport) -> str:
    """The sheet as SVG.

    Args:
        report: Report of one stream.

    Raises:
        PlanFileError: If there are several streams.
    """
    if len(report.streams) != 1:
        raise PlanFileError(
            f"a sheet of figures is of one stream, not of {len(report.streams)}; name "
            f"the records of one"
        )
    stream = report.streams[0]
    _, unit = time_unit(report.first.horizon_s)
    panels = [
        (
            f"Blocking rate so far, {unit}",
            [
                _rates(stream),
                key([_line_key(stream, i) for i in range(len(stream.runs))]),
            ],
        ),
        (f"Devices in use, {unit}", [_use(stream)]),
    ]
    panels += [
        (f"Who ran where, devices over {unit}: {run.name}"[:56], [_bars(run)])
        for run in stream.runs
    ]
    ran = {int(m) for run in stream.runs for m in set(run.model[run.ran].tolist())}
    panels[-1][1].append(
        key(
            [
                (_model_boxes(number, [(0, 2, 15, 11)]), model.name)
                for number, model in enumerate(report.first.models)
                if number in ran
            ]
        )
    )
    return sheet((f"{stream.name} on {report.first.cluster.name}",), panels)


def _plane(stream_s: float, high: float, y_range: tuple[float, float]) -> Plane:
    return Plane(
        left=42,
        right=SHEET_WIDTH - 10,
        top=6,
        floor=6 + high,
        x_range=(0.0, stream_s),
        y_range=y_range,
    )


def _time_axis(plane: Plane) -> str:
    horizon_s = plane.x_range[1]
    unit_s, _ = time_unit(horizon_s)
    places = ticks(0, horizon_s / unit_s, 5)
    return plane.x_axis([(place * unit_s, f"{place:g}") for place in places])


def _style(index: int) -> str:
    dash = _DASHES[index % len(_DASHES)]
    return (
        f'class="p{index % 8}" fill="none" stroke-width="1.2" stroke-dasharray="{dash}"'
    )


def _line_key(stream: Stream, index: int) -> tuple[str, str]:
    return f'<path d="M0 8h17" {_style(index)}/>', stream.runs[index].name


def _rates(stream: Stream) -> Drawing:
    """Blocked over arrived so far, of each policy."""
    lines = [blocking(run) for run in stream.runs]
    most = max((float(line.rate.max(initial=0.0)) for line in lines), default=0.0)
    plane = _plane(stream.runs[0].record.horizon_s, 105, (0.0, most * 1.05 or 1.0))
    body = plane.y_axis([(v / 100, f"{v:g}%") for v in ticks(0, most * 105, 5)])
    for index, line in enumerate(lines):
        pairs = zip(line.time_s.tolist(), line.rate.tolist(), strict=True)
        points = " ".join(f"{plane.x(t):.1f},{plane.y(r):.1f}" for t, r in pairs)
        body += f'<polyline points="{points}" {_style(index)}/>'
    return Drawing(
        body=body + _time_axis(plane), width=SHEET_WIDTH, height=plane.floor + 26
    )


def _use(stream: Stream) -> Drawing:
    """Devices that jobs of each policy held."""
    horizon_s = stream.runs[0].record.horizon_s
    lines = [devices_in_use(run, most=200) for run in stream.runs]
    most = max(float(line.value.max(initial=1.0)) for line in lines)
    plane = _plane(horizon_s, 85, (0.0, most * 1.05))
    body = plane.y_axis([(v, f"{v:g}") for v in ticks(0, most, 4)])
    for index, line in enumerate(lines):
        path = "".join(
            f"H{plane.x(time):.1f}V{plane.y(value):.1f}"
            for time, value in zip(
                line.time_s.tolist(), line.value.tolist(), strict=True
            )
        )
        start = f"M{plane.x(0):.1f} {plane.y(0):.1f}"
        body += f'<path d="{start}{path}H{plane.right}" {_style(index)}/>'
    return Drawing(
        body=body + _time_axis(plane), width=SHEET_WIDTH, height=plane.floor + 24
    )


def _model_boxes(number: int, boxes: list[tuple[float, float, float, float]]) -> str:
    """Boxes in the looks of a model."""
    hatch = _HATCH[number // len(_MODELS) % len(_HATCH)]
    return blocks(f"is-{_MODELS[number % len(_MODELS)]}", boxes, hatch)


def _bars(run: StreamData) -> Drawing:
    """Every job on each of its runs of devices, rows as high as devices."""
    count = len(run.host_of_device)
    high = min(max(5.8 * count, 76), 210)
    plane = _plane(run.record.horizon_s, high, (float(count), 0.0))
    body = block("idle", plane.left, plane.top, plane.right - plane.left, high)
    sets, which = run.record.device_sets, run.record.jobs.devices
    kept = kept_jobs(run, _MOST_JOBS)
    for number in range(len(run.record.models)):
        boxes = []
        for job in kept[(run.ran & (run.model == number))[kept]].tolist():
            left, right = plane.x(run.start_s[job]), plane.x(run.until_s[job])
            for first, last in sets[which[job]]:
                top, foot = plane.y(first + 0.05), plane.y(last + 0.95)
                boxes.append((left, top, right - left, foot - top))
        body += _model_boxes(number, boxes)
    body += "".join(
        label(plane.left - 8, plane.y(device + 0.5) + 3.5, f"{device:g}", "end")
        for device in ticks(0, count - 1, 4)
    )
    return Drawing(
        body=body + _time_axis(plane), width=SHEET_WIDTH, height=plane.floor + 26
    )
