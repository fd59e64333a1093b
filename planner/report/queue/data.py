"""Queues as a report shows them: read from journals, and from elastic streams."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.admission.journal import Journal, JournalJob
from planner.errors import PlanFileError
from planner.report.queue.holders import Holders, find_holders, least_time_s
from planner.schema.elastic import ElasticRecord
from planner.units import format_seconds

__all__ = [
    "CAUSES",
    "QueueBar",
    "QueueJob",
    "QueueReport",
    "read_elastic",
    "read_queue_report",
]

#: Cause of a blocked job to its words and its swatch.
CAUSES: Mapping[str, tuple[str, str]] = {
    "alone": ("too slow even alone", "o-refused"),
    "load": ("more is due than devices can do", "o-no_room"),
    "declined": ("declined, in time alone", "o-no_room"),
    "search": ("no schedule was found", "o-undecided"),
    "input": ("wrong values", "k-bubble"),
    "late": ("late, without a promise", "o-unfinished"),
    "broken": ("promise broken", "o-late"),
    "failure": ("promise broken, devices failed", "o-undecided"),
    "failed": ("its launches failed", "m-parameters"),
}
#: Jobs that a reason names.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueJob:
    """A job.

    Attributes:
        name: Name.
        status: Status, for people.
        promised: Whether it was promised its deadline.
        broken: Reason for which its promise was not kept, or nothing.
        submit_s: Time of submission.
        deadline_s: Deadline, or None.
        end_s: Time at which it ended or was declined, or None.
        done: Whether it ran to its end.
        cause: For a blocked job, its cause in :data:`CAUSES`; else nothing.
        blocked_s: Time from which it is blocked, or None.
        reason: Reason of the decision on it, or of its being blocked.
        held_by: Jobs without whose devices it could have met its deadline.
    """

    name: str
    status: str
    promised: bool
    broken: str
    submit_s: float
    deadline_s: float | None
    end_s: float | None
    done: bool
    cause: str
    blocked_s: float | None
    reason: str
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBar:
    """A launch: a job's time on the same devices.

    Attributes:
        name: Name, for people.
        job: Name of the job.
        start_s: Time from which it holds devices.
        end_s: Time until which it does.
        count: Number of devices.
        where: Their type and hosts, for people.
        failed: Whether a failure of a device ended it.
    """

    name: str
    job: str
    start_s: float
    end_s: float
    count: int
    where: str
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport:
    """A queue, as far as it has come.

    Attributes:
        name: Name, for people.
        label: Name among others of the same trace.
        simulated: Whether it is of an elastic stream.
        start_s: Time of the first event.
        end_s: Time of the last event, or of the last promise.
        now_s: Time of the last event.
        jobs: Jobs, in the order of submission.
        bars: Launches.
        changes: Changes that decisions made: a :class:`JobChange` and for whom.
        devices: Times, and the devices that jobs may have from each.
        held: Times, and the devices that jobs hold from each.
    """

    name: str
    label: str
    simulated: bool
    start_s: float
    end_s: float
    now_s: float
    jobs: tuple[QueueJob, ...]
    bars: tuple[QueueBar, ...]
    changes: tuple[Mapping[str, Any], ...]
    devices: tuple[tuple[float, int], ...]

    @property
    def held(self) -> tuple[tuple[float, int], ...]:
        """Times, and the devices that jobs hold from each."""
        steps: Counter[float] = Counter()
        for bar in self.bars:
            steps[bar.start_s] += bar.count
            steps[bar.end_s] -= bar.count
        found, total = [], 0
        for at in sorted(steps):
            total += steps[at]
            found.append((at, total))
        return tuple(found)


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
    broken = {e["job"]: e["at_s"] for e in events if e["kind"] == "promise broken"}
    lost = {(e["job"], e["at_s"]) for e in events if e["kind"] in ("failed", "lost")}
    bars = []
    for each in launches:
        if each.start_s is None:
            continue
        hosts = ", ".join(f"{host}:{n}" for host, n in each.devices.items())
        bars.append(
            QueueBar(
                name=each.name,
                job=each.job,
                start_s=each.start_s,
                end_s=now if each.end_s is None else each.end_s,
                count=sum(each.devices.values()),
                where=f"{each.device} ({hosts})",
                failed=(each.job, each.end_s) in lost,
            )
        )
    return QueueReport(
        name=folder,
        label=folder,
        simulated=False,
        start_s=start,
        now_s=now,
        end_s=max([now, start + 1.0, *dues]),
        jobs=tuple(_of_journal(job, broken.get(job.name)) for job in jobs),
        bars=tuple(bars),
        changes=tuple(json.loads(e["text"]) for e in events if e["kind"] == "change"),
        devices=tuple(
            (e["at_s"], int(e["text"])) for e in events if e["kind"] == "devices"
        ),
    )


def _of_journal(job: JournalJob, broken_s: float | None) -> QueueJob:
    due, cause, blocked_s = job.request.deadline_s, "", job.ended_s
    if job.status == "declined":
        cause = job.cause if job.cause in CAUSES else "input"
    elif job.status == "failed":
        cause = "failed"
    elif job.broken:
        cause, blocked_s = "broken", broken_s
    elif job.status == "done" and due and job.ended_s and job.ended_s > due:
        cause, blocked_s = "broken" if job.promised else "late", due
    return QueueJob(
        name=job.name,
        status=job.status,
        promised=job.promised,
        broken=job.broken,
        submit_s=job.request.submitted_s,
        deadline_s=due,
        end_s=job.ended_s,
        done=job.status == "done",
        cause=cause,
        blocked_s=blocked_s if cause else None,
        reason=job.reason if job.status == "declined" else "",
    )


def read_elastic(paths: Iterable[str | os.PathLike[str]]) -> tuple[QueueReport, ...]:
    """Read records of elastic streams from files, and from all of folders, by load.

    Raises:
        PlanFileError: If a file is no such record, or two are of one episode.
    """
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])
        if not file.name.startswith(".")
    ]
    records = [ElasticRecord.load(file) for file in files]
    known: dict[object, Path] = {}
    for record, file in zip(records, files, strict=True):
        episode = (record.trace, record.policy, record.trace_load, record.seed)
        other = known.setdefault(episode, file)
        if other != file:
            raise PlanFileError(
                f"{other} and {file} are both of {_label(record)}; report on one"
            )
    traces = sorted({record.trace for record in records})
    if len(traces) > 1:
        raise PlanFileError(
            f"records of the traces {', '.join(traces)}; report on each apart"
        )
    records.sort(key=lambda record: (record.policy or "", record.trace_load or 0.0))
    return tuple(map(_of_record, records))


def _label(record: ElasticRecord) -> str:
    load = "" if record.trace_load is None else f", load {record.trace_load:g}"
    seed = f", seed {record.seed}" if record.seed else ""
    return f"{record.policy or 'unnamed scheduler'}{load}{seed}"


def _of_record(record: ElasticRecord) -> QueueReport:
    jobs, pieces = record.jobs, record.pieces
    names, least_s = jobs.name, least_time_s(record)
    hit = {job for job, failed in zip(pieces.job, pieces.failed, strict=True) if failed}
    causes = [
        _cause(record, job, bool(least_s[job] > _slack(record, job)), job in hit)
        for job in range(len(jobs))
    ]
    asked = [
        job
        for job, cause in enumerate(causes)
        if cause in ("declined", "late", "broken")
    ]
    held = {each.job: each for each in find_holders(record, asked)}
    bars = tuple(
        QueueBar(
            name=f"{names[pieces.job[at]]}, {pieces.change[at]}",
            job=names[pieces.job[at]],
            start_s=pieces.start_s[at],
            end_s=pieces.end_s[at],
            count=pieces.degree[at],
            where=f"{record.kinds[pieces.kind[at]]} on {pieces.hosts[at]} "
            f"host{'s' * (pieces.hosts[at] > 1)}",
            failed=pieces.failed[at],
        )
        for at in range(len(pieces))
    )
    return QueueReport(
        name=f"{record.trace}, {_label(record)}",
        label=_label(record),
        simulated=True,
        start_s=0.0,
        now_s=record.end_s,
        end_s=max(record.end_s, 1.0),
        jobs=tuple(
            _of_row(record, job, causes[job], float(least_s[job]), held.get(job))
            for job in range(len(jobs))
        ),
        bars=bars,
        changes=(),
        devices=tuple((time, sum(counts)) for time, counts in record.devices),
    )


def _slack(record: ElasticRecord, job: int) -> float:
    return record.jobs.deadline_s[job] - record.jobs.submit_s[job]


def _cause(record: ElasticRecord, job: int, alone: bool, hit: bool) -> str:
    """Return why a job of a record is blocked; nothing if it is not."""
    outcome = record.jobs.outcome[job]
    if outcome not in ("late", "declined"):
        return ""
    if record.jobs.answer[job] == "promised":
        return "failure" if hit else "broken"
    if alone:
        return "alone"
    return outcome


def _of_row(
    record: ElasticRecord, job: int, cause: str, least_s: float, held: Holders | None
) -> QueueJob:
    jobs = record.jobs
    by = () if held is None else tuple(jobs.name[other] for other in held.by)
    reason = ""
    if cause == "alone":
        slack = format_seconds(_slack(record, job))
        reason = f"takes {format_seconds(least_s)} at least, had {slack}"
    elif cause == "failure":
        reason = "devices failed under it"
    elif held is not None:
        reason = _held_words(held, by)
    declined = jobs.outcome[job] == "declined"
    promised = jobs.answer[job] == "promised"
    return QueueJob(
        name=jobs.name[job],
        status=jobs.outcome[job],
        promised=promised,
        broken=reason if promised and cause else "",
        submit_s=jobs.submit_s[job],
        deadline_s=jobs.deadline_s[job],
        end_s=jobs.told_s[job] if declined else jobs.end_s[job],
        done=jobs.end_s[job] is not None,
        cause=cause,
        blocked_s=(jobs.told_s if declined else jobs.deadline_s)[job]
        if cause
        else None,
        reason=reason,
        held_by=by,
    )


def _held_words(held: Holders, by: tuple[str, ...]) -> str:
    if not held.enough:
        return "devices that were down were needed"
    if not by:
        return "free devices had sufficed"
    more = len(by) - _MOST_NAMED
    told = ", ".join(by[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"in time without {told}"
