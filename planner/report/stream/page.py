"""The page of job streams: one HTML file that needs nothing else."""

from __future__ import annotations

import math

from planner.report.frame import framed_page
from planner.report.markup import (
    details,
    escape,
    json_block,
    note,
    section,
    table,
)
from planner.report.stream.build import StreamReport
from planner.report.stream.charts import (
    blocking_body,
    cluster_body,
    jobs_body,
    use_body,
)
from planner.report.stream.payload import MOST_JOBS, shown_streams, stream_payload
from planner.report.stream.tables import (
    TextTable,
    models_table,
    policies_table,
    streams_table,
)
from planner.report.stream.words import duration, happened, percent, title

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


def stream_page(report: StreamReport, *, most_jobs: int = MOST_JOBS) -> str:
    """The report of streams, of one policy or of several side by side.

    Args:
        report: Of all streams.
        most_jobs: That are drawn and listed, of all records.
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
    links = "".join(
        f'<li><a href="#{anchor}">{escape(name)}</a></li>'
        for anchor, name in SECTIONS.items()
        if anchor != "policies" or _compares(report)
    )
    chips = "".join(f"<li>{escape(name)}</li>" for name in report.policies)
    kicker = "Policies side by side" if len(report.policies) > 1 else "Job stream"
    return (
        f'<header class="top"><div class="head"><div><p class="kicker">{kicker}</p>'
        f"<h1>{escape(title(report))} "
        f"<small>on {escape(report.first.cluster.name)}</small></h1></div>"
        f'<button type="button" id="theme" aria-label="Switch between light and dark">'
        f'Dark</button></div><ul class="chips" aria-label="Policies">{chips}</ul>'
        f"{_tiles(report)}"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
        f"{_picker(report, most_jobs)}</header>"
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
    tiles = [
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
    shown = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="figure">{_figure(value)}</dd>'
        f'<dd class="sub">{escape(under)}</dd></div>'
        for name, value, under in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _figure(text: str) -> str:
    """A number, with its unit in small."""
    number, _, unit = text.partition(" ")
    return f"{escape(number)} <small>{escape(unit)}</small>"


def _picker(report: StreamReport, most_jobs: int) -> str:
    """Which stream the figures below are of."""
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
            body = _html(policies_table(report), cards=True)
        per = _html(streams_table(report))
        body += details(f"Each stream ({len(report.streams)})", per)
        parts.append(section("policies", "Side by side", "", body))
    parts += [
        section("blocking", "Blocking rate over time", "", blocking_body(report)),
        section("cluster", "Who ran where", "", cluster_body(report, most_jobs)),
        section("use", "Devices in use", "", use_body(report)),
        section("models", "By model", "", _html(models_table(report), cards=True)),
        section("jobs", "Every job", "", jobs_body(report, most_jobs)),
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


def _html(told: TextTable, *, cards: bool = False) -> str:
    return f'<div class="pane">{_table(told, cards=cards)}</div>'


def _table(told: TextTable, *, cards: bool) -> str:
    return table(
        told.header,
        [tuple(escape(cell) for cell in row) for row in told.rows],
        caption=told.caption,
        numbers=range(told.names, len(told.header)),
        won=told.won,
        cards=cards,
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
