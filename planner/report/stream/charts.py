"""What stands around the figures that the page's script draws."""

from __future__ import annotations

from planner.report.markup import escape, figure
from planner.report.stream.build import StreamReport
from planner.report.stream.payload import shown_streams
from planner.report.stream.words import CALLED
from planner.schema.stream import OUTCOMES

__all__ = ["blocking_body", "cluster_body", "jobs_body", "use_body"]

#: Hosts have rows of their own where there are more devices.
_MOST_DEVICE_ROWS = 64
_BUTTONS = (
    ("closer", "+", "Zoom in"),
    ("farther", "−", "Zoom out"),
    ("left", "◀", "Earlier"),
    ("right", "▶", "Later"),
    ("whole", "Whole stream", "Show the whole stream"),
)
_NO_SCRIPT = "<noscript><p>This figure needs JavaScript.</p></noscript>"
_KEYS = "Plus and minus zoom, arrow keys move, 0 shows all of it."
_HOW = (
    "Zoom by wheel after a click, by pinching, by + and −; drag or use arrow keys to "
    "move. All figures show the same time."
)


def _tools(*, more: str = "") -> str:
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{escape(name)}" '
        f'title="{escape(name)}">{text}</button>'
        for act, text, name in _BUTTONS
    )
    return (
        f'<div class="tools">{buttons}<output aria-live="polite"></output>{more}</div>'
    )


def _canvas(kind: str, words: str, place: int | None = None) -> str:
    which = "" if place is None else f' data-run="{place}"'
    return (
        f'<div><canvas class="timeline" data-chart="{kind}"{which} tabindex="0" '
        f'role="img" aria-label="{escape(words)}. {_KEYS}"></canvas></div>{_NO_SCRIPT}'
    )


def _most_runs(report: StreamReport) -> int:
    return max(len(stream.runs) for stream in report.streams)


def _lines_legend(report: StreamReport) -> str:
    items = "".join(
        f'<li><span class="line p{index % 8}"></span>{escape(name)}</li>'
        for index, name in enumerate(report.policies)
    )
    return f'<ul class="legend" aria-label="Policies">{items}</ul>'


def _pane(index: int, body: str, many: bool) -> str:
    head = f'<h3 data-name="{index}"></h3>' if many else ""
    return f'<div class="pane" data-pane="{index}">{head}{body}</div>'


def _causes_legend(report: StreamReport) -> str:
    items = "".join(
        f'<li><span class="swatch o-{cause}"></span>{escape(CALLED[cause])}</li>'
        for cause in dict.fromkeys(report.first.blocked)
    )
    return f'<ul class="legend" aria-label="Causes">{items}</ul>'


def blocking_body(report: StreamReport) -> str:
    """Rates of all policies in one figure, then each policy's by cause."""
    many = len(report.policies) > 1
    body = ""
    if many:
        body = figure(
            _lines_legend(report)
            + _tools()
            + _canvas("rate", "Blocking rate so far of each policy"),
            "Jobs blocked so far over jobs arrived so far.",
        )
    for index in range(_most_runs(report)):
        shown = figure(
            ("" if many else _tools())
            + _causes_legend(report)
            + _canvas("causes", "Jobs blocked in each window of time, by cause", index),
            "Columns are jobs blocked over jobs arrived in a window of time, by cause; "
            f"the line is the rate up to then. {_HOW}",
        )
        body += _pane(index, shown, many)
    return f'<div class="stack">{body}</div>'


def cluster_body(report: StreamReport, most_jobs: int) -> str:
    """Each policy's jobs as bars on the devices that they held."""
    many, cluster = len(report.policies) > 1, report.first.cluster
    rows = "device" if cluster.num_devices <= _MOST_DEVICE_ROWS else "host"
    switch = (
        '<span class="choice"><span class="named">Colour by</span>'
        '<button type="button" data-colour="model" aria-pressed="true">model</button>'
        '<button type="button" data-colour="outcome" aria-pressed="false">outcome'
        "</button></span>"
    )
    thinned = _thinned(report, most_jobs)
    body = ""
    for index in range(_most_runs(report)):
        words = f"Jobs on {cluster.num_devices} devices, a row a {rows}"
        shown = figure(
            _tools(more=switch if not index else "")
            + f'<ul class="legend" data-legend="{index}" aria-label="Legend"></ul>'
            + _canvas("gantt", words, index),
            f"A row is a {rows}; a bar is a job from start to end"
            + (
                ", as high as the share of the host that it held"
                if rows == "host"
                else ""
            )
            + f". Point at a bar, or tap it. {_HOW}"
            + (
                " Of a long stream the jobs that held most are drawn, and a sample of "
                "the others."
                if thinned
                else ""
            ),
        )
        body += _pane(index, shown, many)
    return f'<div class="stack">{body}</div>'


def use_body(report: StreamReport) -> str:
    """Devices that jobs held, of all policies in one figure."""
    legend = _lines_legend(report) if len(report.policies) > 1 else ""
    return figure(
        legend + _tools() + _canvas("use", "Devices that jobs held"),
        f"Devices that jobs held, of those there are. {_HOW}",
    )


def _thinned(report: StreamReport, most_jobs: int) -> bool:
    shown = shown_streams(report, most_jobs)
    return sum(len(run) for stream in shown for run in stream.runs) > most_jobs


def jobs_body(report: StreamReport, most_jobs: int) -> str:
    """The table that the script fills, with what picks and sorts its rows."""
    outcomes = "".join(
        f'<option value="{index}">{escape(CALLED[outcome])}</option>'
        for index, outcome in enumerate(OUTCOMES)
    )
    policy = ""
    if len(report.policies) > 1:
        policy = '<label>Policy <select data-pick="run"></select></label>'
    columns = "".join(
        f'<th scope="col" aria-sort="none" class="{css}">'
        f'<button type="button" data-sort="{key}">{escape(name)}</button></th>'
        for key, name, css in _COLUMNS
    )
    sampled = (
        " Of a long stream those that held most are listed, and a sample of the others."
        if _thinned(report, most_jobs)
        else ""
    )
    return (
        f'<div class="tools picks">{policy}'
        '<label>Outcome <select data-pick="outcome"><option value="">all</option>'
        f"{outcomes}</select></label>"
        '<label>Model <select data-pick="model"><option value="">all</option></select>'
        '</label><output data-jobs="count" aria-live="polite"></output></div>'
        '<div class="pane"><div class="scroll cards" tabindex="0" role="region" '
        'aria-label="Jobs"><table class="jobs"><caption>What became of every job.'
        f"{escape(sampled)} A heading sorts.</caption><thead><tr>{columns}</tr></thead>"
        "<tbody></tbody></table></div></div>"
        '<div class="tools paging"><button type="button" data-page="-1">Earlier page'
        '</button><output data-jobs="page"></output>'
        '<button type="button" data-page="1">Later page</button></div>'
        "<noscript><p>The list of jobs needs JavaScript.</p></noscript>"
    )


#: Key, heading and class of each column of the table of jobs.
_COLUMNS = (
    ("number", "job", "n"),
    ("model", "model", ""),
    ("outcome", "outcome", ""),
    ("arrival", "arrived", "n"),
    ("allowed", "may take", "n"),
    ("waited", "decided after", "n"),
    ("ran", "ran", "n"),
    ("asked", "asked for", "n"),
    ("held", "held", "n"),
    ("where", "devices", ""),
    ("plan", "plan", ""),
)
