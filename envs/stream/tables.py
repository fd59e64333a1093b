"""Jobs, plans and network as arrays for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.stream.jobs import JobType
from envs.stream.network import Shape, StreamNetwork
from envs.stream.prices import STRETCHES, PriceBook
from planner.errors import ClusterError, StrategyError, UnknownNameError
from planner.schema.cluster import DeviceType

__all__ = ["BURSTS", "Bursts", "StreamTables", "stream_tables"]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]


Bursts = Literal["spread", "collide", "shifted", "chosen"]
#: In the order of their numbers.
BURSTS: tuple[Bursts, ...] = ("spread", "collide", "shifted", "chosen")


class StreamTables(NamedTuple):
    """Jobs j, candidate shapes c, reaches r, stretches s, hosts h, devices n.

    A plan's *reach* is the level at which its hosts meet: 0 on one host. Link (r, d)
    joins domain d of level r - 1 (a host, a switch) to level r.

    Attributes:
        degrees: Devices of a shape. Shape [c].
        kinds: Kind of its hosts. Shape [c].
        hosts: Number of hosts. Shape [c].
        per_host: Devices on each host. Shape [c].
        step_s: Seconds of a step; infinite where no plan fits. Shape [j, c, r, s].
        duty: Share of a step in which links between hosts are busy. Shape [j, c, r].
        bandwidth: Bandwidth of one device between hosts, in bytes/s. Shape [c, r].
        capacity: Capacity of link (r, d), in bytes/s. Shape [r, h].
        steps: Steps of a job of usual size. Shape [j].
        sequential_jct_s: Time on one reference device. Shape [j].
        empty_jct_s: Time in each shape on an empty cluster. Shape [j, c].
        fastest_s: Least time on an empty cluster. Shape [j].
        work_device_s: Device-seconds of the most efficient shape. Shape [j].
        kind_of_host: Kind of each host. Shape [h].
        size_of_host: Usable devices of each host. Shape [h].
        switches: Domain of each host at each level, the host itself first. [r, h].
        host_of_device: Host of each device. Shape [n].
        usable: True for devices that jobs may use. Shape [n].
        speed: Peak of each device over the largest. Shape [n].
        stretches: STRETCHES as an array. Shape [s].
        bursts: Place in BURSTS. Shape [1].
        shifts: Share of a step by which a shape begins to send later. Shape [c].
    """

    degrees: Index
    kinds: Index
    hosts: Index
    per_host: Index
    step_s: Array
    duty: Array
    bandwidth: Array
    capacity: Array
    steps: Array
    sequential_jct_s: Array
    empty_jct_s: Array
    fastest_s: Array
    work_device_s: Array
    kind_of_host: Index
    size_of_host: Index
    switches: Index
    host_of_device: Index
    usable: Flags
    speed: Array
    stretches: Array
    bursts: Index
    shifts: Array


def _peak(device: DeviceType) -> float:
    peaks = device.peak_flops_per_s
    return peaks.get("bfloat16", max(peaks.values()))


def _bandwidth(network: StreamNetwork, shape: Shape, reach: int) -> float:
    nic, level = network.kinds[shape.kind].group.nic, network.levels[reach - 1]
    own = np.inf if nic is None else nic.bandwidth_bytes_per_s
    return float(min(own, level.bandwidth_bytes_per_s))


def _capacity(network: StreamNetwork, oversubscription: float) -> Array:
    """Capacity of every link: the sum of its devices' rates over oversubscription."""
    found = np.ones((len(network.levels) + 1, network.num_hosts))
    for reach, level in enumerate(network.levels, start=1):
        found[reach] = 0.0
        for host, kind in enumerate(network.kind_of_host.tolist()):
            nic = network.kinds[kind].group.nic
            own = np.inf if nic is None else nic.bandwidth_bytes_per_s
            speed = min(own, level.bandwidth_bytes_per_s) * network.kinds[kind].size
            domain = network.switches[reach - 1, host]
            found[reach, domain] += speed / oversubscription
    return found


def _prices(
    jobs: Sequence[JobType],
    network: StreamNetwork,
    shapes: Sequence[Shape],
    book: PriceBook,
) -> tuple[Array, Array]:
    """Return times of steps, and duties. Shapes [j, c, r, s] and [j, c, r]."""
    reaches = len(network.levels) + 1
    size = (len(jobs), len(shapes), reaches)
    step_s = np.full((*size, len(STRETCHES)), np.inf)
    duty = np.zeros(size)
    collectives = network.cluster.document.collectives
    for number, kind in enumerate(network.kinds):
        mine = [c for c, shape in enumerate(shapes) if shape.kind == number]
        alone = [c for c in mine if shapes[c].hosts == 1]
        for r in range(min(1, reaches - 1), reaches):
            # Shapes of one host have one price: found together with the first level's.
            columns = [c for c in mine if (r <= 1 if c in alone else r >= 1)]
            link = network.levels[r - 1] if r else None
            for j, job in enumerate(jobs):
                wanted = [shapes[c] for c in columns]
                prices = book.prices(job, kind, wanted, link, collectives)
                for c, price in zip(columns, prices, strict=True):
                    at = j, c, 0 if c in alone else r
                    if price is not None:
                        step_s[at], duty[at] = price.step_s, price.duty
    return step_s, duty


