"""Promises and time limits of launches, written to the queue that runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Literal

from planner.admission.journal import Journal, JournalJob
from planner.admission.queues.base import Entry, Queue, Snapshot
from planner.schema.admission import AdmissionDecision, Reservation, ReservedSegment

__all__ = ["NoteWriter", "kept_until", "launch_note"]

#: Seconds between two segments up to which the second follows the first.
_FOLLOWS_S = 1.0
#: Least time between two writes of an entry's note, and of its time limit.
_WRITE_S = {"note": 60.0, "limit": 600.0}


class NoteWriter:
    """Writer of notes and time limits that a decision has changed.

    Args:
        queue: The queue.
        guard_s: Time after its end that a launch has until its time limit at least.
    """

    def __init__(self, queue: Queue, guard_s: float) -> None:
        self._queue, self._guard_s = queue, guard_s
        self._written: dict[tuple[str, str], float] = {}

    def due(
        self,
        made: AdmissionDecision,
        journal: Journal,
        snapshot: Snapshot,
        now_s: float,
    ) -> Iterator[Callable[[], None]]:
        """Yield the writes that a decision asks for, each to be called.

        Args:
            made: The decision.
            journal: Jobs and launches, after the decision was carried out.
            snapshot: Entries of the queue.
            now_s: Time.
        """
        jobs = {job.name: job for job in journal.jobs("active")}
        launches = {each.name: each for each in journal.launches("launched")}
        schedule = {each.job: each for each in made.schedule}
        known = {entry.id for entry in snapshot.entries}
        self._written = {
            key: at_s for key, at_s in self._written.items() if key[1] in known
        }
        for entry in snapshot.entries:
            launch = launches.get(entry.name)
            if launch is None or entry.id != launch.queue_id:
                continue
            job, given = jobs.get(launch.job), schedule.get(launch.job)
            if job is None or given is None:
                continue
            text = launch_note(job, given, now_s)
            if entry.note not in (None, text) and self._may("note", entry, now_s):
                yield partial(self._queue.write_note, entry.id, text)
            end_s = kept_until(given, now_s)
            if end_s is None or entry.until_s is None:
                continue
            short = entry.until_s < end_s + self._guard_s
            if short and self._may("limit", entry, now_s):
                # Twice as long as it takes, so that a slower job is not ended.
                until_s = end_s + (end_s - now_s) + self._guard_s
                yield partial(self._queue.extend, entry, until_s)

    def _may(self, what: Literal["note", "limit"], entry: Entry, now_s: float) -> bool:
        last_s = self._written.get((what, entry.id))
        if last_s is not None and now_s - last_s < _WRITE_S[what]:
            return False
        self._written[what, entry.id] = now_s
        return True


def launch_note(job: JournalJob, given: Reservation, now_s: float) -> str:
    """Return the promise of a job, and what changes next, as one line.

    ``meshwright: promised by 2026-11-28T03:00; paused from 2026-11-28T02:10``

    Args:
        job: The job.
        given: What it is to get.
        now_s: Time.
    """
    parts = []
    if not job.promised:
        parts.append("no promise")
    elif job.request.deadline_s is not None:
        due = _at(job.request.deadline_s)
        parts.append(f"promise of {due} broken" if job.broken else f"promised by {due}")
    for before, after in _ahead(given, now_s):
        if before.devices == after.devices and _follows(before, after):
            continue
        if _follows(before, after):
            parts.append(f"{after.degree} {after.device} from {_at(after.start_s)}")
        else:
            parts.append(f"paused from {_at(before.end_s)}")
        break
    return f"meshwright: {'; '.join(parts)}"


def kept_until(given: Reservation, now_s: float) -> float | None:
    """Time until which a job keeps the devices that it has now; None without any."""
    segment = next((s for s in given.segments if s.start_s <= now_s < s.end_s), None)
    if segment is None:
        return None
    for before, after in _ahead(given, now_s):
        if before.devices != after.devices or not _follows(before, after):
            return before.end_s
    return given.segments[-1].end_s


def _ahead(
    given: Reservation, now_s: float
) -> Iterator[tuple[ReservedSegment, ReservedSegment]]:
    """Segments that have not ended, two after each other at a time."""
    return pairwise(segment for segment in given.segments if segment.end_s > now_s)


def _follows(before: ReservedSegment, after: ReservedSegment) -> bool:
    return after.start_s - before.end_s <= _FOLLOWS_S


def _at(time_s: float) -> str:
    """Local time to the minute, as SLURM writes times."""
    return time.strftime("%Y-%m-%dT%H:%M", time.localtime(time_s))
