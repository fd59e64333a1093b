"""Streams in words and tables, for the page and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from planner.report.markdown import markdown_table, plain_text
from planner.report.stream.build import PolicyTotals, StreamReport
from planner.report.stream.data import StreamData
from planner.report.tables import TextTable
from planner.schema.stream import OUTCOMES, Outcome

__all__ = [
    "CALLED",
    "comparison",
    "duration",
    "happened",
    "models_table",
    "percent",
    "policies_table",
    "stream_markdown",
    "streams_table",
    "title",
]

#: Outcomes as a page calls them.
CALLED: Mapping[Outcome, str] = {
    "met": "met",
    "late": "late",
    "refused": "refused",
    "no_room": "no room",
    "unfinished": "unfinished",
    "undecided": "undecided",
}
_BLOCKED: Mapping[Outcome, str] = {
    "no_room": "found no room",
    "late": "could not be, or were not, in time",
    "refused": "were turned away although they could have run",
    "unfinished": "still ran at the end, which counts as blocked here",
    "undecided": "still waited",
    "met": "ran",
}


def duration(seconds: float) -> str:
    """Three digits, in seconds, minutes, hours or days; empty for NaN."""
    if math.isnan(seconds):
        return ""
    for size, unit in ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min")):
        if abs(seconds) >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def percent(share: float) -> str:
    """One digit after the point; empty for NaN."""
    return "" if math.isnan(share) else f"{share:.1%}"


def title(report: StreamReport) -> str:
    """Title of the report."""
    count = len(report.streams)
    if count == 1:
        return f"Job stream: {report.streams[0].name}"
    return f"{count} job streams"


def _listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if parts[1:] else parts)


def happened(report: StreamReport) -> str:
    """A paragraph: the streams, and what the first policy came to, or all of them."""
    first, many = report.first, len(report.streams)
    devices = first.cluster.num_usable
    opening = (
        f"{'A stream' if many == 1 else f'{many} streams'} of jobs "
        f"({'; '.join(s.name for s in report.streams[:6])}"
        f"{'; …' if many > 6 else ''}) on {first.cluster.name}, {devices:,} "
        f"{'device' if devices == 1 else 'devices'}, for "
        f"{duration(first.horizon_s)}{' each' if many > 1 else ''}."
    )
    if len(report.policies) > 1:
        return f"{opening} {comparison(report)}"
    return f"{opening} {_one(report)}"


def _one(report: StreamReport) -> str:
    arrived = sum(len(run) for run in report.runs)
    blocked = sum(run.num_blocked for run in report.runs)
    if not arrived:
        return "No job arrived."
    parts = []
    for outcome in sorted(
        set(report.first.blocked),
        key=lambda name: -sum(run.count(name) for run in report.runs),
    ):
        count = sum(run.count(outcome) for run in report.runs)
        if count:
            parts.append(f"{count:,} {_BLOCKED[outcome]}")
    why = f": {_listed(parts)}" if parts else ""
    told = (
        f"Under {report.policies[0]}, {blocked:,} of {arrived:,} jobs were blocked "
        f"({blocked / arrived:.1%}){why}."
    )
    sums = report.totals[0].sums
    if not math.isnan(sums["mean_jct_s"]):
        told += (
            f" Jobs that ended took {duration(sums['mean_jct_s'])} on average, "
            f"{sums['mean_speedup']:.3g} times faster than on one reference device."
        )
    else:
        told += " No job ended."
    return f"{told} Jobs held {sums['utilisation']:.0%} of the cluster's time."


def comparison(report: StreamReport) -> str:
    """Name the policy that blocks least, and by how much."""
    if not report.totals:
        return "No stream was decided by all policies, so that none is the better one."
    ranked = sorted(report.totals, key=lambda one: one.rate)
    best, worst = ranked[0], ranked[-1]
    count = len(report.common)
    over = f"Over the {count} streams that all" if count > 1 else "Of"
    over += f" {len(ranked)} policies{' decided' if count > 1 else ''}"
    if worst.rate == best.rate:
        return f"{over}, none blocks fewer jobs than another: {best.rate:.1%}."
    fewer = 1 - best.rate / ranked[1].rate if ranked[1].rate else 0.0
    by = f", {fewer:.0%} fewer than the next" if fewer >= 0.005 else ""
    return (
        f"{over}, {best.name} blocks the fewest jobs, {best.rate:.1%}{by}; "
        f"{_others(ranked)}."
    )


def _others(ranked: Sequence[PolicyTotals]) -> str:
    parts = [f"{one.name} {one.rate:.1%}" for one in ranked[1:4]]
    more = len(ranked) - 4
    if more > 0:
        parts.append(f"{more} more up to {ranked[-1].rate:.1%}")
    return _listed(parts)


def policies_table(report: StreamReport) -> TextTable:
    """Blocked jobs by cause, and times, of each policy over the common streams."""
    causes = tuple(dict.fromkeys(report.first.blocked))
    rows = []
    for one in report.totals:
        arrived = one.sums["arrived"] or math.nan
        speed = one.sums["mean_speedup"]
        rows.append(
            (
                one.name,
                percent(one.rate),
                *(percent(one.sums[cause] / arrived) for cause in causes),
                duration(one.sums["mean_jct_s"]),
                "" if math.isnan(speed) else f"{speed:.3g}",
                percent(one.sums["utilisation"]),
            )
        )
    rates = [one.rate for one in report.totals]
    best = min(rates, default=0.0)
    count = len(report.common)
    return TextTable(
        caption=f"Means over {count} {'stream' if count == 1 else 'streams'}",
        header=(
            "policy",
            "blocked",
            *(CALLED[cause] for cause in causes),
            "mean completion",
            "speed-up",
            "devices in use",
        ),
        rows=tuple(rows),
        won=rates.index(best) if rates.count(best) == 1 and len(rates) > 1 else None,
    )


def streams_table(report: StreamReport) -> TextTable:
    """Jobs of each stream, and the blocking rate of each policy."""
    rows = []
    for stream in report.streams:
        rates = {run.name: percent(run.blocking_rate) for run in stream.runs}
        rows.append(
            (
                stream.name,
                f"{len(stream.runs[0]):,}",
                *(rates.get(name, "") for name in report.policies),
            )
        )
    return TextTable(
        caption="Jobs that were blocked, of those that arrived",
        header=("stream", "jobs", *report.policies),
        rows=tuple(rows),
    )


def models_table(report: StreamReport) -> TextTable:
    """Outcomes and times of each model, of each policy over all its streams."""
    rows = []
    several = len(report.policies) > 1
    outcomes = [o for o in OUTCOMES if any(run.count(o) for run in report.runs)]
    for policy in report.policies:
        runs = [run for run in report.runs if run.name == policy]
        names = list(dict.fromkeys(m.name for r in runs for m in r.record.models))
        for name in names:
            picked = [(run, _of_model(run, name)) for run in runs]
            rows.append(
                (
                    *((policy,) if several else ()),
                    name,
                    *_model_row(picked, [OUTCOMES.index(o) for o in outcomes]),
                )
            )
    return TextTable(
        caption="Jobs by model",
        header=(
            *(("policy",) if several else ()),
            "model",
            "jobs",
            "blocked",
            *(CALLED[outcome] for outcome in outcomes),
            "devices held",
            "mean run",
            "mean completion",
        ),
        rows=tuple(rows),
        names=2 if several else 1,
    )


def _of_model(run: StreamData, name: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    names = np.array([model.name for model in run.record.models])
    picked: np.ndarray[tuple[int], np.dtype[np.bool_]] = (names == name)[run.model]
    return picked


def _model_row(
    picked: list[tuple[StreamData, np.ndarray[tuple[int], np.dtype[np.bool_]]]],
    outcomes: list[int],
) -> tuple[str, ...]:
    jobs = sum(int(mine.sum()) for _, mine in picked)
    blocked = sum(int(run.blocked[mine].sum()) for run, mine in picked)

    def mean(values: list[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> float:
        every = np.concatenate(values) if values else np.zeros(0)
        return float(every.mean()) if len(every) else math.nan

    held = mean([run.held[mine & run.ran].astype(float) for run, mine in picked])
    ran = mean([(run.end_s - run.start_s)[mine & run.ended] for run, mine in picked])
    took = mean([(run.end_s - run.arrival_s)[mine & run.ended] for run, mine in picked])
    counts = [
        sum(int((run.outcome[mine] == outcome).sum()) for run, mine in picked)
        for outcome in outcomes
    ]
    return (
        f"{jobs:,}",
        percent(blocked / jobs) if jobs else "",
        *(f"{count:,}" for count in counts),
        "" if math.isnan(held) else f"{held:.3g}",
        duration(ran),
        duration(took),
    )


def stream_markdown(report: StreamReport) -> str:
    """Write summary, policies side by side, streams and models; no figures.

    Args:
        report: Report of all streams.
    """
    cluster = plain_text(report.first.cluster.name)
    parts = [
        f"## {plain_text(title(report))} on {cluster}",
        plain_text(happened(report)),
    ]
    if report.totals:
        parts.append(_part("Policies", policies_table(report)))
    if len(report.streams) > 1:
        parts.append(_part("Streams", streams_table(report)))
    parts.append(_part("Models", models_table(report)))
    parts.append(f"<sub>Meshwright {plain_text(report.version)}</sub>")
    return "\n\n".join(parts) + "\n"


def _part(heading: str, told: TextTable) -> str:
    return f"### {heading}\n\n{plain_text(told.caption)}.\n\n{markdown_table(told)}"
