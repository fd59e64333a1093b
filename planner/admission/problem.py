"""Tasks and free devices of a state, and schedules as documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.admission.schedule import Hosts, Piece, Profile, Schedule, Shape, Task
from planner.errors import StrategyError, UnknownNameError
from planner.schema.admission import (
    ClusterState,
    JobRequest,
    Reservation,
    ReservedSegment,
    StateJob,
    Throughputs,
)

__all__ = ["Problem", "read_problem"]

#: Seconds by which the clocks of those who submit and of the cluster may differ.
_CLOCKS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A state as numbers.

    Attributes:
        state: The state.
        throughputs: Throughputs.
        kinds: Device types.
        jobs: Jobs by name, a new one included.
        tasks: Tasks of the jobs.
        profile: Devices that others leave free.
    """

    state: ClusterState
    throughputs: Throughputs
    kinds: tuple[str, ...]
    jobs: Mapping[str, StateJob]
    tasks: Mapping[str, Task]
    profile: Profile

    def devices_of(self, hosts: Hosts) -> dict[str, int]:
        """Return devices by the host's name."""
        return {self.state.hosts[host].name: count for host, count in hosts}

    def reservations(
        self, schedule: Schedule, promised: Iterable[str]
    ) -> tuple[Reservation, ...]:
        """Return a schedule as documents.

        Args:
            schedule: Pieces of each job.
            promised: Jobs that are promised their deadlines.
        """
        promised = set(promised)
        return tuple(
            Reservation(
                job=name,
                segments=tuple(map(self._segment, pieces)),
                finish_s=pieces[-1].end if pieces else None,
                deadline_s=self.jobs[name].request.deadline_s,
                promised=name in promised,
            )
            for name, pieces in schedule.items()
        )

    def _segment(self, piece: Piece) -> ReservedSegment:
        row = self.throughputs.rows[piece.row]
        return ReservedSegment(
            start_s=piece.start,
            end_s=piece.end,
            device=row.device,
            degree=row.degree,
            devices=self.devices_of(piece.hosts),
            stall_s=piece.stall,
            iterations_per_s=piece.rate,
            plan=row.plan,
        )


def read_problem(
    state: ClusterState, throughputs: Throughputs | None, job: JobRequest | None = None
) -> Problem:
    """Read a state, and a new job.

    Raises:
        StrategyError: If there are no throughputs, or two sources; if the job's name is
            taken, or it is submitted later than now; or if a job runs on no number of
            devices that the cluster has.
        UnknownNameError: If there is no throughput of a model or of a device type.
    """
    source = _one_source(state, throughputs)
    kinds = tuple(sorted({host.device for host in state.hosts}))
    measured = {row.device for row in source.rows}
    for kind in kinds:
        if kind not in measured:
            raise UnknownNameError("device type with throughputs", kind, measured)
    jobs = {each.request.name: each for each in state.jobs}
    if job is not None:
        if job.name in jobs:
            raise StrategyError(
                f"job {job.name} is in the state already; give the new one another name"
            )
        if job.submitted_s > state.now_s + _CLOCKS_S:
            raise StrategyError(
                f"job {job.name} has submitted_s={job.submitted_s:.10g}, which is "
                f"{job.submitted_s - state.now_s:.10g} s after now_s="
                f"{state.now_s:.10g} of the state; decide when it is submitted, and "
                "give both times on one clock"
            )
        jobs[job.name] = StateJob(request=job, iterations_left=job.iterations)
    profile = _profile(state, kinds)
    sizes = {
        kind: sum(host.devices for host in state.hosts if host.device == kind)
        for kind in kinds
    }
    tasks = {
        name: _task(each, state, source, kinds, sizes) for name, each in jobs.items()
    }
    return Problem(
        state=state,
        throughputs=source,
        kinds=kinds,
        jobs=jobs,
        tasks=tasks,
        profile=profile,
    )


def _one_source(state: ClusterState, given: Throughputs | None) -> Throughputs:
    inside = state.throughputs
    if given is not None and inside is not None and given != inside:
        raise StrategyError(
            f"throughputs of {given.name} ({given.origin}) and of {inside.name} "
            f"({inside.origin}) in the state; a decision takes one, leave one out"
        )
    found = given or inside
    if found is None:
        raise StrategyError(
            "the state has no throughputs; give it throughputs, a table, or plans"
        )
    return found


