"""The sections of the page that are tables and bars, one pane a plan."""

from __future__ import annotations

from collections.abc import Sequence

from planner.report.data import MEMORY_CATEGORIES, ReportData, memory_parts
from planner.report.figures import (
    breakdown_figure,
    limit_is_near,
    memory_figure,
    memory_name,
    pareto_figure,
    steps_figure,
)
from planner.report.markup import (
    absent,
    details,
    escape,
    figure,
    legend,
    note,
    table,
    text_table,
)
from planner.report.tables import (
    contenders_table,
    measured_table,
    regimes_table,
    runners_up_table,
)
from planner.units import format_bytes, format_seconds

__all__ = [
    "breakdown_pane",
    "measured_pane",
    "memory_pane",
    "others_pane",
    "pareto_pane",
]

#: Measured rows that are shown one by one.
_MOST_RANKS = 64


def memory_pane(report: ReportData, peers: Sequence[ReportData]) -> str:
    """Every pp rank's devices: what fills them, and their limit; one scale for all."""
    rows = report.memory
    every = [row for peer in peers for row in peer.memory]
    kinds = sorted({row.device_type for row in rows})
    there = [
        part
        for part in MEMORY_CATEGORIES
        if any(memory_parts(row)[part] > 0 for row in rows)
    ]
    numbers = table(
        ("pp rank", "device", *there, "total", "limit"),
        [
            (
                f"{row.rank}",
                escape(row.device_type),
                *(escape(format_bytes(memory_parts(row)[part])) for part in there),
                escape(format_bytes(row.total_bytes)),
                escape(format_bytes(row.limit_bytes)),
            )
            for row in rows
        ],
        caption="Peak memory of each device, by pp rank",
        numbers=range(2, 4 + len(there)),
    )
    keys = legend((f"m-{part}", memory_name(part)) for part in there)
    return figure(
        keys + memory_figure(report, every),
        (
            "The line is what may be used of a device"
            if limit_is_near(every)
            else "What may be used of a device is far more than bars have room for"
        )
        + (f" ({kinds[0]})" if len(kinds) == 1 else "")
        + ". All devices of a pp rank hold the same.",
    ) + details("The numbers", numbers)


def breakdown_pane(report: ReportData, peers: Sequence[ReportData]) -> str:
    """Parts of the step on its critical path, largest first."""
    if not report.breakdown:
        return absent("The plan does not say what its step is made of.")
    largest = max(part.seconds for peer in peers for part in peer.breakdown)
    bound = report.plan.provenance.bound_by
    return figure(
        breakdown_figure(report.breakdown, largest),
        "Seconds of one step on its critical path; they sum to the step time."
        + (f" Bound by {bound}." if bound else ""),
    )


def others_pane(report: ReportData) -> str:
    """Runners-up and why they lost; the best strategy of each partitioner."""
    provenance = report.plan.provenance
    if provenance.alternatives:
        body = text_table(runners_up_table(report), cards=True)
    else:
        body = absent("The plan names no other strategies: this one was given.")
    if provenance.regimes:
        body += text_table(regimes_table(report), cards=True)
    if provenance.contenders:
        body += details(
            f"Results of the partitioners ({len(provenance.contenders)})",
            text_table(contenders_table(report), cards=True),
        )
    return body


def pareto_pane(report: ReportData, peers: Sequence[ReportData]) -> str:
    """Step time against memory and devices of all priced strategies."""
    points = sorted(
        report.pareto, key=lambda p: (-p.devices, p.step_time_s, p.peak_memory_bytes)
    )
    won = next(i for i, point in enumerate(points) if point.origin == "chosen")
    numbers = table(
        ("strategy", "devices", "step", "memory", "priced", "beaten"),
        [
            (
                f"<code>{escape(point.label)}</code>",
                f"{point.devices:,}",
                escape(format_seconds(point.step_time_s)),
                escape(format_bytes(point.peak_memory_bytes)),
                escape(point.origin),
                "no" if point.on_front else "yes",
            )
            for point in points
        ],
        caption="Points of the figure; beaten: another one is at once as fast, as "
        "small and on as few devices",
        numbers=(1, 2, 3),
        won=won,
        classes={0: "label"},
        cards=True,
    )
    why = report.missing.get("pareto")
    told = note(f"Only what the plan itself knows is shown. {why}") if why else ""
    return (
        told
        + figure(
            pareto_figure(report, [p for peer in peers for p in peer.pareto]),
            "Every point is a strategy that fits; down and to the left is better. "
            "Small points are priced by closed forms with stages cut evenly, which is "
            "within some percent of the simulator.",
        )
        + details(f"The points ({len(points)})", numbers)
    )


def measured_pane(report: ReportData) -> str:
    """A run beside the prediction."""
    run = report.measured
    if run is None:
        return absent(report.missing.get("measured", ""))
    body = note(run.caveat) if run.caveat else ""
    body += figure(
        text_table(measured_table(run, _MOST_RANKS))
        + steps_figure(report.plan.prediction.step_time_s, run),
        "Memory is what tensors hold, without context and allocator. Bars are the "
        "steps of the run, grey ones warm-up; the line is the prediction.",
    )
    if run.environment:
        listed = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
            for name, value in run.environment.items()
        )
        body += details(
            "Where it ran",
            f'<div class="scroll"><table class="facts"><tbody>{listed}</tbody></table>'
            "</div>",
        )
    return body
