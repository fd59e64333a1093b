"""The page of job streams: one HTML file that needs nothing else."""

from __future__ import annotations

import math

from planner.report.markup import (
    amount,
    canvas,
    chips,
    details,
    escape,
    figure,
    framed_page,
    json_block,
    legend,
    note,
    page_top,
    section,
    text_table,
    tiles,
    titled,
    zoom_tools,
)
from planner.report.stream.build import StreamReport
from planner.report.stream.payload import MOST_JOBS, shown_streams, stream_payload
from planner.report.stream.tables import (
    CALLED,
    duration,
    happened,
    models_table,
    percent,
    policies_table,
    streams_table,
    title,
)
from planner.schema.stream import OUTCOMES

__all__ = ["SECTIONS", "stream_page"]

_SCRIPTS = (
    "colours.js",
    "view.js",
    "stream.js",
    "gantt.js",
    "jobs.js",
    "stream_main.js",
    "frame.js",
)
#: Anchors of the sections and what the list at the top calls them.
SECTIONS = {
    "happened": "What happened",
    "policies": "Side by side",
    "blocking": "Blocking rate",
    "cluster": "Who ran where",
    "use": "Devices in use",
    "models": "By model",
    "jobs": "Jobs",
}
#: Hosts have rows of their own where there are more devices.
_MOST_DEVICE_ROWS = 64
_KEYS = "Plus and minus zoom, arrow keys move, 0 shows all of it."
_HOW = (
    "Zoom by wheel after a click, by pinching, by + and −; drag or use arrow keys to "
    "move. All figures show the same time."
)


def stream_page(report: StreamReport, *, most_jobs: int = MOST_JOBS) -> str:
    """The report of streams, of one policy or of several side by side.

    Args:
        report: Report of all streams.
        most_jobs: Largest number of jobs that are drawn and listed, of all records.
    """
    return framed_page(
        version=report.version,
        title=f"{title(report)} on {report.first.cluster.name}",
        styles=("report.css", "stream.css"),
        scripts=_SCRIPTS,
        header=_header(report, most_jobs),
        main=_main(report, most_jobs),
        footer=_footer(report),
        data=json_block("streams", stream_payload(report, most_jobs)),
    )


def _header(report: StreamReport, most_jobs: int) -> str:
    cluster = escape(report.first.cluster.name)
    return page_top(
        "Policies side by side" if len(report.policies) > 1 else "Job stream",
        f"{escape(title(report))} <small>on {cluster}</small>",
        chips(report.policies, "Policies") + _tiles(report),
        {
            anchor: name
            for anchor, name in SECTIONS.items()
            if anchor != "policies" or _compares(report)
        },
        _picker(report, most_jobs),
    )


def _compares(report: StreamReport) -> bool:
    return len(report.policies) > 1 or len(report.streams) > 1


def _tiles(report: StreamReport) -> str:
    """The figures of the best policy."""
    if not report.totals:
        return ""
    best = min(report.totals, key=lambda one: one.rate)
    many = len(report.policies) > 1
    sums = best.sums
    jobs = sum(len(stream.runs[0]) for stream in report.streams)
    speed = sums["mean_speedup"]
    entries = [
        (
            "Jobs",
            f"{jobs:,}",
            f"{len(report.streams)} "
            f"{'stream' if len(report.streams) == 1 else 'streams'}",
        ),
        (
            "Blocked",
            percent(best.rate).replace("%", " %"),
            best.name if many else "of those that arrived",
        ),
        (
            "Mean completion",
            duration(sums["mean_jct_s"]) or "none ended",
            "" if math.isnan(speed) else f"{speed:.3g} times faster than on one device",
        ),
        (
            "Devices in use",
            f"{sums['utilisation']:.0%}".replace("%", " %"),
            f"of {report.first.cluster.num_usable:,}",
        ),
    ]
    return tiles((name, amount(value), escape(under)) for name, value, under in entries)


def _picker(report: StreamReport, most_jobs: int) -> str:
    """List of streams, to pick the one that the figures show."""
    shown = shown_streams(report, most_jobs)
    if len(report.streams) == 1:
        return ""
    options = "".join(
        f'<option value="{index}">{escape(stream.name)}</option>'
        for index, stream in enumerate(shown)
    )
    left = len(report.streams) - len(shown)
    more = f" {left} more are in the tables alone." if left else ""
    return (
        f'<p class="picker"><label>Figures of <select id="stream">{options}</select>'
        f"</label>{escape(more)}</p>"
    )


