"""The two figures that the page's script draws, and what they say without it."""

from __future__ import annotations

from collections.abc import Sequence

from planner.report.data import ReportData
from planner.report.markup import (
    absent,
    details,
    escape,
    figure,
    legend,
    note,
    table,
)
from planner.report.payload import rows_apart
from planner.report.timeline import SPAN_KINDS
from planner.units import format_seconds

__all__ = ["devices_pane", "timeline_body"]

_BUTTONS = (
    ("closer", "+", "Zoom in"),
    ("farther", "−", "Zoom out"),
    ("left", "◀", "Earlier"),
    ("right", "▶", "Later"),
    ("whole", "Whole step", "Show the whole step"),
)
_NO_SCRIPT = "<noscript><p>This figure needs JavaScript.</p></noscript>"


def devices_pane(report: ReportData, index: int) -> str:
    """The device grid, coloured by the axis that one picks."""
    grid = report.grid
    hosts = len(set(grid.host.tolist()))
    used = report.header.devices_used
    axes = ", ".join(f"{a} {d}" for a, d in grid.degrees.items() if d > 1) or "no axis"
    words = (
        f"{len(grid):,} devices on {hosts:,} {'host' if hosts == 1 else 'hosts'}, "
        f"{used:,} used; degrees: {axes}"
    )
    ep = (
        f" The {grid.ep} innermost devices of dp_shard x cp share the experts (ep)."
        if grid.ep > 1
        else ""
    )
    return figure(
        '<div class="tools"><span class="named">Colour by</span></div>'
        '<ul class="legend" aria-label="Legend"></ul>'
        f'<div><canvas class="grid" data-plan="{index}" tabindex="0" role="img" '
        f'aria-label="{escape(words)}. Arrow keys go from device to device."></canvas>'
        f"</div>{_NO_SCRIPT}",
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
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{escape(name)}" '
        f'title="{escape(name)}">{text}</button>'
        for act, text, name in _BUTTONS
    )
    tools = f'<div class="tools">{buttons}<output aria-live="polite"></output></div>'
    for index, (report, name) in enumerate(zip(reports, names, strict=True)):
        head = ""
        if name:
            letter, _, rest = name.partition(" ")
            head = f'<h3><span class="tag">{escape(letter)}</span>{escape(rest)}</h3>'
        shown = _timeline(report, index, tools, most_spans)
        body += f'<div class="pane">{head}{shown}</div>'
    return f'<div class="stack">{body}</div>'


def _timeline(report: ReportData, index: int, tools: str, most_spans: int) -> str:
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
    every = rows_apart(timeline, most_spans)
    if every > 1:
        caption += (
            f" One pp rank in {every} is drawn, so that the page stays small; the "
            f"table has all."
        )
    warned = note(timeline.caveat) if timeline.caveat else ""
    return (
        warned
        + figure(
            f'{tools}<div><canvas class="timeline" data-plan="{index}" tabindex="0" '
            f'role="img" aria-label="{escape(words)}. Plus and minus zoom, arrow keys '
            f'move, 0 shows all of it."></canvas></div>{_NO_SCRIPT}',
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
