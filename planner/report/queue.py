"""Report of a served queue's journal: who ran when, promises, and who was blocked."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner import __version__
from planner.admission.journal import Journal, JournalJob, JournalLaunch
from planner.errors import PlanFileError
from planner.report.markdown import markdown_table, plain_text
from planner.report.markup import (
    absent,
    escape,
    figure,
    framed_page,
    legend,
    page_top,
    section,
    text_table,
    tiles,
)
from planner.report.svg import Drawing, Plane, block, fitted, hatching, label, ticks
from planner.report.tables import TextTable
from planner.units import format_seconds

__all__ = ["QueueReport", "queue_markdown", "queue_page", "read_queue_report"]

#: Anchors of the sections and what the list at the top calls them.
SECTIONS = {
    "jobs": "Who ran when",
    "load": "Load and blocked jobs",
    "guarantees": "Whose guarantee cost whom",
    "promises": "Jobs",
}
_SCRIPTS = ("colours.js", "view.js", "frame.js")
_WIDTH, _ROW, _LEFT = 960.0, 18.0, 130.0
#: Jobs that the figure has rows for; the last of longer journals.
_MOST_ROWS = 200
#: Cause of a declined job to its words and its swatch.
_CAUSES: Mapping[str, tuple[str, str]] = {
    "alone": ("too slow even alone", "o-refused"),
    "load": ("more is due than devices can do", "o-no_room"),
    "search": ("no schedule was found", "o-undecided"),
    "input": ("wrong values", "k-bubble"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """A journal, as far as it has come.

    Attributes:
        name: Name of the journal, for people.
        start_s: Time of the first event.
        end_s: Time of the last event, or of the last promise.
        now_s: Time of the last event.
        jobs: Jobs.
        launches: Launches.
        changes: Changes that decisions made: a :class:`JobChange` and for whom.
        devices: Times, and the devices that jobs may have from each.
        held: Times, and the devices that jobs hold from each.
    """

    name: str
    start_s: float
    end_s: float
    now_s: float
    jobs: tuple[JournalJob, ...]
    launches: tuple[JournalLaunch, ...]
    changes: tuple[Mapping[str, Any], ...]
    devices: tuple[tuple[float, int], ...]
    held: tuple[tuple[float, int], ...]


def read_queue_report(folder: str) -> QueueReport:
    """Read the journal in a folder; a loop may go on writing to it.

    Raises:
        JournalError: If there is none, or it is damaged.
        PlanFileError: If nothing has happened yet.
    """
    journal = Journal(folder, None)
    try:
        events = journal.events()
        jobs, launches = tuple(journal.jobs()), tuple(journal.launches())
    finally:
        journal.close()
    if not events:
        raise PlanFileError(f"the journal in {folder} is empty; serve a queue first")
    start, now = events[0]["at_s"], events[-1]["at_s"]
    dues = [job.request.deadline_s or 0.0 for job in jobs if job.status == "active"]
    changes = (json.loads(each["text"]) for each in events if each["kind"] == "change")
    devices = [
        (each["at_s"], int(each["text"]))
        for each in events
        if each["kind"] == "devices"
    ]
    return QueueReport(
        name=folder,
        start_s=start,
        now_s=now,
        end_s=max([now, start + 1.0, *dues]),
        jobs=jobs,
        launches=launches,
        changes=tuple(changes),
        devices=tuple(devices),
        held=_held(launches, now),
    )


def _held(
    launches: Iterable[JournalLaunch], now: float
) -> tuple[tuple[float, int], ...]:
    steps: Counter[float] = Counter()
    for launch in launches:
        if launch.start_s is None:
            continue
        count = sum(launch.devices.values())
        steps[launch.start_s] += count
        steps[now if launch.end_s is None else launch.end_s] -= count
    found, total = [], 0
    for at in sorted(steps):
        total += steps[at]
        found.append((at, total))
    return tuple(found)


def queue_page(report: QueueReport) -> str:
    """The report as one HTML file that needs nothing else."""
    main = (
        section("jobs", SECTIONS["jobs"], _JOBS_LEAD, _gantt(report))
        + section("load", SECTIONS["load"], _LOAD_LEAD, _load(report))
        + section(
            "guarantees",
            SECTIONS["guarantees"],
            "",
            _table_or(_costs_table(report), "No job has changed for another."),
        )
        + section(
            "promises",
            SECTIONS["promises"],
            "",
            _table_or(_jobs_table(report), "No job was submitted."),
        )
    )
    title = f"Queue of {report.name}"
    return framed_page(
        version=__version__,
        title=title,
        styles=("report.css", "stream.css"),
        scripts=_SCRIPTS,
        header=page_top("Served queue", escape(title), _tiles(report), SECTIONS),
        main=f'<svg class="defs" aria-hidden="true">{hatching()}</svg>{main}',
        footer=f"<footer><p>Written by Meshwright {escape(__version__)}.</p></footer>",
        data="",
    )


_JOBS_LEAD = (
    "A bar is a launch, the higher the more devices; where a job has several, it was "
    "resized, moved or paused. A line marks the deadline that was promised."
)
_LOAD_LEAD = "Devices that jobs held, of those that they could have."


def queue_markdown(report: QueueReport) -> str:
    """The report as Markdown."""
    sums = _sums(report)
    head = ", ".join(f"{name.lower()}: {value}" for name, value, _ in sums)
    return (
        f"# Queue of {plain_text(report.name)}\n\n{head}\n\n"
        f"## {SECTIONS['guarantees']}\n\n{markdown_table(_costs_table(report))}\n\n"
        f"## {SECTIONS['load']}\n\n{markdown_table(_causes_table(report))}\n\n"
        f"## {SECTIONS['promises']}\n\n{markdown_table(_jobs_table(report))}\n"
    )


def _table_or(told: TextTable, why: str) -> str:
    return text_table(told) if told.rows else absent(why)


def _sums(report: QueueReport) -> list[tuple[str, str, str]]:
    promised = [job for job in report.jobs if job.promised]
    broken = sum(bool(job.broken) for job in promised)
    declined = sum(job.status == "declined" for job in report.jobs)
    done = sum(job.status == "done" for job in report.jobs)
    return [
        ("Jobs", f"{len(report.jobs):,}", f"{done:,} done"),
        ("Promised", f"{len(promised):,}", f"{broken:,} broken"),
        ("Declined", f"{declined:,}", ""),
        ("Launches", f"{len(report.launches):,}", ""),
    ]


def _tiles(report: QueueReport) -> str:
    return tiles(
        (name, escape(value), escape(under)) for name, value, under in _sums(report)
    )


def _plane(report: QueueReport, height: float, most: float) -> Plane:
    return Plane(
        left=_LEFT,
        right=_WIDTH - 10,
        top=6.0,
        floor=6.0 + height,
        x_range=(0.0, report.end_s - report.start_s),
        y_range=(0.0, most),
    )


def _axis(plane: Plane) -> str:
    places = ticks(*plane.x_range, 8)
    return plane.x_axis(
        [(at, format_seconds(at) if at else "0") for at in places], "since the start"
    )


def _gantt(report: QueueReport) -> str:
    jobs = report.jobs[-_MOST_ROWS:]
    if not jobs:
        return absent("No job was submitted.")
    by_job: dict[str, list[JournalLaunch]] = defaultdict(list)
    for launch in report.launches:
        by_job[launch.job].append(launch)
    degrees = [sum(launch.devices.values()) for launch in report.launches]
    most = max(degrees, default=1)
    plane = _plane(report, _ROW * len(jobs), 1.0)
    body = ""
    for at, job in enumerate(jobs):
        top = plane.top + at * _ROW
        body += label(plane.left - 8, top + 13, fitted(job.name, _LEFT - 16), "end")
        for launch in by_job[job.name]:
            body += _bar(report, plane, job, launch, top, most)
        body += _marks(report, plane, job, top)
    drawing = Drawing(body=body + _axis(plane), width=_WIDTH, height=plane.floor + 44)
    shown = legend(
        [
            ("o-met", "promised, or done"),
            ("o-late", "promise broken"),
            ("o-unfinished", "without a promise"),
            ("o-refused", "declined"),
        ]
    )
    return shown + figure(
        drawing.element("Launches of each job over time"),
        "Deadlines that lie behind the right edge are not marked.",
    )


def _bar(
    report: QueueReport,
    plane: Plane,
    job: JournalJob,
    launch: JournalLaunch,
    top: float,
    most: int,
) -> str:
    if launch.start_s is None:
        return ""
    end = report.now_s if launch.end_s is None else launch.end_s
    degree = sum(launch.devices.values())
    height = max(4.0, (_ROW - 4) * degree / most)
    left = plane.x(launch.start_s - report.start_s)
    css = "o-met" if job.promised else "o-unfinished"
    hosts = ", ".join(f"{host}:{n}" for host, n in launch.devices.items())
    tip = (
        f"{launch.name}\n{degree} {launch.device} ({hosts})\n"
        f"{format_seconds(end - launch.start_s)}"
    )
    width = max(1.0, plane.x(end - report.start_s) - left)
    css = "o-late" if job.broken else css
    return block(css, left, top + _ROW - 2 - height, width, height, tip)


def _marks(report: QueueReport, plane: Plane, job: JournalJob, top: float) -> str:
    """The promise of a job, or where it was declined."""
    due = job.request.deadline_s
    if job.status == "declined" and job.ended_s is not None:
        x = plane.x(job.ended_s - report.start_s)
        return block("o-refused", x - 3, top + 4, 6, _ROW - 8, job.reason)
    if not job.promised or due is None or due > report.end_s:
        return ""
    x = plane.x(due - report.start_s)
    return (
        f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 1:.1f}" '
        f'y2="{top + _ROW - 1:.1f}"/>'
    )


def _load(report: QueueReport) -> str:
    most = max([n for _, n in (*report.devices, *report.held)], default=1) or 1
    plane = _plane(report, 110.0, most)
    body = plane.y_axis([(at, f"{at:g}") for at in ticks(0, most, 4)])
    steps = [*report.held, (report.now_s, 0)]
    for (start, count), (end, _) in pairwise(steps):
        left = plane.x(start - report.start_s)
        width = plane.x(end - report.start_s) - left
        y = plane.y(count)
        body += block("o-met", left, y, width, plane.floor - y, f"{count} devices")
    for job in report.jobs:
        if job.status == "declined" and job.ended_s is not None:
            words, css = _CAUSES.get(job.cause, _CAUSES["input"])
            x = plane.x(job.ended_s - report.start_s)
            tip = f"{job.name}: {words}\n{job.reason}"
            body += block(css, x - 3, plane.top, 6, 10, tip)
    drawing = Drawing(body=body + _axis(plane), width=_WIDTH, height=plane.floor + 44)
    shown = legend([(css, words) for words, css in _CAUSES.values()])
    picture = figure(
        drawing.element("Devices held, and declined jobs by cause"),
        "A mark at the top is a job that was declined.",
    )
    return picture + shown + text_table(_causes_table(report))


def _causes_table(report: QueueReport) -> TextTable:
    """Declined jobs by cause, and the load when they were."""
    loads: dict[str, list[float]] = defaultdict(list)
    for job in report.jobs:
        if job.status == "declined" and job.ended_s is not None:
            held = _at(report.held, job.ended_s)
            usable = _at(report.devices, job.ended_s)
            loads[job.cause].append(held / usable if usable else 0.0)
    return TextTable(
        caption="Declined jobs by cause",
        header=("cause", "jobs", "devices in use then"),
        rows=tuple(
            (words, f"{len(loads[cause]):,}", _mean(loads[cause]))
            for cause, (words, _) in _CAUSES.items()
        ),
    )


def _mean(shares: Sequence[float]) -> str:
    return f"{sum(shares) / len(shares):.0%}" if shares else ""


def _at(steps: Sequence[tuple[float, int]], at: float) -> int:
    found = 0
    for time, value in steps:
        if time > at:
            break
        found = value
    return found


def _costs_table(report: QueueReport) -> TextTable:
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


def _jobs_table(report: QueueReport) -> TextTable:
    rows = []
    for job in report.jobs:
        due, end = job.request.deadline_s, job.ended_s
        slack = ""
        if due is not None and end is not None and job.status == "done":
            slack = (
                f"{format_seconds(abs(due - end))} {'late' if end > due else 'early'}"
            )
        told = job.broken or (job.reason if job.status == "declined" else "")
        promise = "broken" if job.broken else "promised" if job.promised else "none"
        rows.append((job.name, job.status, promise, f"{job.launches}", slack, told))
    return TextTable(
        caption="Jobs in the order of submission",
        header=("job", "status", "promise", "launches", "ended", "reason"),
        rows=tuple(rows),
        names=3,
        words=(4, 5),
    )
