"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from planner.report.charts import devices_pane, timeline_body
from planner.report.data import ReportData
from planner.report.frame import framed_page
from planner.report.markup import escape, json_block, section
from planner.report.overview import (
    beside,
    chosen_section,
    difference_section,
    page_header,
    titled,
)
from planner.report.payload import MOST_SPANS, payload
from planner.report.sections import (
    breakdown_pane,
    measured_pane,
    memory_pane,
    others_pane,
    pareto_pane,
)

__all__ = ["html_page"]

_SCRIPTS = (
    "colours.js",
    "view.js",
    "timeline.js",
    "grid.js",
    "main.js",
    "frame.js",
)


def html_page(
    reports: Sequence[ReportData],
    names: Sequence[str] = (),
    *,
    most_spans: int = MOST_SPANS,
) -> str:
    """The report of one plan, or of two side by side.

    Args:
        reports: One or two.
        names: Of two plans, for people: their files.
        most_spans: Of all timelines; of longer ones some rows are drawn.
    """
    called = [""]
    if len(reports) > 1:
        called = [f"{letter} {name}" for letter, name in zip("AB", names, strict=True)]
    data = [
        payload(report, name, most_spans // len(reports))
        for report, name in zip(reports, called, strict=True)
    ]
    return framed_page(
        version=reports[0].header.version,
        title=_title(reports),
        styles=("report.css",),
        scripts=_SCRIPTS,
        header=page_header(reports),
        main=_main(reports, called, most_spans // len(reports)),
        footer=_footer(reports),
        data=json_block("plans", data),
    )


def _title(reports: Sequence[ReportData]) -> str:
    first = reports[0].header
    if len(reports) == 1:
        return f"{first.model} on {first.cluster}: {first.label}"
    return f"{first.label} or {reports[1].header.label}"


def _main(reports: Sequence[ReportData], names: Sequence[str], most_spans: int) -> str:
    def panes(draw: Callable[[ReportData], str], *, stacked: bool = False) -> str:
        drawn = [
            titled(draw(report), name)
            for report, name in zip(reports, names, strict=True)
        ]
        return beside(drawn, stacked=stacked)

    memory, breakdown, pareto = (
        partial(draw, peers=reports)
        for draw in (memory_pane, breakdown_pane, pareto_pane)
    )
    grids = [
        titled(devices_pane(report, index), name)
        for index, (report, name) in enumerate(zip(reports, names, strict=True))
    ]
    parts = [
        chosen_section(reports, names),
        section("devices", "Devices", "", beside(grids)),
        section("memory", "Memory of each device", "", panes(memory)),
        section(
            "timeline",
            "One step in time",
            "",
            timeline_body(reports, names, most_spans),
        ),
        section("breakdown", "Where the time goes", "", panes(breakdown)),
        section(
            "others", "What else was considered", "", panes(others_pane, stacked=True)
        ),
        section("pareto", "Step time, memory and devices", "", panes(pareto)),
        section("measured", "Predicted and measured", "", panes(measured_pane)),
    ]
    if len(reports) > 1:
        parts.insert(0, difference_section(reports, names))
    return "\n".join(parts)


def _footer(reports: Sequence[ReportData]) -> str:
    told = []
    for report in reports:
        plan = report.plan
        constants = plan.provenance.calibration or "those of the cluster's document"
        told.append(
            f"{plan.model.name}, parameters {plan.model.fingerprint[:12]}; cluster "
            f"{plan.cluster.name}, {plan.cluster.fingerprint[:12]}; objective "
            f"{plan.provenance.objective}; constants: {constants}; made by Meshwright "
            f"{plan.provenance.meshwright_version}."
        )
    return f"<footer><p>{'<br>'.join(escape(text) for text in told)}</p></footer>"