def _profile(state: ClusterState, kinds: tuple[str, ...]) -> Profile:
    size = np.array([host.devices for host in state.hosts], dtype=np.int64)
    usable = size - np.array([host.down for host in state.hosts], dtype=np.int64)
    kind = np.array([kinds.index(host.device) for host in state.hosts], dtype=np.int64)
    profile = Profile(state.now_s, usable, size, kind)
    place = {host.name: at for at, host in enumerate(state.hosts)}
    for other in state.occupied:
        until = math.inf if other.until_s is None else other.until_s
        hosts = tuple((place[name], count) for name, count in other.devices.items())
        profile.take(state.now_s, until, hosts)
    # More may be occupied than works.
    np.maximum(profile.free, 0, out=profile.free)
    return profile


def _task(
    job: StateJob,
    state: ClusterState,
    source: Throughputs,
    kinds: tuple[str, ...],
    sizes: Mapping[str, int],
) -> Task:
    request = job.request
    _check_names(request, source)
    size = request.checkpoint_bytes
    size = state.price.checkpoint_bytes if size is None else size
    most = math.inf if request.max_degree is None else request.max_degree
    shapes = tuple(
        _shape(number, state, source, kinds)
        for number, row in enumerate(source.rows)
        if (row.model, row.batch) == (request.model, request.batch)
        and row.device in kinds
        and (not request.devices or row.device in request.devices)
        and request.min_degree <= row.degree <= most
        and row.degree <= sizes[row.device]
    )
    if not shapes:
        degrees = sorted(
            {
                f"{row.degree} {row.device}"
                for row in source.rows
                if (row.model, row.batch) == (request.model, request.batch)
            }
        )
        has = ", ".join(f"{count} {kind}" for kind, count in sizes.items())
        raise StrategyError(
            f"job {request.name} ({request.model}, batch {request.batch}) runs on no "
            f"number of devices that the cluster has ({has}): there are throughputs on "
            f"{', '.join(degrees)}, it asks for at least {request.min_degree}"
            f"{'' if request.max_degree is None else f', at most {request.max_degree}'}"
            f"{' of ' + ', '.join(request.devices) if request.devices else ''}; give a "
            "larger cluster, other limits, or more throughputs"
        )
    return Task(
        name=request.name,
        left=job.iterations_left,
        due=math.inf if request.deadline_s is None else request.deadline_s,
        submitted=request.submitted_s,
        shapes=shapes,
        held=_held(job, state, source),
        elastic=request.elastic,
        start_s=state.price.restart_s,
        change_s=size / state.price.bytes_per_s,
        started=job.started or bool(job.devices),
    )


def _check_names(request: JobRequest, source: Throughputs) -> None:
    models = {row.model for row in source.rows}
    if request.model not in models:
        raise UnknownNameError("model with throughputs", request.model, models)
    batches = {row.batch for row in source.rows if row.model == request.model}
    if request.batch not in batches:
        raise StrategyError(
            f"job {request.name} has batch={request.batch}, and {source.name} has "
            f"throughputs of {request.model} with batch "
            f"{', '.join(map(str, sorted(batches)))}; give one of these"
        )
    devices = {row.device for row in source.rows}
    for device in request.devices:
        if device not in devices:
            raise UnknownNameError("device type with throughputs", device, devices)


def _shape(
    number: int, state: ClusterState, source: Throughputs, kinds: tuple[str, ...]
) -> Shape:
    row, share = source.rows[number], 1.0 - state.rate_margin
    return Shape(
        kinds.index(row.device),
        row.degree,
        row.iterations_per_s * share,
        (row.spread_iterations_per_s or 0.0) * share,
        number,
    )


def _held(job: StateJob, state: ClusterState, source: Throughputs) -> Piece | None:
    """Return the devices that a job holds as a piece that begins now."""
    if not job.devices:
        return None
    hosts = {host.name: host for host in state.hosts}
    place = {host.name: at for at, host in enumerate(state.hosts)}
    device = hosts[next(iter(job.devices))].device
    degree = sum(job.devices.values())
    request = job.request
    size = max(host.devices for host in state.hosts if host.device == device)
    spread = len(job.devices) > -(-degree // size)
    for number, row in enumerate(source.rows):
        key = (row.model, row.batch, row.device, row.degree)
        if key != (request.model, request.batch, device, degree):
            continue
        rate = row.spread_iterations_per_s if spread else row.iterations_per_s
        if rate is None:
            break
        return Piece(
            state.now_s,
            math.inf,
            tuple(sorted((place[name], n) for name, n in job.devices.items())),
            job.stall_s,
            rate * (1.0 - state.rate_margin),
            number,
        )
    raise StrategyError(
        f"job {request.name} holds {degree} {device} on {len(job.devices)} hosts, and "
        f"{source.name} has no throughput of {request.model} there; add it"
    )
