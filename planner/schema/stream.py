"""Record of every job of a stream: who ran where, from when to when."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from planner.schema.base import AnyFloat, Document

__all__ = [
    "OUTCOMES",
    "Outcome",
    "StreamCluster",
    "StreamJobs",
    "StreamModel",
    "StreamPlan",
    "StreamRecord",
    "record_json",
    "require_below",
    "require_equal_columns",
]

#: How a job ended: by its deadline; after it, or turned away because it could not be
#: met; turned away although it could have run; for want of devices or of a place to
#: wait; still running, or still waiting, when the stream ended.
Outcome = Literal["met", "late", "refused", "no_room", "unfinished", "undecided"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
#: Of a list, or -1 for none.
Index = Annotated[int, Field(ge=-1)]

#: Ends and the horizon this close are at one time.
_SAME_TIME_S = 1e-6


class StreamCluster(Document):
    """Devices that jobs run on, numbered host by host.

    Attributes:
        name: For people.
        hosts: How many hosts in a row have how many devices each.
        occupied: First and last of devices that no job of the stream may have.
    """

    name: str
    hosts: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    occupied: tuple[tuple[Count, Count], ...] = ()

    @property
    def num_devices(self) -> int:
        """Occupied ones included."""
        return sum(many * size for many, size in self.hosts)

    @property
    def num_usable(self) -> int:
        """Devices that jobs may have."""
        return self.num_devices - sum(last - first + 1 for first, last in self.occupied)


class StreamModel(Document):
    """Model that arrives again and again.

    Attributes:
        name: For people.
        sequential_s: Of a job of usual size on one reference device.
        demand_bytes: What throughput in bytes counts; None where it counts time.
    """

    name: str
    sequential_s: Annotated[float, Field(gt=0)]
    demand_bytes: Seconds | None = None


class StreamPlan(Document):
    """A way in which jobs of a model ran.

    Attributes:
        model: Index of the model.
        label: Of the strategy, for people.
        degree: Devices that it splits a job over.
        alone_s: Of a job of usual size that shares no link with others.
    """

    model: Count
    label: str
    degree: Annotated[int, Field(ge=1)]
    alone_s: Annotated[float, Field(gt=0)]


class StreamJobs(Document):
    """A column a fact, a row a job, in the order of arrival.

    Attributes:
        arrival_s: When it arrived.
        model: Index of its model.
        beta: Longest acceptable time over that on one reference device.
        size: Its steps over those of the usual size.
        asked: Devices that the policy asked for; 0 to turn it away, or undecided.
        decided_s: When it was placed, turned away or given up; null if never.
        start_s: When it began to run; null if it did not.
        end_s: When it ended; null if it did not before the horizon.
        plan: Index of the plan that it ran by, -1 for none.
        devices: Index of the devices that it held, -1 for none.
        done: Share of its work that was done by the horizon.
        outcome: How it ended.
    """

    arrival_s: tuple[Seconds, ...]
    model: tuple[Count, ...]
    beta: tuple[Annotated[float, Field(gt=0)], ...]
    size: tuple[Annotated[float, Field(gt=0)], ...]
    asked: tuple[Count, ...]
    decided_s: tuple[Seconds | None, ...]
    start_s: tuple[Seconds | None, ...]
    end_s: tuple[Seconds | None, ...]
    plan: tuple[Index, ...]
    devices: tuple[Index, ...]
    done: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    outcome: tuple[Outcome, ...]

    def __len__(self) -> int:
        return len(self.arrival_s)


class StreamRecord(Document):
    """An episode of a job stream under one policy.

    Attributes:
        world: Which rules: the replay of the benchmark, or any cluster.
        cluster: That jobs ran on.
        law: Of the arrivals, for people; null for others.
        offered_load: Work offered over what the cluster can do, where it sets the law.
        seed: Of the arrivals; null if they were not drawn.
        policy: Who decided; null if nobody said.
        weights: Names the weights of a policy that has learned.
        horizon_s: When the stream ended.
        interval_s: Mean time between arrivals.
        blocked: Outcomes that count as blocked in this world.
        models: What may arrive.
        plans: By which jobs ran.
        device_sets: Devices that jobs held: first and last of each run of numbers.
        summary: What the world itself says the episode came to, by its own names.
        jobs: That arrived up to the horizon.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "stream record"

    schema_version: Literal[1] = 1
    world: Literal["job-stream", "job-stream-world"]
    cluster: StreamCluster
    law: str | None = None
    offered_load: Annotated[float, Field(gt=0)] | None = None
    seed: int | None = None
    policy: str | None = None
    weights: str | None = None
    horizon_s: Annotated[float, Field(gt=0)]
    interval_s: Annotated[float, Field(gt=0)]
    blocked: tuple[Outcome, ...]
    models: Annotated[tuple[StreamModel, ...], Field(min_length=1)]
    plans: tuple[StreamPlan, ...]
    device_sets: tuple[tuple[tuple[Count, Count], ...], ...]
    summary: dict[str, AnyFloat] = Field(default_factory=dict)
    jobs: StreamJobs

    def to_json(self) -> str:
        """JSON with a line a field and a line a column of jobs: they are long."""
        return record_json(self, "jobs")

    def counts(self) -> dict[Outcome, int]:
        """Jobs by outcome, those of none included."""
        found = Counter(self.jobs.outcome)
        return {outcome: found[outcome] for outcome in OUTCOMES}

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        jobs = self.jobs
        require_equal_columns("jobs", jobs)
        require_below("jobs.model", jobs.model, len(self.models))
        require_below("jobs.plan", jobs.plan, len(self.plans))
        require_below("jobs.devices", jobs.devices, len(self.device_sets))
        require_below("plans.model", (p.model for p in self.plans), len(self.models))
        devices = self.cluster.num_devices
        for name, pairs in (
            ("cluster.occupied", self.cluster.occupied),
            *(("device_sets", pairs) for pairs in self.device_sets),
        ):
            _require_runs(name, pairs, devices)
        return self

    @model_validator(mode="after")
    def _rows_make_sense(self) -> Self:
        before = 0.0
        columns = (self.jobs.arrival_s, self.jobs.decided_s, self.jobs.start_s)
        rows = zip(
            *columns,
            self.jobs.end_s,
            self.jobs.devices,
            self.jobs.plan,
            self.jobs.outcome,
            strict=True,
        )
        for number, (arrival, decided, start, end, devices, plan, outcome) in enumerate(
            rows
        ):
            if arrival < before:
                raise ValueError(f"job {number} arrives before the one above it")
            before = arrival
            ran = start is not None
            if ran != (devices >= 0) or ran != (plan >= 0):
                raise ValueError(
                    f"job {number} must have a start, devices and a plan, or none"
                )
            why = _misfit(outcome, decided is not None, ran, end is not None)
            if why:
                raise ValueError(f"job {number} is {outcome} and {why}")
            latest = self.horizon_s * (1 + 1e-9) + _SAME_TIME_S
            times = [t for t in (arrival, decided, start, end) if t is not None]
            if times != sorted(times) or times[-1] > latest:
                raise ValueError(
                    f"job {number} must arrive, be decided, start and end in this "
                    f"order, up to the horizon of {self.horizon_s:g} s"
                )
        return self

    @model_validator(mode="after")
    def _sums_are_the_summary(self) -> Self:
        found = self.counts()
        counts: dict[str, int] = {name: found[name] for name in OUTCOMES}
        counts["arrived"] = len(self.jobs)
        counts["blocked"] = sum(found[outcome] for outcome in set(self.blocked))
        for name, count in counts.items():
            said = self.summary.get(name, count)
            if said != count:
                raise ValueError(
                    f"summary.{name} is {said:g}, and the jobs' rows come to {count}"
                )
        return self


