"""Tables of a queue's report as text, and the report as Markdown."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from planner.report.markdown import markdown_table, plain_text
from planner.report.queue.data import CAUSES, QueueReport
from planner.report.tables import TextTable
from planner.units import format_seconds

__all__ = [
    "SECTIONS",
    "causes_of",
    "causes_table",
    "costs_table",
    "holders_table",
    "jobs_table",
    "queue_markdown",
    "queue_sums",
    "queue_title",
    "runs_table",
]

#: Anchors of the sections and what the list at the top calls them.
SECTIONS = {
    "runs": "Blocked over load",
    "jobs": "Who ran when",
    "load": "Blocked over time",
    "guarantees": "Whose guarantee cost whom",
    "promises": "Jobs",
}
#: Causes of journals, and of elastic streams.
_OF_JOURNALS = ("alone", "load", "search", "input", "late", "broken", "failed")
_OF_STREAMS = ("alone", "declined", "late", "broken", "failure")
#: Rows of tables of the page; the last of longer ones.
_MOST_ROWS = 1000
#: Jobs that a row names.
_MOST_NAMED = 4


def queue_title(reports: Sequence[QueueReport]) -> str:
    """Title of a page."""
    first = reports[0]
    if not first.simulated:
        return f"Queue of {first.name}"
    names = first.name if len(reports) == 1 else first.name.removesuffix(first.label)
    return f"Elastic jobs of {names.rstrip(', ')}"


def causes_of(report: QueueReport) -> tuple[str, ...]:
    """Return the causes that a report can have."""
    return _OF_STREAMS if report.simulated else _OF_JOURNALS


def queue_sums(report: QueueReport) -> list[tuple[str, str, str]]:
    """Return name, figure and what is below it, of each figure."""
    promised = [job for job in report.jobs if job.promised]
    broken = sum(bool(job.broken) for job in promised)
    blocked = sum(bool(job.cause) for job in report.jobs)
    declined = sum(job.status == "declined" for job in report.jobs)
    done = sum(job.done for job in report.jobs)
    share = f"{blocked / len(report.jobs):.1%}, " if report.jobs else ""
    return [
        ("Jobs", f"{len(report.jobs):,}", f"{done:,} done"),
        ("Promised", f"{len(promised):,}", f"{broken:,} broken"),
        ("Blocked", f"{blocked:,}", f"{share}{declined:,} declined"),
        ("Launches", f"{len(report.bars):,}", ""),
    ]


def queue_markdown(reports: Sequence[QueueReport]) -> str:
    """The report as Markdown."""
    parts = [f"# {plain_text(queue_title(reports))}"]
    if len(reports) > 1:
        parts += [f"## {SECTIONS['runs']}", markdown_table(runs_table(reports))]
    for report in reports:
        if len(reports) > 1:
            parts.append(f"# {plain_text(report.name)}")
        head = (f"{name.lower()}: {value}" for name, value, _ in queue_sums(report))
        tables = [holders_table(report)] if report.simulated else []
        tables += [] if report.simulated else [costs_table(report)]
        parts += [
            ", ".join(head),
            f"## {SECTIONS['guarantees']}",
            *map(markdown_table, tables),
            f"## {SECTIONS['load']}",
            markdown_table(causes_table(report)),
            f"## {SECTIONS['promises']}",
            markdown_table(jobs_table(report)),
        ]
    return "\n\n".join(parts) + "\n"


def runs_table(reports: Sequence[QueueReport]) -> TextTable:
    """Blocked jobs of each run by cause."""
    causes = causes_of(reports[0])
    rows = []
    for report in reports:
        counts = Counter(job.cause for job in report.jobs)
        blocked = sum(counts[cause] for cause in causes)
        share = f"{blocked / len(report.jobs):.1%}" if report.jobs else ""
        rows.append(
            (
                *(report.label, f"{len(report.jobs):,}", share),
                *(f"{counts[cause]:,}" for cause in causes),
            )
        )
    return TextTable(
        caption="Blocked jobs of each run, by cause",
        header=("run", "jobs", "blocked", *(CAUSES[cause][0] for cause in causes)),
        rows=tuple(rows),
    )


def causes_table(report: QueueReport) -> TextTable:
    """Blocked jobs by cause, and the load when they were."""
    held, usable = report.held, report.devices
    loads: dict[str, list[float]] = defaultdict(list)
    for job in report.jobs:
        if job.cause and job.blocked_s is not None:
            most = _at(usable, job.blocked_s)
            loads[job.cause].append(_at(held, job.blocked_s) / most if most else 0.0)
    return TextTable(
        caption="Blocked jobs by cause",
        header=("cause", "jobs", "devices in use then"),
        rows=tuple(
            (CAUSES[cause][0], f"{len(loads[cause]):,}", _mean(loads[cause]))
            for cause in causes_of(report)
        ),
    )


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%}" if shares else ""


def _at(steps: Sequence[tuple[float, int]], at: float) -> int:
    found = bisect_right(steps, at, key=lambda step: step[0])
    return steps[found - 1][1] if found else 0


def holders_table(report: QueueReport) -> TextTable:
    """Jobs whose devices blocked jobs would have needed, by how many those are."""
    costs: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for job in report.jobs:
        for other in job.held_by:
            costs[other].append((job.name, len(job.held_by) == 1))
    promised = {job.name for job in report.jobs if job.promised}
    rows = []
    for name, found in sorted(costs.items(), key=lambda cost: -len(cost[1])):
        alone = sum(single for _, single in found)
        more = len(found) - _MOST_NAMED
        told = ", ".join(one for one, _ in found[:_MOST_NAMED])
        rows.append(
            (
                name,
                "promised" if name in promised else "none",
                f"{len(found):,}",
                f"{alone:,}",
                told + (f" and {more:,} more" if more > 0 else ""),
            )
        )
    return TextTable(
        caption="Jobs without whose devices blocked jobs would have been in time",
        header=("job", "promise", "blocked jobs", "by it alone", "which"),
        rows=tuple(rows[:_MOST_ROWS]),
        names=2,
        words=(4,),
    )


def costs_table(report: QueueReport) -> TextTable:
    """Changes that one job's promise cost another."""
    costs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for change in report.changes:
        known = costs[change["for"], change["job"]]
        again = change["kind"] == "resumed" and known and known[-1]["kind"] == "paused"
        if change["before"] or again:
            known.append(change)
    rows = []
    for (whose, whom), changes in costs.items():
        if not changes:
            continue
        kinds = Counter(each["kind"] for each in changes)
        told = ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
        rows.append((whose, whom, told, _still(changes), changes[0]["reason"]))
    return TextTable(
        caption="Changes of running jobs, by the job that they were decided for",
        header=("for", "job", "changes", "stands still", "first reason"),
        rows=tuple(rows),
        names=3,
        words=(4,),
    )


