"""Documents of admission control: a job, the state of a cluster, and a decision.

All times are seconds of one clock, as are Unix timestamps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import Field, model_validator

from planner.schema.base import MOST_DEVICES, Document

__all__ = [
    "AdmissionDecision",
    "ChangeKind",
    "ClusterState",
    "DeclineCause",
    "JobChange",
    "JobRequest",
    "OccupiedDevices",
    "Promise",
    "Reservation",
    "ReservedSegment",
    "ResizePrice",
    "StateHost",
    "StateJob",
    "ThroughputRow",
    "Throughputs",
]

T = TypeVar("T")
Seconds = Annotated[float, Field(ge=0)]
#: Time of a clock; those of the year 5138 are known to 15 microseconds.
Clock = Annotated[float, Field(ge=0, le=1e11)]
Positive = Annotated[float, Field(gt=0)]
Degree = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
#: Name of a job; queues make names of pods, batch jobs and actors of it.
JobName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$")]
#: Host to the number of its devices.
Devices = dict[Name, Degree]
#: Why a job is declined: it is too slow alone; the jobs that are due need more than
#: there is; no schedule was found.
DeclineCause = Literal["alone", "load", "search"]
ChangeKind = Literal["started", "resized", "moved", "paused", "resumed"]


class JobRequest(Document):
    """A job that asks for devices.

    Attributes:
        name: Name of the job, at most 40 of a-z, 0-9 and dashes.
        model: Model, as the throughputs name it.
        batch: Samples of an iteration.
        iterations: Iterations that the job needs in all.
        submitted_s: Time of submission.
        deadline_s: Time by which it has to end; null for a job without a promise.
        devices: Device types that it may run on; empty for all.
        min_degree: Fewest devices.
        max_degree: Most devices; null for no limit.
        elastic: Whether a running job may be resized, moved or paused.
        checkpoint_bytes: Bytes of a checkpoint; null for the state's default.
        command: Words of the command that starts it, for queues. ``{degree}`` and
            ``{plan}`` stand for what is decided.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "job"

    schema_version: Literal[1] = 1
    name: JobName
    model: Name
    batch: Degree
    iterations: Positive
    submitted_s: Clock
    deadline_s: Clock | None = None
    devices: tuple[Name, ...] = ()
    min_degree: Degree = 1
    max_degree: Degree | None = None
    elastic: bool = True
    checkpoint_bytes: Seconds | None = None
    command: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _limits_make_sense(self) -> Self:
        if self.deadline_s is not None and self.deadline_s <= self.submitted_s:
            raise ValueError(
                f"deadline_s={self.deadline_s:.10g} is not after "
                f"submitted_s={self.submitted_s:.10g}; give a later deadline, or leave "
                "it out for a job without a promise"
            )
        if self.max_degree is not None and self.max_degree < self.min_degree:
            raise ValueError(
                f"max_degree={self.max_degree} is below min_degree={self.min_degree}; "
                "give at least as many"
            )
        if any("\0" in word for word in self.command):
            raise ValueError(
                "command has a NUL character, which no process can be given; leave it "
                "out"
            )
        return self


class ThroughputRow(Document):
    """Throughput of a model on a number of devices of one type.

    Attributes:
        model: Model.
        batch: Samples of an iteration.
        device: Device type.
        degree: Number of devices.
        iterations_per_s: Rate on the fewest hosts that have so many devices.
        spread_iterations_per_s: Rate on more hosts; null if a job may not run so.
        plan: File of the plan that has this throughput, or null.
    """

    model: Name
    batch: Degree
    device: Name
    degree: Degree
    iterations_per_s: Positive
    spread_iterations_per_s: Positive | None = None
    plan: str | None = None


