"""Streams in words: what happened, and what outcomes and times are called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.report.stream.build import PolicyTotals, StreamReport
from planner.schema.stream import Outcome

__all__ = ["CALLED", "comparison", "duration", "happened", "percent", "title"]

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
    """What the report is of."""
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
    """Which of several policies blocks least, and by how much."""
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
