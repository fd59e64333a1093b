"""Check of a guarantee: whether reservations can be carried out as they stand.

It reads documents alone and shares no code with the search for schedules, so that an
error there cannot hide here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from planner.schema.admission import (
    ClusterState,
    Reservation,
    ReservedSegment,
    StateHost,
    StateJob,
    ThroughputRow,
    Throughputs,
)

__all__ = ["guarantee_violations"]

#: Rounding, in seconds and as a share.
_SECONDS, _SHARE = 1e-6, 1e-9


def guarantee_violations(
    state: ClusterState,
    throughputs: Throughputs,
    reservations: Iterable[Reservation],
    jobs: Sequence[StateJob] | None = None,
) -> tuple[str, ...]:
    """Return what keeps reservations from being carried out; empty if nothing does.

    Each promised job must have a reservation that ends by its deadline, does all its
    iterations at the throughputs less the margin, pays for its starts and changes,
    and keeps its devices if the job is not elastic. No host may give more devices
    than it has.

    Args:
        state: State of the cluster.
        throughputs: Throughputs.
        reservations: Reservations of jobs.
        jobs: Jobs that they are of; by default those of the state.
    """
    known = {job.request.name: job for job in (state.jobs if jobs is None else jobs)}
    hosts = {host.name: host for host in state.hosts}
    rows = {
        (row.model, row.batch, row.device, row.degree): row for row in throughputs.rows
    }
    found: list[str] = []
    reservations = tuple(reservations)
    for each in reservations:
        job = known.get(each.job)
        if job is None:
            found.append(f"{each.job} is reserved devices and is no job of the state")
            continue
        found += (f"job {each.job} {text}" for text in _of_job(state, job, each, rows))
    given = {each.job for each in reservations if each.segments}
    found += (
        f"job {name} is promised and has no devices reserved"
        for name, job in known.items()
        if job.promised and name not in given
    )
    return (*found, *_overfull(state, hosts, reservations))


_Rows = Mapping[tuple[str, int, str, int], ThroughputRow]


def _of_job(
    state: ClusterState, job: StateJob, given: Reservation, rows: _Rows
) -> Iterator[str]:
    if not given.segments:
        return
    done, rounding, before = 0.0, 0.0, None
    hosts = {host.name: host for host in state.hosts}
    for segment in given.segments:
        yield from _of_segment(state, job, segment, rows, hosts)
        least = _least_stall(state, job, before, segment)
        if segment.stall_s < least * (1 - _SHARE) - _SECONDS:
            yield f"pays {segment.stall_s:g} s of {least:g} s for a change"
        if before is not None and segment.start_s < before.end_s - _SECONDS:
            yield f"has two shapes at {segment.start_s:.10g} s"
        length = segment.end_s - segment.start_s - segment.stall_s
        done += max(0.0, length) * segment.iterations_per_s
        # Times since 1970 are known to a quarter of a microsecond.
        rounding += _SECONDS * segment.iterations_per_s
        before = segment
    if given.segments[0].start_s < state.now_s - _SECONDS:
        yield f"starts at {given.segments[0].start_s:.10g} s, which has passed"
    if done < job.iterations_left * (1 - 1e-6) - rounding:
        yield f"does {done:g} of {job.iterations_left:g} iterations"
    end = given.segments[-1].end_s
    due = job.request.deadline_s
    if (job.promised or given.promised) and (due is None or end > due + _SECONDS):
        yield f"ends at {end:.10g} s, after its deadline"
    if job.devices and not job.request.elastic:
        first = given.segments[0]
        whole = len(given.segments) == 1 and first.start_s <= state.now_s + _SECONDS
        if not whole or first.devices != job.devices:
            yield "is not elastic and does not keep its devices"


def _of_segment(
    state: ClusterState,
    job: StateJob,
    segment: ReservedSegment,
    rows: _Rows,
    hosts: Mapping[str, StateHost],
) -> Iterator[str]:
    request = job.request
    row = rows.get((request.model, request.batch, segment.device, segment.degree))
    shape = f"{segment.degree} {segment.device}"
    if row is None:
        yield f"has no throughput on {shape}"
        return
    if any(
        name not in hosts or hosts[name].device != segment.device
        for name in segment.devices
    ):
        yield f"is given other devices than {shape}"
        return
    if sum(segment.devices.values()) != segment.degree:
        yield f"is given {sum(segment.devices.values())} devices for {shape}"
    if request.devices and segment.device not in request.devices:
        yield f"may not run on {segment.device}"
    most = math.inf if request.max_degree is None else request.max_degree
    kept = segment.devices == job.devices
    if not kept and not request.min_degree <= segment.degree <= most:
        yield f"may not run on {segment.degree} devices"
    size = max(host.devices for host in state.hosts if host.device == segment.device)
    fewest = -(-segment.degree // size)
    spread = len(segment.devices) > fewest
    rate = row.spread_iterations_per_s if spread else row.iterations_per_s
    if rate is None:
        yield f"may not be spread over {len(segment.devices)} hosts"
    elif segment.iterations_per_s > rate * (1 - state.rate_margin) * (1 + _SHARE):
        yield f"is to do {segment.iterations_per_s:g} iterations/s on {shape}"


def _least_stall(
    state: ClusterState,
    job: StateJob,
    before: ReservedSegment | None,
    segment: ReservedSegment,
) -> float:
    """Time that a segment must leave at its start."""
    now = segment.start_s <= state.now_s + _SECONDS
    if before is None and now and job.devices and segment.devices == job.devices:
        return job.stall_s
    price = state.price
    if before is None and not job.started:
        return price.restart_s
    size = job.request.checkpoint_bytes
    size = price.checkpoint_bytes if size is None else size
    return price.restart_s + size / (price.bytes_per_s * segment.degree)


def _overfull(
    state: ClusterState,
    hosts: Mapping[str, StateHost],
    reservations: Iterable[Reservation],
) -> Iterator[str]:
    """Walk over each host's changes in time.

    Others may occupy more than works; nothing is then left for jobs of the state.
    """
    changes: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for other in state.occupied:
        for host, devices in other.devices.items():
            changes[host].append((state.now_s, 0, devices))
            if other.until_s is not None:
                changes[host].append((max(other.until_s, state.now_s), 0, -devices))
    for given in reservations:
        for segment in given.segments:
            for host, devices in segment.devices.items():
                changes[host].append((segment.start_s, devices, 0))
                changes[host].append((segment.end_s, -devices, 0))
    for name, events in changes.items():
        if name not in hosts:
            continue
        used, others, usable = 0, 0, hosts[name].devices - hosts[name].down
        # What ends at a time is given back before what starts then.
        for at, mine, theirs in sorted(
            events, key=lambda each: (each[0], sum(each[1:]))
        ):
            used, others = used + mine, others + theirs
            if used > max(0, usable - others):
                yield (
                    f"host {name} gives {used + others} of {usable} devices at "
                    f"{at:.10g} s"
                )
                break