class Throughputs(Document):
    """Throughputs of one source.

    Attributes:
        origin: Whether they were measured (``table``) or are prices of plans.
        name: Name of the source.
        rows: The throughputs.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "throughputs"

    schema_version: Literal[1] = 1
    origin: Literal["table", "plans"]
    name: Name
    rows: Annotated[tuple[ThroughputRow, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        keys = [(row.model, row.batch, row.device, row.degree) for row in self.rows]
        twice = _first_twice(keys)
        if twice is not None:
            model, batch, device, degree = twice
            raise ValueError(
                f"{model} with batch {batch} on {degree} {device} has two throughputs; "
                "keep one"
            )
        for row in self.rows:
            if (row.plan is not None) != (self.origin == "plans"):
                raise ValueError(
                    f"{row.model} on {row.degree} {row.device} has plan={row.plan!r} "
                    f"where origin={self.origin!r}; a decision takes all throughputs "
                    "from a table or all from plans"
                )
        return self


class StateHost(Document):
    """A host.

    Attributes:
        name: Name of the host.
        device: Type of its devices, as the throughputs name it.
        devices: Number of devices.
        down: Devices of these that cannot be used.
    """

    name: Name
    device: Name
    devices: Degree
    down: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _no_more_down(self) -> Self:
        if self.down > self.devices:
            raise ValueError(
                f"host {self.name} has {self.down} of {self.devices} devices down; "
                f"give at most {self.devices}"
            )
        return self


class OccupiedDevices(Document):
    """Devices that belong to somebody else.

    Attributes:
        name: Holder, for messages.
        devices: Host to number of devices.
        until_s: Time at which they come free at the latest; null if unknown.
    """

    name: Name
    devices: Devices
    until_s: Seconds | None = None


class StateJob(Document):
    """A job that the cluster knows.

    Attributes:
        request: The job.
        iterations_left: Iterations that it still needs.
        devices: Devices that it holds; empty if it waits or is paused.
        started: Whether it has run before, so that it goes on from a checkpoint.
        stall_s: Time until a change that has begun is over.
        promised: Whether it was promised its deadline.
    """

    request: JobRequest
    iterations_left: Positive
    devices: Devices = Field(default_factory=dict)
    started: bool = False
    stall_s: Seconds = 0.0
    promised: bool = False

    @model_validator(mode="after")
    def _fits_the_request(self) -> Self:
        request = self.request
        if self.iterations_left > request.iterations:
            raise ValueError(
                f"job {request.name} has iterations_left={self.iterations_left:.10g} "
                f"of {request.iterations:.10g}; give at most these"
            )
        if self.promised and request.deadline_s is None:
            raise ValueError(
                f"job {request.name} is promised and has no deadline; give deadline_s"
            )
        return self


class ResizePrice(Document):
    """Time that a start or a change of devices costs a job.

    A first start costs ``restart_s``. A change costs ``restart_s`` and the bytes of the
    checkpoint over ``bytes_per_s`` of each new device. ``restart_s`` includes the time
    in which the job that had the devices before gives them back.

    Attributes:
        restart_s: Time from a decision to the first new iteration.
        checkpoint_bytes: Bytes of a checkpoint where a job gives none.
        bytes_per_s: Rate at which each device reads its part.
    """

    restart_s: Seconds = 30.0
    checkpoint_bytes: Seconds = 4e9
    bytes_per_s: Positive = 2e9


class ReservedSegment(Document):
    """Devices of a job from a time to another.

    Attributes:
        start_s: Start.
        end_s: End.
        device: Device type.
        degree: Number of devices.
        devices: Host to number of devices.
        stall_s: Time at the start in which the job makes no progress.
        iterations_per_s: Rate after that.
        plan: File of the plan, or null.
    """

    start_s: Seconds
    end_s: Seconds
    device: Name
    degree: Degree
    devices: Devices
    stall_s: Seconds
    iterations_per_s: Positive
    plan: str | None = None


class Reservation(Document):
    """All that a job is to get.

    Attributes:
        job: Name of the job.
        segments: Devices over time, in order; empty if none can be told.
        finish_s: Time at which the job ends; null without segments.
        deadline_s: Its deadline, or null.
        promised: Whether it is promised that deadline.
    """

    job: JobName
    segments: tuple[ReservedSegment, ...]
    finish_s: Seconds | None
    deadline_s: Seconds | None = None
    promised: bool = False


class ClusterState(Document):
    """State of a cluster at a time.

    Attributes:
        now_s: The time.
        hosts: The hosts.
        occupied: Devices of others.
        jobs: Jobs that were admitted and have not ended.
        reservations: What the last decision reserved for them; without, it is found
            anew.
        price: Cost of a change.
        rate_margin: Share by which jobs may be slower than their throughputs without
            breaking a promise.
        throughputs: Throughputs; null if they are given apart.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "cluster state"

    schema_version: Literal[1] = 1
    now_s: Clock
    hosts: Annotated[tuple[StateHost, ...], Field(min_length=1)]
    occupied: tuple[OccupiedDevices, ...] = ()
    jobs: tuple[StateJob, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    price: ResizePrice = Field(default_factory=ResizePrice)
    rate_margin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    throughputs: Throughputs | None = None

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        hosts = {host.name: host for host in self.hosts}
        for what, names in (
            ("host", [host.name for host in self.hosts]),
            ("job", [job.request.name for job in self.jobs]),
            ("reservation", [each.job for each in self.reservations]),
        ):
            twice = _first_twice(names)
            if twice is not None:
                raise ValueError(f"{what} {twice} is given twice; keep one")
        held: Counter[str] = Counter()
        for who, devices in self._holders():
            for name in devices:
                if name not in hosts:
                    raise ValueError(
                        f"{who} holds devices of host {name}, and there are "
                        f"{_some(hosts)}; give that host, or correct the name"
                    )
            if len({hosts[name].device for name in devices}) > 1:
                raise ValueError(f"{who} holds devices of two types; a job has one")
            held.update(devices)
        for name, host in hosts.items():
            if held[name] > host.devices:
                raise ValueError(
                    f"{held[name]} devices of host {name} are held where it has "
                    f"{host.devices}; correct the jobs, or the host"
                )
        return self

    def _holders(self) -> Iterable[tuple[str, Mapping[str, int]]]:
        for job in self.jobs:
            yield f"job {job.request.name}", job.devices
        for other in self.occupied:
            yield other.name, other.devices


class JobChange(Document):
    """A change of a job's devices.

    Attributes:
        job: Name of the job.
        kind: Kind of change.
        at_s: Time of the change.
        before: Devices until then.
        after: Devices from then on.
        stall_s: Time in which the job makes no progress.
        reason: Reason.
    """

    job: JobName
    kind: ChangeKind
    at_s: Seconds
    before: Devices
    after: Devices
    stall_s: Seconds
    reason: str


class Promise(Document):
    """A promise.

    Attributes:
        finish_s: Time at which the job ends by the schedule.
        deadline_s: Time that is promised.
        slack_s: Time between them.
    """

    finish_s: Seconds
    deadline_s: Seconds
    slack_s: Seconds


class AdmissionDecision(Document):
    """Answer to a job.

    Attributes:
        job: Name of the job; null where the jobs of the state alone were scheduled.
        admitted: Whether it is admitted.
        proven: For a job that is declined, whether no schedule at all could meet its
            deadline; false if none was found.
        cause: Why a job is declined: ``alone``, as it is too slow whatever else runs;
            ``load``, as the jobs that are due need more than there is; ``search``, as
            no schedule was found. Null for others.
        reasons: Reasons, most important first.
        promise: Promise to the job; null for none.
        changes: Changes of jobs that were there, in time, but for those that the
            state's reservations have.
        schedule: Devices of all jobs over time.
        broken: Jobs whose promises cannot be kept, with the reasons.
        decided_s: Time of the state that was decided on.
        origin: Origin of the throughputs.
        source: Their source.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "admission decision"

    schema_version: Literal[1] = 1
    job: JobName | None
    admitted: bool
    proven: bool = False
    cause: DeclineCause | None = None
    reasons: tuple[str, ...]
    promise: Promise | None = None
    changes: tuple[JobChange, ...] = ()
    schedule: tuple[Reservation, ...] = ()
    broken: dict[JobName, str] = Field(default_factory=dict)
    decided_s: Seconds
    origin: Literal["table", "plans"]
    source: Name

    def reservation(self, job: str) -> Reservation | None:
        """Return what a job is to get; None for a job without a reservation."""
        return next((each for each in self.schedule if each.job == job), None)


def _first_twice(values: Iterable[T]) -> T | None:
    found = [value for value, count in Counter(values).items() if count > 1]
    return found[0] if found else None


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return ", ".join(listed[:6]) + more
