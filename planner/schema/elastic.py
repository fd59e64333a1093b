"""Record of an elastic stream: what every job was told, and on what it ran when."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from planner.schema.base import MOST_DEVICES, AnyFloat, Document
from planner.schema.stream import record_json, require_below, require_equal_columns

__all__ = [
    "Answer",
    "ElasticJobs",
    "ElasticModel",
    "ElasticOutcome",
    "ElasticPieces",
    "ElasticRecord",
    "PieceChange",
]

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Index = Annotated[int, Field(ge=0)]
Degree = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
Devices = Annotated[int, Field(ge=0, le=MOST_DEVICES)]

#: Answer to a job: it is promised its deadline, turned away, or neither.
Answer = Literal["promised", "declined", "none"]
#: By its deadline; after it, or not at all; turned away; not decided yet.
ElasticOutcome = Literal["met", "late", "declined", "open"]
#: Why a piece of a job begins.
PieceChange = Literal["started", "resized", "moved", "resumed"]

#: Times this close are one time.
_SAME_TIME_S = 1e-5


class ElasticModel(Document):
    """A model with its batch.

    Attributes:
        name: Name, for people.
        rates: Iterations per second on each type and number of devices, 0 where it
            cannot run.
    """

    name: str
    rates: tuple[tuple[Seconds, ...], ...]


class ElasticJobs(Document):
    """A column a fact, a row a job, in the order of submission.

    Attributes:
        name: Name.
        model: Index of its model.
        submit_s: Time of submission.
        deadline_s: Deadline.
        iterations: Iterations that it needs.
        answer: Answer to it.
        told_s: Time of the answer; null if there was none.
        end_s: Time of its end; null if it did not end.
        outcome: Result.
    """

    name: tuple[str, ...]
    model: tuple[Index, ...]
    submit_s: tuple[Seconds, ...]
    deadline_s: tuple[Seconds, ...]
    iterations: tuple[Positive, ...]
    answer: tuple[Answer, ...]
    told_s: tuple[Seconds | None, ...]
    end_s: tuple[Seconds | None, ...]
    outcome: tuple[ElasticOutcome, ...]

    def __len__(self) -> int:
        return len(self.name)


class ElasticPieces(Document):
    """A column a fact, a row a job's time on the same devices, by the start.

    Attributes:
        job: Index of the job.
        kind: Index of the device type.
        degree: Number of devices.
        hosts: Number of hosts.
        start_s: Time from which the job holds them.
        end_s: Time until which it does.
        stall_s: Time at the start without progress.
        change: Change by which it got them.
        failed: Whether a failure of a device ended it.
    """

    job: tuple[Index, ...]
    kind: tuple[Index, ...]
    degree: tuple[Degree, ...]
    hosts: tuple[Degree, ...]
    start_s: tuple[Seconds, ...]
    end_s: tuple[Seconds, ...]
    stall_s: tuple[Seconds, ...]
    change: tuple[PieceChange, ...]
    failed: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.job)


class ElasticRecord(Document):
    """An episode of elastic jobs under one scheduler.

    Attributes:
        world: World of the episode.
        trace: Name of the trace.
        source: Name of the source of throughputs.
        policy: Name of the scheduler; null if nobody said.
        trace_load: Share of the trace's own load; null if nobody said.
        seed: Seed of the failures; null if nobody said.
        end_s: Time up to which the record goes.
        kinds: Device types.
        degrees: Numbers of devices that jobs can have, ascending.
        models: Models of the jobs.
        devices: Times, and the devices of each type that are alive from then on.
        summary: Figures of the episode, under the names of the world.
        jobs: Jobs that were submitted.
        pieces: Devices that they held.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "elastic record"

    schema_version: Literal[1] = 1
    world: Literal["elastic-stream"] = "elastic-stream"
    trace: str
    source: str
    policy: str | None = None
    trace_load: Positive | None = None
    seed: int | None = None
    end_s: Seconds
    kinds: Annotated[tuple[str, ...], Field(min_length=1)]
    degrees: Annotated[tuple[Degree, ...], Field(min_length=1)]
    models: tuple[ElasticModel, ...]
    devices: Annotated[
        tuple[tuple[Seconds, tuple[Devices, ...]], ...], Field(min_length=1)
    ]
    summary: dict[str, AnyFloat] = Field(default_factory=dict)
    jobs: ElasticJobs
    pieces: ElasticPieces

    def to_json(self) -> str:
        """JSON with a line a field and a line a column of jobs: they are long."""
        return record_json(self, "jobs", "pieces")

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        require_equal_columns("jobs", self.jobs)
        require_equal_columns("pieces", self.pieces)
        for name, count in Counter(self.jobs.name).most_common(1):
            if count > 1:
                raise ValueError(f"{count} jobs are called {name}; give each a name")
        require_below("jobs.model", self.jobs.model, len(self.models))
        require_below("pieces.job", self.pieces.job, len(self.jobs))
        require_below("pieces.kind", self.pieces.kind, len(self.kinds))
        if list(self.degrees) != sorted(set(self.degrees)):
            raise ValueError(f"degrees {self.degrees}; give each once, ascending")
        for model in self.models:
            sizes = [len(row) for row in model.rates]
            if sizes != [len(self.degrees)] * len(self.kinds):
                raise ValueError(
                    f"model {model.name} has rates of {sizes} degrees; give a row of "
                    f"{len(self.degrees)} for each of {len(self.kinds)} types"
                )
        times = [time for time, _ in self.devices]
        if times != sorted(times) or any(
            len(counts) != len(self.kinds) for _, counts in self.devices
        ):
            raise ValueError(
                f"devices must have ascending times, and a number for each of "
                f"{len(self.kinds)} types"
            )
        return self

    @model_validator(mode="after")
    def _jobs_make_sense(self) -> Self:
        jobs, last = self.jobs, self.end_s + _SAME_TIME_S
        before = 0.0
        for at, name in enumerate(jobs.name):
            submit, due = jobs.submit_s[at], jobs.deadline_s[at]
            told, end, outcome = jobs.told_s[at], jobs.end_s[at], jobs.outcome[at]
            if submit < before:
                raise ValueError(f"job {name} is submitted before the one above it")
            before = submit
            if (told is None) != (jobs.answer[at] == "none"):
                raise ValueError(f"job {name} must have an answer and its time, or not")
            for what, time in (("told", told), ("ended", end)):
                if time is not None and not submit <= time <= last:
                    raise ValueError(
                        f"job {name}, submitted at {submit:g} s, is {what} at "
                        f"{time:g} s; give times from then to the end of "
                        f"{self.end_s:g} s"
                    )
            fits = {
                "met": end is not None and end <= due + _SAME_TIME_S,
                "late": end is None or end >= due - _SAME_TIME_S,
                "declined": end is None and jobs.answer[at] == "declined",
                "open": end is None,
            }[outcome]
            if not fits or (outcome != "declined" and jobs.answer[at] == "declined"):
                ended = "does not end" if end is None else f"ends at {end:g} s"
                raise ValueError(
                    f"job {name} is {outcome}, but its answer is {jobs.answer[at]}, "
                    f"its deadline {due:g} s, and it {ended}"
                )
        return self

    @model_validator(mode="after")
    def _pieces_make_sense(self) -> Self:
        pieces, last = self.pieces, self.end_s + _SAME_TIME_S
        free_from: dict[int, float] = {}
        for at, job in enumerate(pieces.job):
            start, end = pieces.start_s[at], pieces.end_s[at]
            first = free_from.get(job, self.jobs.submit_s[job])
            if not first <= start <= end <= last:
                raise ValueError(
                    f"job {self.jobs.name[job]} holds devices from {start:g} to "
                    f"{end:g} s; give times from {first:g} s, when it is submitted or "
                    f"its last ones are given back, to the end of {self.end_s:g} s"
                )
            free_from[job] = end
        return self

    @model_validator(mode="after")
    def _no_more_devices_than_there_are(self) -> Self:
        pieces = self.pieces
        steps: list[tuple[float, int, int]] = []
        for at, kind in enumerate(pieces.kind):
            steps.append((pieces.start_s[at], kind, pieces.degree[at]))
            steps.append((pieces.end_s[at], kind, -pieces.degree[at]))
        steps.sort(key=lambda step: step[0])
        held, alive, left = [0] * len(self.kinds), self.devices[0][1], [*self.devices]
        for number, (time, kind, change) in enumerate(steps):
            held[kind] += change
            while left and left[0][0] <= time:
                alive = left.pop(0)[1]
            # Of steps at one time the sum counts.
            if number + 1 < len(steps) and steps[number + 1][0] == time:
                continue
            for name, has, most in zip(self.kinds, held, alive, strict=True):
                if has > most:
                    raise ValueError(
                        f"jobs hold {has} {name} at {time:g} s, where {most} are alive"
                    )
        return self

    @model_validator(mode="after")
    def _sums_are_the_summary(self) -> Self:
        counts = Counter(self.jobs.outcome)
        found = {name: counts[name] for name in get_args(ElasticOutcome)}
        found["jobs"] = len(self.jobs)
        for name, count in found.items():
            said = self.summary.get(name, count)
            if said != count:
                raise ValueError(
                    f"summary.{name} is {said:g}, and the jobs' rows come to {count}"
                )
        return self