def _empty_reach(network: StreamNetwork, shape: Shape) -> int:
    """Find the innermost level that joins enough hosts on an empty cluster."""
    if shape.hosts == 1:
        return 0
    usable = network.usable_per_host()
    fit = (network.kind_of_host == shape.kind) & (usable >= shape.per_host)
    for reach in range(1, len(network.levels) + 1):
        if np.bincount(network.switches[reach][fit]).max() >= shape.hosts:
            return reach
    raise ClusterError(
        f"{shape.hosts} hosts with {shape.per_host} free devices meet at no level of "
        f"{network.cluster.name}; use fewer"
    )


def stream_tables(
    jobs: Sequence[JobType],
    network: StreamNetwork,
    shapes: Sequence[Shape],
    book: PriceBook,
    *,
    reference: DeviceType | None = None,
    oversubscription: float = 4.0,
    bursts: Bursts = "spread",
) -> StreamTables:
    """Price every job in every shape.

    Args:
        jobs: Jobs that may arrive.
        network: Network of the cluster.
        shapes: Candidate shapes, by degree.
        book: Prices.
        reference: Device that deadlines refer to; the cluster's fastest by default.
        oversubscription: Rate at which the devices behind a link can send over that
            which it carries.
        bursts: See :class:`envs.stream.session.StreamConfig`.

    Raises:
        ClusterError: If a job fits the cluster in no shape.
        StrategyError: If there are no jobs, two share a name, or oversubscription is
            below 1.
    """
    if bursts not in BURSTS:
        raise UnknownNameError("bursts", bursts, BURSTS)
    names = [job.name for job in jobs]
    if not names or len(set(names)) < len(names):
        raise StrategyError(
            f"jobs are {names}; give at least one, each with a name of its own"
        )
    if not 1.0 <= oversubscription < np.inf:
        raise StrategyError(
            f"oversubscription={oversubscription}; give at least 1, where links carry "
            f"all that devices can send"
        )
    step_s, duty = _prices(jobs, network, shapes, book)
    device = reference or max((kind.device for kind in network.kinds), key=_peak)
    steps = np.array([job.steps for job in jobs], dtype=np.float64)
    sequential = np.array([book.sequential_step_s(job, device) for job in jobs])
    columns = np.arange(len(shapes))
    reach = np.array([_empty_reach(network, shape) for shape in shapes])
    # Contiguous by rows, because another memory layout is compiled again.
    empty = np.ascontiguousarray(steps[:, None] * step_s[:, columns, reach, 0])
    fastest, degrees = empty.min(axis=1), np.array([s.devices for s in shapes])
    for job, least in zip(jobs, fastest.tolist(), strict=True):
        if not np.isfinite(least):
            raise ClusterError(
                f"job {job.name!r} fits {network.cluster.name} in no shape of up to "
                f"{int(degrees.max())} devices; use a larger cluster or max_degree, or "
                f"leave the job out"
            )
    peaks = np.array([_peak(kind.device) for kind in network.kinds])
    bandwidth = np.ones((len(shapes), len(network.levels) + 1))
    for c, shape in enumerate(shapes):
        for r in range(1, bandwidth.shape[1]):
            bandwidth[c, r] = _bandwidth(network, shape, r)
    of_device = network.kind_of_host[network.host_of_device]
    return StreamTables(
        degrees=degrees.astype(np.int64),
        kinds=np.array([s.kind for s in shapes], dtype=np.int64),
        hosts=np.array([s.hosts for s in shapes], dtype=np.int64),
        per_host=np.array([s.per_host for s in shapes], dtype=np.int64),
        step_s=step_s,
        duty=duty,
        bandwidth=bandwidth,
        capacity=_capacity(network, oversubscription),
        steps=steps,
        sequential_jct_s=steps * sequential,
        empty_jct_s=empty,
        fastest_s=fastest,
        work_device_s=(empty * degrees).min(axis=1),
        kind_of_host=network.kind_of_host,
        size_of_host=network.usable_per_host(),
        switches=network.switches,
        host_of_device=network.host_of_device,
        usable=network.usable,
        speed=peaks[of_device] / peaks.max(),
        stretches=np.array(STRETCHES),
        bursts=np.array([BURSTS.index(bursts)], dtype=np.int64),
        shifts=np.array([s.shift for s in shapes], dtype=np.float64),
    )
