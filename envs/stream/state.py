"""An episode of the job stream as arrays that compiled code changes in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.history import NUM_SEEN
from envs.stream.tables import StreamTables

__all__ = [
    "FREE",
    "TOTALS",
    "UNUSABLE",
    "StreamState",
    "StreamSummary",
    "Waiting",
    "copy_state",
    "new_state",
    "summarize",
    "total",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]

#: Values of ``holder`` besides the slots of running jobs.
FREE, UNUSABLE = -1, -2

#: Totals over an episode. Jobs: arrived up to the horizon; placed; blocked by cause
#: (``slowed`` jobs were placed and ended too late, they are among ``late``); met.
#: Sums over jobs that ended: completion time, its ratio to that alone, speed-up, wait,
#: degree. Over time: reference-device-seconds of work done; device-seconds held, free,
#: and free in hosts that are partly held. Reward.
TOTALS = (
    "arrived",
    "placed",
    "refused",
    "no_room",
    "late",
    "slowed",
    "met",
    "ended",
    "jct_s",
    "slowdown",
    "speedup",
    "wait_s",
    "degree",
    "work_s",
    "held_s",
    "free_s",
    "broken_s",
    "reward",
)


def total(name: str) -> int:
    """Return the index of a total."""
    return TOTALS.index(name)


class Waiting(NamedTuple):
    """Waiting jobs in the order of their arrival. Shapes [q].

    Attributes:
        model: Numbers of the jobs.
        arrived_s: Times of arrival.
        due_s: Deadlines.
        size: Steps over the usual number.
    """

    model: Index
    arrived_s: Array
    due_s: Array
    size: Array


class StreamState(NamedTuple):
    """One episode. n devices, which are also slots for running jobs.

    Attributes:
        clock: Time now; horizon; mean time between arrivals. Shape [3].
        counts: Waiting jobs; next arrival; 1 if the head was told to wait; 1 if the
            episode is over. Shape [4].
        holder: Slot that holds each device, FREE or UNUSABLE. Shape [n].
        free: Free devices of each host. Shape [h].
        running: True for slots with a job; the next fields belong to it. Shape [n].
        model: Number of the job. Shape [n].
        choice: Candidate shape. Shape [n].
        reach: Level at which its hosts meet. Shape [n].
        given: Its hosts, then -1. Shape [n, most hosts].
        left_s: Work left, in seconds of running alone. Shape [n].
        stretch: Factor by which links between its hosts are slowed down. Shape [n].
        rate: Seconds of work done in a second. Shape [n].
        ends_s: End if nothing changes. Shape [n].
        started_s: Start. Shape [n].
        arrived_s: Arrival. Shape [n].
        due_s: Deadline. Shape [n].
        size: Steps over the usual number. Shape [n].
        waiting: Jobs that have arrived and are not decided; the first is the head.
        totals: In the order of TOTALS. Shape [totals].
        seen: State of :func:`envs.ramp.history.remember`. Shape [NUM_SEEN].
        load: Requested rate of every link, in bytes/s. Shape [r, h].
        largest: Largest request of a single job. Shape [r, h].
        busy: Shares of a step in which the jobs of a link send, added up. Shape [r, h].
    """

    clock: Array
    counts: Index
    holder: Index
    free: Index
    running: Flags
    model: Index
    choice: Index
    reach: Index
    given: Index
    left_s: Array
    stretch: Array
    rate: Array
    ends_s: Array
    started_s: Array
    arrived_s: Array
    due_s: Array
    size: Array
    waiting: Waiting
    totals: Array
    seen: Floats
    load: Array
    largest: Array
    busy: Array


def new_state(
    tables: StreamTables, horizon_s: float, interval_s: float, max_waiting: int
) -> StreamState:
    """Make the state of an empty cluster at time 0.

    Args:
        tables: Tables of jobs and cluster.
        horizon_s: End of the episode.
        interval_s: Mean time between arrivals.
        max_waiting: Places in the queue; 0 for the head alone.
    """
    devices = len(tables.host_of_device)
    room = max(max_waiting, 1)

    def numbers() -> Array:
        return np.zeros(devices)

    def indices() -> Index:
        return np.zeros(devices, dtype=np.int64)

    return StreamState(
        clock=np.array([0.0, horizon_s, interval_s]),
        counts=np.zeros(4, dtype=np.int64),
        holder=np.where(tables.usable, FREE, UNUSABLE).astype(np.int64),
        free=tables.size_of_host.copy(),
        running=np.zeros(devices, dtype=np.bool_),
        model=indices(),
        choice=indices(),
        reach=indices(),
        given=np.full((devices, int(tables.hosts.max())), -1, dtype=np.int64),
        left_s=numbers(),
        stretch=np.ones(devices),
        rate=np.ones(devices),
        ends_s=numbers(),
        started_s=numbers(),
        arrived_s=numbers(),
        due_s=numbers(),
        size=numbers(),
        waiting=Waiting(
            model=np.zeros(room, dtype=np.int64),
            arrived_s=np.zeros(room),
            due_s=np.zeros(room),
            size=np.zeros(room),
        ),
        totals=np.zeros(len(TOTALS)),
        seen=np.zeros(NUM_SEEN, dtype=np.float32),
        load=np.zeros_like(tables.capacity),
        largest=np.zeros_like(tables.capacity),
        busy=np.zeros_like(tables.capacity),
    )


def copy_state(state: StreamState) -> StreamState:
    """Copy a state, for a planner to simulate in."""
    parts = {
        name: part.copy()
        for name, part in state._asdict().items()
        if part is not state.waiting
    }
    waiting = {name: part.copy() for name, part in state.waiting._asdict().items()}
    return StreamState(**parts, waiting=Waiting(**waiting))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """Figures of an episode, as if it ended now.

    ``arrived`` = ``met`` + ``blocked`` + ``unfinished`` + ``undecided``. Means are over
    jobs that have ended, NaN if there are none.

    Attributes:
        arrived: Jobs up to the horizon.
        met: Jobs that ended by their deadline.
        blocked: ``refused`` + ``no_room`` + ``late``.
        refused: Turned away although a candidate was possible.
        no_room: Turned away because no devices, or no place in the queue, were free.
        late: Turned away because the deadline could not be met, dropped while waiting,
            or ended too late.
        slowed: The jobs among ``late`` that ran.
        unfinished: Running at the end.
        undecided: Waiting at the end.
        throughput: Reference devices that the work done would have kept busy.
        mean_jct_s: Time from arrival to end.
        mean_speedup: Time on one reference device over that from arrival to end.
        mean_wait_s: Time from arrival to start.
        mean_degree: Devices of a job.
        mean_slowdown: Running time over that without shared links.
        utilisation: Share of the device-seconds that jobs held.
        fragmentation: Share of the free device-seconds on hosts that were partly held;
            0 if nothing was free.
    """

    arrived: int
    met: int
    blocked: int
    refused: int
    no_room: int
    late: int
    slowed: int
    unfinished: int
    undecided: int
    throughput: float
    mean_jct_s: float
    mean_speedup: float
    mean_wait_s: float
    mean_degree: float
    mean_slowdown: float
    utilisation: float
    fragmentation: float

    @property
    def blocking_rate(self) -> float:
        """Jobs blocked over jobs arrived."""
        return self.blocked / self.arrived if self.arrived else 0.0


def summarize(tables: StreamTables, state: StreamState) -> StreamSummary:
    """Summarise an episode as far as it has gone."""
    sums = dict(zip(TOTALS, state.totals.tolist(), strict=True))
    counts = {name: int(sums[name]) for name in TOTALS[:8]}
    blocked = counts["refused"] + counts["no_room"] + counts["late"]
    unfinished = counts["placed"] - counts["ended"]
    passed_s, ended = float(state.clock[0]), counts["ended"]
    held, free = sums["held_s"], sums["free_s"]

    def mean(name: str) -> float:
        return sums[name] / ended if ended else float("nan")

    return StreamSummary(
        arrived=counts["arrived"],
        met=counts["met"],
        blocked=blocked,
        refused=counts["refused"],
        no_room=counts["no_room"],
        late=counts["late"],
        slowed=counts["slowed"],
        unfinished=unfinished,
        undecided=counts["arrived"] - counts["met"] - blocked - unfinished,
        throughput=sums["work_s"] / passed_s if passed_s else 0.0,
        mean_jct_s=mean("jct_s"),
        mean_speedup=mean("speedup"),
        mean_wait_s=mean("wait_s"),
        mean_degree=mean("degree"),
        mean_slowdown=mean("slowdown"),
        utilisation=held / (passed_s * tables.usable.sum()) if passed_s else 0.0,
        fragmentation=sums["broken_s"] / free if free else 0.0,
    )
