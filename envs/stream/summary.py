"""What an episode of the job stream came to."""

from __future__ import annotations

from dataclasses import dataclass

from envs.stream.state import TOTALS, StreamState
from envs.stream.tables import StreamTables

__all__ = ["StreamSummary", "summarize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSummary:
    """Counts and means of an episode, as if it ended now.

    ``arrived`` = ``met`` + ``blocked`` + ``unfinished`` + ``undecided``. Means are over
    jobs that have ended, NaN if there are none.

    Attributes:
        arrived: Jobs up to the horizon.
        met: Ended by their deadline.
        blocked: ``refused`` + ``no_room`` + ``late``.
        refused: Turned away although a candidate was possible.
        no_room: Turned away because no devices, or no place to wait, were free.
        late: Turned away because the deadline could not be met, given up while
            waiting, or ended too late.
        slowed: Of these, jobs that ran and ended too late.
        unfinished: Running at the end.
        undecided: Waiting at the end.
        throughput: Reference devices that the work done would have kept busy.
        mean_jct_s: From arrival to end, waiting included.
        mean_speedup: Time on one reference device over that.
        mean_wait_s: From arrival to start.
        mean_degree: Devices of a job.
        mean_slowdown: Running time over what it would have been alone.
        utilisation: Share of the device-seconds there were that jobs held.
        fragmentation: Share of the free device-seconds that lay in hosts which were
            partly held; 0 where nothing was free.
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
        """Blocked over arrived."""
        return self.blocked / self.arrived if self.arrived else 0.0


def summarize(tables: StreamTables, state: StreamState) -> StreamSummary:
    """Of an episode as far as it has gone."""
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