def _main(report: StreamReport, most_jobs: int) -> str:
    parts = [
        section(
            "happened",
            "What happened",
            "",
            f'<p class="why">{escape(happened(report))}</p>{_caveats(report)}',
        )
    ]
    if _compares(report):
        body = ""
        if report.totals:
            body = titled(text_table(policies_table(report), cards=True), "")
        per = titled(text_table(streams_table(report)), "")
        body += details(f"Each stream ({len(report.streams)})", per)
        parts.append(section("policies", "Side by side", "", body))
    parts += [
        section("blocking", "Blocking rate over time", "", _blocking_body(report)),
        section("cluster", "Who ran where", "", _cluster_body(report, most_jobs)),
        section("use", "Devices in use", "", _use_body(report)),
        section(
            "models",
            "By model",
            "",
            titled(text_table(models_table(report), cards=True), ""),
        ),
        section("jobs", "Every job", "", _jobs_body(report, most_jobs)),
    ]
    return "\n".join(parts)


def _caveats(report: StreamReport) -> str:
    left = len(report.streams) - len(report.common)
    if not left:
        return ""
    return note(
        f"{left} of {len(report.streams)} streams were not decided by every policy; "
        f"means are over the {len(report.common)} that were."
    )


def _footer(report: StreamReport) -> str:
    first = report.first
    rules = (
        "the replay of the RAMP benchmark"
        if first.world == "job-stream"
        else "the world on any cluster, with shared links"
    )
    weights = sorted({r.record.weights for r in report.runs if r.record.weights})
    told = f"World: {rules}. Cluster: {first.cluster.name}."
    if weights:
        told += f" Weights: {', '.join(weights)}."
    return (
        f"<footer><p>{escape(told)} Written by Meshwright "
        f"{escape(report.version)}.</p></footer>"
    )


def _canvas(kind: str, name: str, **place: int) -> str:
    return canvas("timeline", name, _KEYS, chart=kind, **place)


def _most_runs(report: StreamReport) -> int:
    return max(len(stream.runs) for stream in report.streams)


def _lines_legend(report: StreamReport) -> str:
    lines = ((f"p{index % 8}", name) for index, name in enumerate(report.policies))
    return legend(lines, name="Policies", mark="line")


def _pane(index: int, body: str, many: bool) -> str:
    head = f'<h3 data-name="{index}"></h3>' if many else ""
    return f'<div class="pane" data-pane="{index}">{head}{body}</div>'


def _causes_legend(report: StreamReport) -> str:
    causes = dict.fromkeys(report.first.blocked)
    return legend(((f"o-{cause}", CALLED[cause]) for cause in causes), name="Causes")


def _blocking_body(report: StreamReport) -> str:
    """Rates of all policies in one figure, then each policy's by cause."""
    many = len(report.policies) > 1
    body = ""
    if many:
        body = figure(
            _lines_legend(report)
            + zoom_tools("stream")
            + _canvas("rate", "Blocking rate so far of each policy"),
            "Jobs blocked so far over jobs arrived so far.",
        )
    for index in range(_most_runs(report)):
        shown = figure(
            ("" if many else zoom_tools("stream"))
            + _causes_legend(report)
            + _canvas(
                "causes", "Jobs blocked in each window of time, by cause", run=index
            ),
            "Columns are jobs blocked over jobs arrived in a window of time, by cause; "
            f"the line is the rate up to then. {_HOW}",
        )
        body += _pane(index, shown, many)
    return f'<div class="stack">{body}</div>'


def _cluster_body(report: StreamReport, most_jobs: int) -> str:
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
            zoom_tools("stream", switch if not index else "")
            + f'<ul class="legend" data-legend="{index}" aria-label="Legend"></ul>'
            + _canvas("gantt", words, run=index),
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


def _use_body(report: StreamReport) -> str:
    """Devices that jobs held, of all policies in one figure."""
    legend = _lines_legend(report) if len(report.policies) > 1 else ""
    return figure(
        legend + zoom_tools("stream") + _canvas("use", "Devices that jobs held"),
        f"Devices that jobs held, of those there are. {_HOW}",
    )


def _thinned(report: StreamReport, most_jobs: int) -> bool:
    shown = shown_streams(report, most_jobs)
    return sum(len(run) for stream in shown for run in stream.runs) > most_jobs


def _jobs_body(report: StreamReport, most_jobs: int) -> str:
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