def record_json(record: Document, *tables: str) -> str:
    """Write a record as JSON, a line a field and a line a column of long tables.

    Args:
        record: The record.
        tables: Fields whose values are tables.
    """
    data = record.to_data()
    long = [
        f'  "{name}": {{\n{_lines(data.pop(name), "    ")}\n  }}' for name in tables
    ]
    return "{\n" + ",\n".join([_lines(data, "  "), *long]) + "\n}\n"


def _lines(data: dict[str, object], indent: str) -> str:
    return ",\n".join(
        f"{indent}{json.dumps(key)}: "
        f"{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for key, value in data.items()
    )


def require_equal_columns(name: str, table: Document) -> None:
    """Refuse a table whose columns have different numbers of rows.

    Raises:
        ValueError: With the first two that differ.
    """
    columns = list(type(table).model_fields)
    count = len(getattr(table, columns[0]))
    for column in columns:
        if len(getattr(table, column)) != count:
            raise ValueError(
                f"{name}.{column} has {len(getattr(table, column))} rows, "
                f"{name}.{columns[0]} {count}; all columns have as many"
            )


def require_below(name: str, values: Iterable[int], count: int) -> None:
    """Refuse indices of what is not there.

    Raises:
        ValueError: With the largest.
    """
    most = max(values, default=-1)
    if most >= count:
        raise ValueError(f"{name} has index {most}, and there are {count} of them")


def _require_runs(name: str, pairs: Sequence[tuple[int, int]], devices: int) -> None:
    """Runs of devices in ascending order that the cluster has."""
    before = -1
    for first, last in pairs:
        if not before < first <= last < devices:
            raise ValueError(
                f"{name} has devices {first} to {last}; give runs in ascending order, "
                f"below {devices}"
            )
        before = last


def _misfit(outcome: Outcome, decided: bool, ran: bool, ended: bool) -> str:
    """Return why a job with this outcome cannot be; None if it can."""
    if decided != (outcome != "undecided"):
        return "has a decision" if decided else "has no decision"
    if outcome in {"met", "unfinished"} and not ran:
        return "never started"
    if outcome in {"refused", "no_room", "undecided"} and ran:
        return "started"
    if ended != (ran and outcome in {"met", "late"}):
        return "has an end" if ended else "has no end"
    return ""
