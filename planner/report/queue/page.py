"""The page of a queue: who ran when, promises, and who was blocked, and by whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from planner import __version__
from planner.report.markup import (
    absent,
    details,
    escape,
    figure,
    framed_page,
    legend,
    page_top,
    section,
    text_table,
    tiles,
)
from planner.report.queue.data import CAUSES, QueueBar, QueueJob, QueueReport
from planner.report.queue.tables import (
    SECTIONS,
    causes_of,
    causes_table,
    costs_table,
    holders_table,
    jobs_table,
    queue_sums,
    queue_title,
    runs_table,
)
from planner.report.svg import (
    Drawing,
    Plane,
    block,
    fitted,
    hatching,
    label,
    ticks,
    time_unit,
)
from planner.report.tables import TextTable
from planner.units import format_seconds

__all__ = ["queue_page"]

_SCRIPTS = ("colours.js", "view.js", "frame.js")
_WIDTH, _ROW, _LEFT = 960.0, 18.0, 130.0
#: Jobs that the figure has rows for, and jobs that share a time axis.
_MOST_ROWS, _MOST_SHARE = 200, 40
#: Bins of blocked jobs over time, and steps of the devices in use.
_BINS, _MOST_STEPS = 60, 1000

_JOBS_LEAD = (
    "A bar is a launch, the higher the more devices; where a job has several, it was "
    "resized, moved or paused, and a cross is a failure. A thin line is a job that "
    "waits or is paused. An upright line marks the deadline that was promised, a "
    "dashed one a deadline that was not, and a square the time from which a job is "
    "blocked, in the colour of the cause."
)
_LOAD_LEAD = "Jobs by the time from which they are blocked, and devices that jobs held."
_HOLDERS_LEAD = (
    "A blocked job is laid to jobs that held devices between its submission and its "
    "deadline: without them it would have been in time, all others the same and its "
    "resizes free. Promised jobs are taken first, those with more device-time "
    "before others; none is named that is not needed."
)


def queue_page(reports: Sequence[QueueReport]) -> str:
    """Return reports as one HTML file that needs nothing else.

    Args:
        reports: One of a journal; or any of one trace.
    """
    bodies: dict[str, tuple[str, Callable[[QueueReport], str]]] = {
        "jobs": (_JOBS_LEAD, _gantt),
        "load": (_LOAD_LEAD, _over_time),
        "guarantees": (_HOLDERS_LEAD if reports[0].simulated else "", _guarantees),
        "promises": (
            "",
            lambda one: _table_or(jobs_table(one), "No job was submitted."),
        ),
    }
    links = {name: SECTIONS[name] for name in bodies}
    main = ""
    if len(reports) > 1:
        links = {"runs": SECTIONS["runs"], **links}
        main = section("runs", SECTIONS["runs"], "", _runs(reports))
    for name, (lead, make) in bodies.items():
        body = make(reports[0])
        if len(reports) > 1:
            body = "".join(details(one.label, make(one)) for one in reports)
        main += section(name, SECTIONS[name], lead, body)
    title = queue_title(reports)
    kicker = "Elastic stream" if reports[0].simulated else "Served queue"
    top = "" if len(reports) > 1 else _tiles(reports[0])
    return framed_page(
        version=__version__,
        title=title,
        styles=("report.css", "stream.css"),
        scripts=_SCRIPTS,
        header=page_top(kicker, escape(title), top, links),
        main=f'<svg class="defs" aria-hidden="true">{hatching()}</svg>{main}',
        footer=f"<footer><p>Written by Meshwright {escape(__version__)}.</p></footer>",
        data="",
    )


def _table_or(told: TextTable, why: str) -> str:
    return text_table(told) if told.rows else absent(why)


def _tiles(report: QueueReport) -> str:
    return tiles(
        (name, escape(value), escape(under))
        for name, value, under in queue_sums(report)
    )


def _guarantees(report: QueueReport) -> str:
    if report.simulated:
        return _table_or(holders_table(report), "No job is blocked by others' devices.")
    return _table_or(costs_table(report), "No job has changed for another.")


def _causes_legend(causes: Iterable[str]) -> str:
    return legend([(CAUSES[cause][1], CAUSES[cause][0]) for cause in causes])


def _runs(reports: Sequence[QueueReport]) -> str:
    """Share of blocked jobs of each run, by cause."""
    causes, left = causes_of(reports[0]), 230.0
    shares = []
    for report in reports:
        counts = Counter(job.cause for job in report.jobs)
        shares.append([counts[cause] / max(len(report.jobs), 1) for cause in causes])
    most = max(map(sum, shares)) or 0.01
    plane = Plane(
        left=left,
        right=_WIDTH - 60,
        top=6.0,
        floor=6.0 + 26 * len(reports),
        x_range=(0.0, most),
        y_range=(0.0, 1.0),
    )
    body = ""
    for at, (report, row) in enumerate(zip(reports, shares, strict=True)):
        top, before = plane.top + 26 * at, 0.0
        body += label(left - 8, top + 17, fitted(report.label, left), "end")
        for cause, share in zip(causes, row, strict=True):
            words, css = CAUSES[cause]
            x, width = plane.x(before), plane.x(before + share) - plane.x(before)
            tip = f"{report.label}\n{words}: {share:.1%}"
            body += block(css, x, top + 4, width, 18, tip) if share else ""
            before += share
        body += label(plane.x(before) + 6, top + 17, f"{before:.1%}", css="ink")
    places = [(at, f"{at:.3g}%") for at in ticks(0.0, 100 * most, 6)]
    body += plane.x_axis([(at / 100, text) for at, text in places], "of the jobs")
    drawing = Drawing(body=body, width=_WIDTH, height=plane.floor + 44)
    return (
        _causes_legend(causes)
        + figure(drawing.element("Blocked jobs of each run, by cause"), "")
        + text_table(runs_table(reports))
    )


def _plane(
    span: tuple[float, float], height: float, most: float, top: float = 6.0
) -> Plane:
    return Plane(
        left=_LEFT,
        right=_WIDTH - 10,
        top=top,
        floor=top + height,
        x_range=span,
        y_range=(0.0, most),
    )


def _axis(plane: Plane, start_s: float) -> str:
    """Time axis; times are since the start of the report."""
    low, high = (each - start_s for each in plane.x_range)
    unit_s, name = time_unit(high)
    places = ticks(low / unit_s, high / unit_s, 8)
    return plane.x_axis(
        [(start_s + at * unit_s, f"{at:g}") for at in places], f"{name} since the start"
    )


def _shown(report: QueueReport) -> tuple[Sequence[QueueJob], str]:
    """Return jobs to draw, and what is left out.

    Of many jobs these are jobs in a row with the most blocked ones, the last such.
    """
    jobs, blocked = report.jobs, [0]
    if len(jobs) <= _MOST_ROWS:
        return jobs, ""
    for job in jobs:
        blocked.append(blocked[-1] + bool(job.cause))
    first = max(
        range(len(jobs) - _MOST_ROWS + 1),
        key=lambda at: (blocked[at + _MOST_ROWS] - blocked[at], at),
    )
    last = first + _MOST_ROWS
    return jobs[first:last], (
        f" Of {len(jobs):,} jobs these are {first + 1:,} to {last:,}, with "
        f"{blocked[last] - blocked[first]:,} of {blocked[-1]:,} blocked ones; what is "
        f"below counts all."
    )


def _gantt(report: QueueReport) -> str:
    jobs, told = _shown(report)
    if not jobs:
        return absent("No job was submitted.")
    by_job: dict[str, list[QueueBar]] = defaultdict(list)
    for bar in report.bars:
        by_job[bar.job].append(bar)
    most = max((bar.count for job in jobs for bar in by_job[job.name]), default=1)
    parts = [jobs]
    if len(jobs) > _MOST_SHARE:
        many = range(0, len(jobs), _MOST_SHARE)
        parts = [jobs[first : first + _MOST_SHARE] for first in many]
        told += " What runs on behind the right edge of a part is cut off there."
    drawn = "".join(_rows(report, part, by_job, most, len(parts)) for part in parts)
    seen = [("o-met", "promised"), ("o-unfinished", "without a promise")]
    found = {job.cause for job in jobs}
    seen += [
        (CAUSES[cause][1], CAUSES[cause][0])
        for cause in causes_of(report)
        if cause in found and cause != "late"
    ]
    return legend(seen) + figure(
        drawn, f"Deadlines that lie behind the right edge are not marked.{told}"
    )


def _rows(
    report: QueueReport,
    jobs: Sequence[QueueJob],
    by_job: Mapping[str, Sequence[QueueBar]],
    most: int,
    parts: int,
) -> str:
    """A part of the jobs, on a time axis of its own."""
    span = (report.start_s, report.end_s)
    if parts > 1:
        span = _span(jobs, by_job) or span
    plane = _plane(span, _ROW * len(jobs), 1.0)
    body = ""
    for at, job in enumerate(jobs):
        top = plane.top + at * _ROW
        body += label(plane.left - 8, top + 13, fitted(job.name, 0.7 * _LEFT), "end")
        before: QueueBar | None = None
        body += _wait(plane, job, by_job.get(job.name, ()), top)
        for bar in by_job.get(job.name, ()):
            body += _bar(plane, job, bar, before, top, most)
            before = bar
        body += _marks(plane, job, top)
    body += _axis(plane, report.start_s)
    drawing = Drawing(body=body, width=_WIDTH, height=plane.floor + 44)
    return drawing.element(
        f"Launches of jobs over time, {jobs[0].name} to {jobs[-1].name}"
    )


def _span(
    jobs: Sequence[QueueJob], by_job: Mapping[str, Sequence[QueueBar]]
) -> tuple[float, float] | None:
    """Time from the first launch until nine of ten jobs have ended."""
    firsts, lasts = [], []
    for job in jobs:
        times = [
            t for bar in by_job.get(job.name, ()) for t in (bar.start_s, bar.end_s)
        ]
        times += [job.blocked_s] if job.blocked_s is not None else []
        if times:
            firsts.append(min(times))
            lasts.append(max(times))
    if not lasts or min(firsts) >= max(lasts):
        return None
    last = sorted(lasts)[int(0.9 * (len(lasts) - 1))]
    return min(firsts), last if last > min(firsts) else max(lasts)


def _wait(plane: Plane, job: QueueJob, bars: Sequence[QueueBar], top: float) -> str:
    """A line from the submission of a job to its last device."""
    low, high = plane.x_range
    first = max(job.submit_s, low)
    last = min(max((bar.end_s for bar in bars), default=job.blocked_s or low), high)
    if first >= last:
        return ""
    y = top + _ROW - 3
    return (
        f'<line class="axis" x1="{plane.x(first):.1f}" x2="{plane.x(last):.1f}" '
        f'y1="{y:.1f}" y2="{y:.1f}"/>'
    )


def _bar(
    plane: Plane,
    job: QueueJob,
    bar: QueueBar,
    before: QueueBar | None,
    top: float,
    most: int,
) -> str:
    height = max(4.0, (_ROW - 4) * bar.count / most)
    left, right = plane.x(bar.start_s), min(plane.x(bar.end_s), plane.right)
    if left > plane.right:
        return ""
    # What is thinner than half a pixel and touches another bar cannot be seen.
    if before is not None and right - plane.x(before.end_s) < 0.5:
        return ""
    css = "o-late" if job.broken else "o-met" if job.promised else "o-unfinished"
    held = format_seconds(bar.end_s - bar.start_s)
    tip = f"{bar.name}\n{bar.count} {bar.where}\n{held}"
    if before is not None and bar.start_s > before.end_s:
        tip += f", after {format_seconds(bar.start_s - before.end_s)} without devices"
    # A hair between two launches shows that a job moved.
    width = max(1.0, right - left - 0.5)
    drawn = block(css, left, top + _ROW - 2 - height, width, height, tip)
    if bar.failed and bar.end_s <= plane.x_range[1]:
        drawn += label(right, top + 13, "×", "middle", "strong")
    return drawn


def _marks(plane: Plane, job: QueueJob, top: float) -> str:
    """The deadline of a job, and from when it is blocked."""
    due, drawn = job.deadline_s, ""
    if due is not None and job.status != "declined" and due <= plane.x_range[1]:
        x = plane.x(due)
        drawn = (
            f'<line class="{"limit" if job.promised else "front"}" x1="{x:.1f}" '
            f'x2="{x:.1f}" y1="{top + 1:.1f}" y2="{top + _ROW - 1:.1f}"/>'
        )
    if not job.cause or job.blocked_s is None or job.blocked_s > plane.x_range[1]:
        return drawn
    words, css = CAUSES[job.cause]
    tip = f"{job.name}: {words}\n{job.broken or job.reason}"
    return drawn + block(css, plane.x(job.blocked_s) - 3, top + 4, 6, _ROW - 8, tip)


def _over_time(report: QueueReport) -> str:
    """Blocked jobs by cause, above the devices that jobs held."""
    span = (report.start_s, report.end_s)
    width_s = (span[1] - span[0]) / _BINS
    bins: dict[tuple[int, str], list[str]] = defaultdict(list)
    for job in report.jobs:
        if job.cause and job.blocked_s is not None:
            at = min(max(int((job.blocked_s - span[0]) / width_s), 0), _BINS - 1)
            bins[at, job.cause].append(job.name)
    sums: Counter[int] = Counter()
    for (at, _), names in bins.items():
        sums[at] += len(names)
    above = _plane(span, 90.0, max(sums.values(), default=1), top=20.0)
    body = label(above.left, 12, "blocked jobs", css="strong")
    places = ticks(0, above.y_range[1], 4)
    body += above.y_axis([(n, f"{n:g}") for n in places if n == int(n)])
    for at in range(_BINS):
        body += _stack(above, report, at, width_s, bins)
    plane = _plane(span, 110.0, _most_devices(report), top=above.floor + 34)
    body += label(plane.left, plane.top - 8, "devices that jobs held", css="strong")
    body += _devices(plane, report) + _axis(plane, report.start_s)
    drawing = Drawing(body=body, width=_WIDTH, height=plane.floor + 44)
    picture = figure(
        drawing.element("Blocked jobs by cause, and devices held, over time"),
        "The line is the devices that jobs could have.",
    )
    return (
        _causes_legend(causes_of(report)) + picture + text_table(causes_table(report))
    )


def _stack(
    plane: Plane,
    report: QueueReport,
    at: int,
    width_s: float,
    bins: dict[tuple[int, str], list[str]],
) -> str:
    """Blocked jobs of a bin, a block a cause."""
    left = plane.x(report.start_s + at * width_s)
    right = plane.x(report.start_s + (at + 1) * width_s)
    drawn, before = "", 0
    for cause in causes_of(report):
        names = bins.get((at, cause), [])
        if not names:
            continue
        words, css = CAUSES[cause]
        named = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        top, floor = plane.y(before + len(names)), plane.y(before)
        tip = f"{len(names)} {words}\n{named}"
        drawn += block(css, left + 0.5, top, right - left - 1, floor - top, tip)
        before += len(names)
    return drawn


def _most_devices(report: QueueReport) -> int:
    return max((n for _, n in (*report.devices, *report.held)), default=1) or 1


def _devices(plane: Plane, report: QueueReport) -> str:
    """Devices held and those that there are, over time."""
    most = int(plane.y_range[1])
    body = plane.y_axis([(at, f"{at:g}") for at in ticks(0, most, 4)])
    steps = _coarse([*report.held, (report.now_s, 0)], report.start_s, report.now_s)
    foot = f"{plane.x(steps[0][0]):.1f} {plane.floor}"
    path = f"M{foot}{_staircase(plane, steps)}V{plane.floor}z"
    body += f'<path class="o-met" d="{path}"/>'
    alive = [(max(at, report.start_s), n) for at, n in report.devices]
    if alive:
        edge = f"{plane.x(alive[0][0]):.1f} {plane.y(alive[0][1]):.1f}"
        line = _staircase(plane, [*alive, (report.now_s, alive[-1][1])])
        body += f'<path class="front" d="M{edge}{line}"/>'
    return body


def _staircase(plane: Plane, steps: Sequence[tuple[float, float]]) -> str:
    """The rest of the path of a number that changes at times, from its first time."""
    return "".join(f"H{plane.x(at):.1f}V{plane.y(count):.1f}" for at, count in steps)


def _coarse(
    steps: Sequence[tuple[float, float]], start_s: float, end_s: float
) -> list[tuple[float, float]]:
    """Steps; means of equal times where there are too many."""
    if len(steps) <= _MOST_STEPS:
        return list(steps)
    width_s = (end_s - start_s) / _MOST_STEPS
    sums = [0.0] * _MOST_STEPS
    for (first, count), (last, _) in pairwise(steps):
        at = int((first - start_s) / width_s)
        while first < last and at < _MOST_STEPS:
            until = min(last, start_s + (at + 1) * width_s)
            sums[at] += count * max(until - first, 0.0)
            first, at = max(until, first), at + 1
    times = [start_s + at * width_s for at in range(_MOST_STEPS + 1)]
    return [*zip(times, (each / width_s for each in sums), strict=False), (end_s, 0.0)]
