"""The operator's loop: read a queue, decide, and launch, stop and resize jobs.

Every launch has a name that is used once and is written to the journal before the
queue hears of it. A loop that was killed asks the queue for the names that it intended
and launches only those that the queue does not know.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, nextafter

from planner.admission.decide import admit, reschedule
from planner.admission.journal import (
    Journal,
    JournalError,
    JournalJob,
    JournalLaunch,
)
from planner.admission.notes import NoteWriter
from planner.admission.queues.base import (
    PREFIX,
    Entry,
    Launch,
    NoAnswerError,
    Queue,
    QueueError,
    Snapshot,
    occupied_by_others,
    read_queue,
)
from planner.errors import MeshwrightError
from planner.schema.admission import (
    AdmissionDecision,
    ClusterState,
    Reservation,
    ReservedSegment,
    ResizePrice,
    StateJob,
    Throughputs,
)

__all__ = ["Operator", "OperatorSettings", "progress"]

_LOG = logging.getLogger(__name__)

#: Reads in a row that must not know a launch before it counts as lost.
_LOST = 3
#: Launches of a job that may fail.
_MOST_FAILURES = 3
#: Time by which a clock may go back.
_CLOCK_S = 60.0
#: Share of a job's iterations that are left at the least while it runs.
_LEAST = 1e-6
#: Statuses of launches that have not ended.
_ALIVE = ("intended", "launched", "stopping")
#: Of entries of one name, the first of these is the launch.
_RANK = ("running", "done", "pending", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """Settings of a loop.

    Attributes:
        throughputs: Throughputs of jobs.
        price: Cost of a change.
        rate_margin: Share by which jobs may be slower.
        poll_s: Time between two looks at the queue.
        guard_s: Time before its deadline by which a job has to end when it is
            admitted; what queues take to start and stop jobs comes off it.
    """

    throughputs: Throughputs
    price: ResizePrice = field(default_factory=ResizePrice)
    rate_margin: float = 0.0
    poll_s: float = 10.0
    guard_s: float = 60.0


class Operator:
    """A loop over a queue.

    Args:
        queue: The queue.
        journal: The journal, which this process holds.
        settings: Settings.
        clock: Time in seconds.
    """

    def __init__(
        self,
        queue: Queue,
        journal: Journal,
        settings: OperatorSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._queue, self._journal = queue, journal
        self._settings, self._clock = settings, clock
        self._told: set[str] = set()
        self._notes = NoteWriter(queue, settings.guard_s)

    def tick(self) -> bool:
        """Look once and act; return False if the queue gave no answer to act on.

        Raises:
            JournalError: If the queue contradicts the journal; nothing is done then.
        """
        now = self._clock()
        self._now_told: set[str] = set()
        try:
            snapshot = read_queue(self._queue)
            self._refuse_contradictions(snapshot, now)
            with self._journal.transaction():
                self._journal.keep_devices(_devices(snapshot), now)
                self._observe(snapshot, now)
            state = self._state(snapshot, now)
            schedule = self._decide(state)
            self._act(schedule, snapshot, now)
            for write in self._notes.due(schedule, self._journal, snapshot, now):
                self._try(now, write)
        except JournalError:
            raise
        except MeshwrightError as error:
            self._tell_problem(now, str(error))
            return False
        self._told &= self._now_told
        return True

    def _tell_problem(self, now: float, text: str) -> None:
        self._now_told.add(text)
        if text not in self._told:
            _LOG.warning("%s", text)
            self._journal.event(now, "problem", text=text)
            self._told.add(text)

    def _refuse_contradictions(self, snapshot: Snapshot, now: float) -> None:
        """Refuse a queue that has what the journal cannot explain."""
        last = self._journal.events(last=1)
        if last and now < last[0]["at_s"] - _CLOCK_S:
            raise JournalError(
                f"the clock says {now:.0f} s and the journal's last event was at "
                f"{last[0]['at_s']:.0f} s; set the clock, or wait"
            )
        launches = {each.name: each for each in self._journal.launches()}
        for entry in snapshot.entries:
            if not entry.ours or entry.status not in ("pending", "running"):
                continue
            launch = launches.get(entry.name)
            if launch is None:
                raise JournalError(
                    f"the queue has {entry.name} ({entry.id}), which journal "
                    f"{self._journal.path} does not know; give the journal that "
                    f"launched it, or end it in the queue"
                )
            for host, count in entry.devices.items():
                if count > launch.devices.get(host, 0):
                    raise JournalError(
                        f"the queue runs {entry.name} ({entry.id}) on {count} devices "
                        f"of {host}, where the journal launched it on "
                        f"{launch.devices}; end it in the queue, it is launched anew"
                    )

    # What the queue says.

    def _observe(self, snapshot: Snapshot, now: float) -> None:
        by_name: dict[str, list[Entry]] = defaultdict(list)
        for entry in snapshot.entries:
            if entry.ours:
                by_name[entry.name].append(entry)
        for launch in self._journal.launches(*_ALIVE):
            entries = by_name.get(launch.name, ())
            if not entries:
                self._missed(launch, now)
                continue
            chosen = min(entries, key=lambda each: _RANK.index(each.status))
            self._seen(launch, chosen, now)

    def _missed(self, launch: JournalLaunch, now: float) -> None:
        """Count that a queue does not know a launch; give it up in the end."""
        if launch.status == "intended":
            return
        # A queue that did not answer may still take in what it was sent.
        if launch.missing + 1 < _LOST:
            self._journal.set_launch(launch.name, missing=launch.missing + 1)
            return
        stopping = launch.status == "stopping"
        if not stopping:
            text = f"the queue does not know {launch.name} any more"
            self._journal.event(now, "lost", launch.job, text)
        self._queue.revoke(launch.name)
        self._end(launch, now, saved=launch.start_s is not None and stopping)

    def _seen(self, launch: JournalLaunch, entry: Entry, now: float) -> None:
        changed: dict[str, object] = {}
        if launch.queue_id != entry.id or launch.missing:
            changed |= {"queue_id": entry.id, "missing": 0}
        if launch.status == "intended":
            changed["status"] = "launched"
            self._journal.event(now, "found", launch.job, f"{launch.name} ({entry.id})")
        if entry.status == "running" and launch.start_s is None:
            changed["start_s"] = entry.start_s if entry.start_s is not None else now
            self._journal.set_job(launch.job, started=1)
            self._journal.event(now, "running", launch.job, launch.name)
        if changed:
            self._journal.set_launch(launch.name, **changed)
        if entry.status == "done":
            self._journal.set_launch(launch.name, status="ended", end_s=now)
            self._finish(launch.job, "done", now, "")
        elif entry.status == "failed":
            self._ended_early(launch, entry, now)

    def _ended_early(self, launch: JournalLaunch, entry: Entry, now: float) -> None:
        job = self._journal.job(launch.job)
        assert job is not None
        stopped = launch.status == "stopping"
        # A job that goes on from a checkpoint is ended at a limit as by the loop.
        lost = entry.cause == "host"
        limited = entry.cause == "limit" and job.request.elastic and not stopped
        self._end(launch, now, saved=(stopped or limited) and not lost)
        if limited:
            text = f"{launch.name} reached its time limit in the queue"
            self._journal.event(now, "time limit", launch.job, text)
        elif lost:
            text = f"{launch.name} lost a host"
            self._journal.event(now, "lost", launch.job, text)
        # One that was only intended may not have been begun in full.
        elif launch.status == "launched":
            self._failed(launch, now)

    def _failed(self, launch: JournalLaunch, now: float) -> None:
        job = self._journal.job(launch.job)
        assert job is not None
        failures = job.failures + 1
        self._journal.set_job(job.name, failures=failures)
        self._journal.event(now, "failed", job.name, launch.name)
        if failures >= _MOST_FAILURES and job.status == "active":
            text = f"{failures} launches failed, the last was {launch.name}"
            self._finish(job.name, "failed", now, text)

    def _finish(self, name: str, status: str, now: float, text: str) -> None:
        job = self._journal.job(name)
        assert job is not None
        if job.status != "active":
            return
        due = job.request.deadline_s
        if job.promised and due is not None and now > due and not job.broken:
            self._journal.set_job(name, broken=f"it ended {now - due:.0f} s late")
        self._journal.set_job(name, status=status, ended_s=now, left=0.0)
        self._journal.event(now, status, name, text)

    def _end(self, launch: JournalLaunch, now: float, *, saved: bool) -> None:
        """Write that a launch has ended; its progress counts if it could save it."""
        job = self._journal.job(launch.job)
        assert job is not None
        if saved:
            self._journal.set_job(
                job.name, left=_left(job, launch, now), left_at=now, started=1
            )
        self._journal.set_launch(launch.name, status="ended", end_s=now)

    # What is decided.

    def _state(self, snapshot: Snapshot, now: float) -> ClusterState:
        """Return the state as documents.

        Raises:
            PlanFileError: If the queue's answer contradicts itself.
        """
        measured = {row.device for row in self._settings.throughputs.rows}
        hosts = tuple(each for each in snapshot.hosts if each.device in measured)
        if not hosts:
            known = ", ".join(sorted({each.device for each in snapshot.hosts}))
            raise QueueError(
                f"no host has a device type with throughputs, only {known}; give "
                f"names with --device, or throughputs of these"
            )
        names = {each.name for each in hosts}
        occupied = tuple(
            each
            for each in occupied_by_others(snapshot.entries, now)
            if set(each.devices) <= names
        )
        free = Counter({each.name: each.devices - each.down for each in hosts})
        for other in occupied:
            free.subtract(other.devices)
        running = {e.name for e in snapshot.entries if e.status == "running"}
        launches = {each.job: each for each in self._journal.launches(*_ALIVE)}
        jobs = []
        for job in self._journal.jobs("active"):
            launch = launches.get(job.name)
            left = _left(job, launch, now)
            if launch is not None and (
                launch.status == "stopping"
                # The queue has not started it, and may have given its devices away.
                or (launch.name not in running and not _fits(launch.devices, free))
            ):
                launch = None
            jobs.append(_state_job(job, launch, left, now))
        data = {
            "now_s": now,
            "hosts": [each.to_data() for each in hosts],
            "occupied": [each.to_data() for each in occupied],
            "jobs": [each.to_data() for each in jobs],
            "reservations": [
                each.to_data()
                for each in self._journal.reservations()
                if each.job in {job.request.name for job in jobs}
            ],
            "price": self._settings.price.to_data(),
            "rate_margin": self._settings.rate_margin,
        }
        return ClusterState.from_data(data, where="the queue's state")

    def _decide(self, state: ClusterState) -> AdmissionDecision:
        """Answer the jobs that were submitted, and schedule all."""
        throughputs = self._settings.throughputs
        made: AdmissionDecision | None = None
        for job in self._journal.jobs("submitted"):
            request, guard_s = job.request, self._settings.guard_s
            guarded, due = request, request.deadline_s
            if due is not None:
                # A deadline within the guard is one that nothing can meet.
                due = max(due - guard_s, nextafter(request.submitted_s, inf))
                guarded = request.model_copy(update={"deadline_s": due})
            try:
                made = admit(guarded, state, throughputs=throughputs)
            except MeshwrightError as error:
                self._answer(job, None, state.now_s, str(error))
                continue
            early = f" (deadlines count {guard_s:g} s early, --guard-s)"
            why = made.reasons[0] + ("" if made.admitted or not guard_s else early)
            self._answer(job, made, state.now_s, why)
            if made.admitted:
                new = StateJob(
                    request=request,
                    iterations_left=request.iterations,
                    promised=made.promise is not None,
                )
                state = state.model_copy(update={"jobs": (*state.jobs, new)})
            state = state.model_copy(update={"reservations": made.schedule})
        if made is None:
            made = reschedule(state, throughputs=throughputs)
            with self._journal.transaction():
                if not _same_ahead(state.reservations, made.schedule, state.now_s):
                    self._journal.keep_reservations(made.schedule)
                self._tell_broken(made, state.now_s)
        return made

    def _answer(
        self, job: JournalJob, made: AdmissionDecision | None, now: float, why: str
    ) -> None:
        """Write the answer to a job and what it reserves, as one."""
        admitted = made is not None and made.admitted
        with self._journal.transaction():
            self._journal.set_job(
                job.name,
                status="active" if admitted else "declined",
                promised=int(made is not None and made.promise is not None),
                reason=why,
                cause="input" if made is None else made.cause or "",
                left_at=now,
                ended_s=None if admitted else now,
            )
            self._journal.event(
                now, "admitted" if admitted else "declined", job.name, why
            )
            if made is not None:
                for change in made.changes:
                    text = json.dumps({**change.to_data(), "for": job.name})
                    self._journal.event(now, "change", change.job, text)
                self._journal.keep_reservations(made.schedule)
                self._tell_broken(made, now)

    def _tell_broken(self, made: AdmissionDecision, now: float) -> None:
        for name, why in made.broken.items():
            job = self._journal.job(name)
            if job is not None and not job.broken:
                self._journal.set_job(name, broken=why)
                self._journal.event(now, "promise broken", name, why)

    # What is done.

    def _act(self, made: AdmissionDecision, snapshot: Snapshot, now: float) -> None:
        """Make the queue do what the schedule says for now."""
        self._release(snapshot, now)
        active = {job.name: job for job in self._journal.jobs("active")}
        launches = {each.job: each for each in self._journal.launches(*_ALIVE)}
        wanted = {name: _wanted(made, name, now) for name in active}
        for name, launch in launches.items():
            segment = wanted.get(name)
            kept = segment is not None and segment.devices == launch.devices
            if not kept or launch.status == "stopping":
                self._stop(launch, now)
        free = self._free(snapshot)
        for name, segment in wanted.items():
            current = launches.get(name)
            if segment is None or (
                current is not None and current.status != "intended"
            ):
                continue
            if current is not None and current.devices != segment.devices:
                continue
            if not _fits(segment.devices, free):
                continue
            free.subtract(segment.devices)
            launch = current or self._intend(active[name], segment, now)
            self._try(now, partial(self._launch, launch, now))

    def _release(self, snapshot: Snapshot, now: float) -> None:
        """Give back devices of what has ended, and stop what should not be there."""
        launches = {each.name: each for each in self._journal.launches()}
        for entry in snapshot.entries:
            if not entry.ours:
                continue
            launch = launches.get(entry.name)
            over = entry.status in ("done", "failed")
            second = launch is not None and entry.id != launch.queue_id
            dead = launch is not None and launch.status == "ended"
            if entry.kept or (not over and (second or dead)):
                self._try(now, partial(self._queue.stop, entry.id))

    def _free(self, snapshot: Snapshot) -> Counter[str]:
        free = Counter({each.name: each.devices - each.down for each in snapshot.hosts})
        seen = set()
        for entry in snapshot.entries:
            free.subtract(entry.devices)
            if entry.devices:
                seen.add(entry.name)
        for launch in self._journal.launches("launched", "stopping"):
            # The queue has not started it yet.
            if launch.name not in seen:
                free.subtract(launch.devices)
        return free

    def _intend(
        self, job: JournalJob, segment: ReservedSegment, now: float
    ) -> JournalLaunch:
        number = job.launches + 1
        before = [
            each.queue_id for each in self._journal.launches() if each.job == job.name
        ]
        launch = JournalLaunch(
            name=f"{PREFIX}{job.name}-{number}",
            job=job.name,
            status="intended",
            queue_id=None,
            device=segment.device,
            devices=dict(segment.devices),
            words=_words(job, segment),
            after=before[-1] if before else None,
            rate=segment.iterations_per_s,
            stall_s=segment.stall_s,
            at_s=now,
            start_s=None,
            end_s=None,
            missing=0,
        )
        with self._journal.transaction():
            self._journal.intend(launch)
            self._journal.set_job(job.name, launches=number)
            self._journal.event(now, "launch", job.name, launch.name)
        return launch

    def _launch(self, launch: JournalLaunch, now: float) -> None:
        """Launch what was intended; without an answer, the next look finds out."""
        known = self._queue.launch(
            Launch(
                name=launch.name,
                job=launch.job,
                device=launch.device,
                devices=launch.devices,
                words=launch.words,
                after=launch.after,
            )
        )
        with self._journal.transaction():
            self._journal.set_launch(launch.name, status="launched", queue_id=known)
            self._journal.event(now, "launched", launch.job, f"{launch.name} ({known})")

    def _stop(self, launch: JournalLaunch, now: float) -> None:
        if launch.status != "stopping":
            with self._journal.transaction():
                self._journal.set_launch(launch.name, status="stopping")
                self._journal.event(now, "stop", launch.job, launch.name)
        if launch.queue_id is not None:
            self._try(now, partial(self._queue.stop, launch.queue_id))

    def _try(self, now: float, do: Callable[[], None]) -> None:
        """Do one thing; what a queue refuses is told, and tried at the next look."""
        try:
            do()
        except NoAnswerError:
            # It would not answer what comes next, each time for as long.
            raise
        except QueueError as error:
            self._tell_problem(now, str(error))


def _same_ahead(
    before: Iterable[Reservation], after: Iterable[Reservation], now: float
) -> bool:
    """Compare two schedules from now on; writing costs a disk's time."""

    def ahead(given: Iterable[Reservation]) -> dict[str, object]:
        return {
            each.job: [
                (round(segment.end_s, 3), segment.devices)
                for segment in each.segments
                if segment.end_s > now
            ]
            for each in given
        }

    return ahead(before) == ahead(after)


