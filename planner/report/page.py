"""The page of a plan, or of two side by side: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from planner.report.canvas import MOST_SPANS, devices_pane, payload, timeline_body
from planner.report.data import ReportData, filled_share
from planner.report.markup import (
    amount,
    beside,
    chips,
    details,
    escape,
    framed_page,
    json_block,
    note,
    page_top,
    section,
    text_table,
    tiles,
    titled,
)
from planner.report.sections import (
    breakdown_pane,
    measured_pane,
    memory_pane,
    others_pane,
    pareto_pane,
)
from planner.report.svg import hatching
from planner.report.tables import differences_table
from planner.schema.describe import assumed_kernels, facts, paragraph
from planner.units import format_bytes, format_seconds

__all__ = ["SECTIONS", "html_page"]

#: Anchors of the sections and what the list at the top calls them.
SECTIONS = {
    "chosen": "What and why",
    "devices": "Devices",
    "memory": "Memory",
    "timeline": "Timeline",
    "breakdown": "Where the time goes",
    "others": "Runners-up",
    "pareto": "Time, memory, devices",
    "measured": "Measured",
}


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
        names: Names of two plans, for people: their files.
        most_spans: Largest number of spans of all timelines; of longer ones some rows
            are drawn.
    """
    called = [""]
    if len(reports) > 1:
        called = [f"{letter} {name}" for letter, name in zip("AB", names, strict=True)]
    data = [
        payload(report, name, most_spans // len(reports))
        for report, name in zip(reports, called, strict=True)
    ]
    return framed_page(
        version=reports[0].plan.provenance.meshwright_version,
        title=_title(reports),
        styles=("report.css",),
        scripts=_SCRIPTS,
        header=_header(reports),
        main=f'<svg class="defs" aria-hidden="true">{hatching()}</svg>'
        + _main(reports, called, most_spans // len(reports)),
        footer=_footer(reports),
        data=json_block("plans", data),
    )


def _title(reports: Sequence[ReportData]) -> str:
    first, label = reports[0].plan, reports[0].plan.strategy.label()
    if len(reports) == 1:
        return f"{first.model.name} on {first.cluster.name}: {label}"
    return f"{label} or {reports[1].plan.strategy.label()}"


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
        _chosen_section(reports, names),
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
        parts.insert(0, _difference_section(reports, names))
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


def _header(reports: Sequence[ReportData]) -> str:
    """Title, figures and list of sections."""
    links = dict(SECTIONS)
    kicker, title, under = "Plan", _heading(reports[0]), ""
    if len(reports) == 1:
        under = _strategy(reports[0]) + _tiles(reports[0])
    else:
        links = {"difference": "Side by side", **links}
        kicker = "Two plans side by side"
        if _heading(reports[1]) != title:
            title = " <small>and</small> ".join(map(_heading, reports))
    return page_top(kicker, title, under, links)


def _heading(report: ReportData) -> str:
    plan = report.plan
    return f"{escape(plan.model.name)} <small>on {escape(plan.cluster.name)}</small>"


def _strategy(report: ReportData) -> str:
    return chips(report.plan.strategy.label().split(), "Strategy")


def _tiles(report: ReportData) -> str:
    plan = report.plan
    head, mesh = plan.prediction, plan.strategy.mesh
    samples = f"{head.samples_per_s:,.2f}"
    speed = ("Samples per second", samples, "")
    if head.tokens_per_s is not None:
        speed = (
            "Tokens per second",
            f"{head.tokens_per_s:,.0f}",
            f"{samples} samples/s",
        )
    share = max(map(filled_share, report.memory))
    over = " over" if share > 1 else ""
    meter = (
        f'<div class="meter{over}" aria-hidden="true">'
        f'<i style="width:{min(share, 1):.1%}"></i></div>'
    )
    entries = [
        (
            "Step time",
            amount(format_seconds(head.step_time_s)),
            escape(_certainty(report)),
        ),
        speed,
        (
            "Peak device memory",
            amount(format_bytes(head.peak_memory_bytes)),
            f"{'under 1%' if share < 0.01 else f'{share:.0%}'} of its limit{meter}",
        ),
        (
            "Devices",
            f"{mesh.num_devices:,} <small>of {plan.cluster.num_devices:,}</small>",
            escape(plan.strategy.label().split(" zero")[0].split(" mb")[0]),
        ),
    ]
    if head.model_flops_utilization is not None:
        entries.insert(
            2,
            (
                "Model FLOPs utilization",
                f"{head.model_flops_utilization:.1%}".replace("%", " <small>%</small>"),
                "without recomputation",
            ),
        )
    return tiles(entries)


def _certainty(report: ReportData) -> str:
    """Say how the step time was found, and its interval where that is known."""
    head = report.plan.prediction
    told = "simulated" if head.fidelity == "simulated" else "by closed forms"
    if head.step_time_interval_s is None:
        return told
    low, high = (format_seconds(end) for end in head.step_time_interval_s)
    return f"{low} to {high} for 4 of 5 runs, {told}"


def _bulleted(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _chosen_section(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """The chosen strategy, and the reasons for it."""
    panes = []
    for report, name in zip(reports, names, strict=True):
        plan = report.plan
        rows = "".join(
            f'<tr><th scope="row">{escape(fact)}</th><td>{escape(text)}</td></tr>'
            for fact, text in facts(plan).items()
        )
        body = f'<p class="why">{escape(paragraph(plan))}</p>'
        body += "".join(
            note(f"Meshwright cannot run it itself: {reason}")
            for reason in plan.not_runnable
        )
        listed = (
            '<div class="scroll"><table class="facts"><caption>The plan in short'
            f"</caption><tbody>{rows}</tbody></table></div>"
        )
        body += details("The plan in short", listed) if len(reports) == 1 else listed
        for title, texts in (
            ("What the time rests on without measured runs", plan.prediction.leans_on),
            ("Fused kernels assumed", assumed_kernels(plan)),
            ("Assumed while reading the model", plan.provenance.assumptions),
        ):
            if texts:
                body += details(title, _bulleted(texts))
        panes.append(titled(body, name))
    return section("chosen", "What was chosen, and why", "", beside(panes))


def _difference_section(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """The figures of two plans in a table, and every field that differs."""
    labels = "".join(
        titled(_strategy(report), name)
        for report, name in zip(reports, names, strict=True)
    )
    body = f'<div class="panes">{labels}</div>'
    body += text_table(differences_table(reports, names))
    changes = reports[0].plan.diff(reports[1].plan)
    if changes:
        told = "".join(f"<li>{escape(text)}</li>" for text in changes)
        body += details(
            f"Every field that differs ({len(changes)})", f"<ul>{told}</ul>"
        )
    return section("difference", "Side by side", "", body)