def _still(changes: Sequence[Mapping[str, Any]]) -> str:
    """Time for which the changes let a job stand still, its pauses included."""
    total, since = 0.0, None
    for each in changes:
        if since is not None:
            total += each["at_s"] - since
        since = each["at_s"] if each["kind"] == "paused" else None
        total += each["stall_s"]
    return format_seconds(total) + ("" if since is None else " and more")


def jobs_table(report: QueueReport) -> TextTable:
    """Jobs, their promises, and how these ended."""
    launches = Counter(bar.job for bar in report.bars)
    rows = []
    for job in report.jobs:
        due, end = job.deadline_s, job.end_s
        slack = ""
        if due is not None and end is not None and job.done:
            slack = (
                f"{format_seconds(abs(due - end))} {'late' if end > due else 'early'}"
            )
        promise = "broken" if job.broken else "promised" if job.promised else "none"
        count = f"{launches[job.name]:,}"
        told = job.broken or job.reason
        rows.append((job.name, job.status, promise, count, slack, told))
    more = len(rows) - _MOST_ROWS
    cut = f", the last {_MOST_ROWS:,} of {len(rows):,}" if more > 0 else ""
    return TextTable(
        caption=f"Jobs in the order of submission{cut}",
        header=("job", "status", "promise", "launches", "ended", "reason"),
        rows=tuple(rows[max(more, 0) :]),
        names=3,
        words=(4, 5),
    )