def _devices(snapshot: Snapshot) -> int:
    """Devices that work and are nobody else's."""
    others = (each for each in snapshot.entries if not each.ours)
    held = sum(sum(each.devices.values()) for each in others)
    return max(0, sum(each.devices - each.down for each in snapshot.hosts) - held)


def _left(job: JournalJob, launch: JournalLaunch | None, now: float) -> float:
    """Iterations left by now, as far as throughputs and reports tell."""
    left = job.left
    if launch is not None and launch.start_s is not None:
        since = max(launch.start_s + launch.stall_s, job.left_at)
        left -= max(0.0, now - since) * launch.rate
    return max(left, _LEAST * job.request.iterations)


def _fits(devices: Mapping[str, int], free: Mapping[str, int]) -> bool:
    return all(free.get(host, 0) >= count for host, count in devices.items())


def _state_job(
    job: JournalJob, launch: JournalLaunch | None, left: float, now: float
) -> StateJob:
    stall = 0.0
    if launch is not None:
        start = now if launch.start_s is None else launch.start_s
        stall = max(0.0, start + launch.stall_s - now)
    return StateJob(
        request=job.request,
        iterations_left=left,
        devices={} if launch is None else launch.devices,
        started=job.started,
        stall_s=stall,
        promised=job.promised,
    )


def _wanted(made: AdmissionDecision, name: str, now: float) -> ReservedSegment | None:
    """Return what a job is to have now."""
    given = made.reservation(name)
    for segment in () if given is None else given.segments:
        if segment.start_s <= now < segment.end_s:
            return segment
    return None


def _words(job: JournalJob, segment: ReservedSegment) -> tuple[str, ...]:
    values: Mapping[str, str] = {
        "{degree}": str(segment.degree),
        "{device}": segment.device,
        "{plan}": segment.plan or "",
        "{job}": job.name,
    }
    return tuple(_filled(word, values) for word in job.request.command)


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def progress(journal: Journal, name: str, iterations: float, now: float) -> None:
    """Write how many iterations a job says that it has done.

    Raises:
        JournalError: If there is no such active job, or it cannot have done as many.
    """
    job = journal.job(name)
    if job is None or job.status != "active":
        raise JournalError(f"job {name} is not active; see GET /status")
    if not 0.0 <= iterations <= job.request.iterations:
        raise JournalError(
            f"job {name} says {iterations:g} of {job.request.iterations:g} iterations; "
            f"give 0 to these"
        )
    left = max(job.request.iterations - iterations, _LEAST * job.request.iterations)
    journal.set_job(name, left=left, left_at=now)
