"""The reference implementation of an episode of the benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.ramp.jobs import RampJobs
from planner.errors import StrategyError, UnknownNameError

__all__ = [
    "Accepted",
    "Arrival",
    "Outcome",
    "RampWorld",
    "Summary",
    "check_arrivals",
]

#: Outcomes of a job at its arrival.
Outcome = Literal["placed", "refused", "no_room", "late"]

#: Ends of jobs and arrivals this close count as equal.
_SAME_TIME_S = 1e-7

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Arrival of a job.

    Attributes:
        time_s: Time of the arrival.
        model: Name of the job.
        beta: Largest completion time over that on one device, above 0, at most 1.
    """

    time_s: float
    model: str
    beta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A job that runs or has run.

    Attributes:
        arrival: Arrival of the job.
        start_s: Time of its placement.
        jct_s: Its completion time.
        degree: Most sub-ops of one of its ops.
        servers: Servers that it holds. Shape [workers].
    """

    arrival: Arrival
    start_s: float
    jct_s: float
    degree: int
    servers: Index

    @property
    def end_s(self) -> float:
        """Time at which it ends."""
        return self.start_s + self.jct_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of an episode, under the benchmark's own names.

    Attributes:
        blocked: Jobs turned away, late, without room, or running at the horizon.
        arrived: Jobs up to the horizon, one that arrives on it included.
        refused: Jobs blocked by the action.
        no_room: Jobs blocked for lack of a free block.
        late: Jobs blocked because they would miss the deadline.
        unfinished: Jobs running at the horizon.
        throughput_bytes_per_s: Memory and edges of accepted jobs, by the share done.
        mean_jct_s: Mean completion time of completed jobs, as are the means below; NaN
            if there are none.
        mean_speedup: Speed-up over one device.
        mean_degree: Largest split.
        mean_workers: Servers held.
    """

    blocked: int
    arrived: int
    refused: int
    no_room: int
    late: int
    unfinished: int
    throughput_bytes_per_s: float
    mean_jct_s: float
    mean_speedup: float
    mean_degree: float
    mean_workers: float

    @property
    def blocking_rate(self) -> float:
        """Jobs blocked over jobs arrived."""
        return self.blocked / self.arrived if self.arrived else 0.0


class RampWorld:
    """One episode, decision by decision.

    Args:
        jobs: Jobs that may arrive.
        arrivals: In order of time; those at or after the horizon are not decided.
        horizon_s: End of the episode.

    Raises:
        UnknownNameError: If an arrival's model is no job.
        StrategyError: If an arrival's beta is not in (0, 1] or times go backwards.
    """

    def __init__(
        self, jobs: RampJobs, arrivals: Sequence[Arrival], horizon_s: float = 1e6
    ) -> None:
        check_arrivals(jobs.jobs, arrivals)
        self.jobs, self.horizon_s = jobs, horizon_s
        self._decided = [a for a in arrivals if a.time_s < horizon_s]
        self.arrived = sum(arrival.time_s <= horizon_s for arrival in arrivals)
        self.running: list[Accepted] = []
        self.accepted: list[Accepted] = []
        self.outcomes: list[Outcome] = []
        self._memo: dict[tuple[str, int], float] = {}
        self._held = 0
        self._advance()

    @property
    def head(self) -> Arrival | None:
        """Job to be decided; None at the end."""
        done = len(self.outcomes)
        return self._decided[done] if done < len(self._decided) else None

    @property
    def held(self) -> int:
        """Servers held in the interval that ends now, as the mask counts them."""
        return self._held

    @property
    def busy(self) -> Flags:
        """True for servers that running jobs hold. Shape [servers]."""
        busy = np.zeros(self.jobs.topology.num_servers, dtype=np.bool_)
        for job in self.running:
            busy[job.servers] = True
        return busy

    def mask(self) -> Flags:
        """Return the valid degrees: those of no more servers than are not held. [d]."""
        left = self.jobs.topology.num_servers - self._held
        return np.array([degree <= left for degree in self.jobs.degrees])

    def known_jct_s(self, model: str, degree: int) -> float | None:
        """Return the completion time of the first placement; None before it."""
        return self._memo.get((model, degree))

    def decide(self, degree: int) -> Outcome:
        """Place the job at the head, or turn it away.

        Args:
            degree: Largest split; 0, or one that is not valid, turns the job away.
        """
        head = self.head
        if head is None:
            raise StrategyError("the episode has ended; reset it")
        outcome = self._try(head, degree)
        self.outcomes.append(outcome)
        self._advance()
        return outcome

    def _try(self, head: Arrival, degree: int) -> Outcome:
        left = self.jobs.topology.num_servers - self._held
        if degree not in self.jobs.degrees or degree > left:
            return "refused"
        servers = self.jobs.place(head.model, degree, self.busy)
        if servers is None:
            return "no_room"
        key = (head.model, int(self.jobs.split(head.model, degree).splits.max()))
        if key not in self._memo:
            self._memo[key] = self.jobs.jct_s(head.model, degree, servers)
        jct_s = self._memo[key]
        if jct_s > head.beta * self.jobs.jobs[head.model].sequential_jct_s:
            return "late"
        job = Accepted(
            arrival=head,
            start_s=head.time_s,
            jct_s=jct_s,
            degree=key[1],
            servers=np.unique(servers[servers >= 0]),
        )
        self.running.append(job)
        self.accepted.append(job)
        return "placed"

    def _advance(self) -> None:
        """Go on to the next arrival, and drop the jobs that have ended by then."""
        head = self.head
        now = self.horizon_s if head is None else head.time_s
        # Jobs that end now still count in the mask.
        before = [job for job in self.running if job.end_s >= now - _SAME_TIME_S]
        self._held = sum(len(job.servers) for job in before)
        self.running = [job for job in before if job.end_s > now + _SAME_TIME_S]

    def summary(self) -> Summary:
        """Summarise the episode, as if it ended at the horizon."""
        end = self.horizon_s + _SAME_TIME_S
        completed = [job for job in self.accepted if job.end_s <= end]
        counts = {name: self.outcomes.count(name) for name in _BLOCKED}
        unfinished = len(self.accepted) - len(completed)
        done = 0.0
        for job in self.accepted:
            share = min(1.0, (self.horizon_s - job.start_s) / job.jct_s)
            done += self.jobs.jobs[job.arrival.model].demand_bytes * share

        def mean(values: Sequence[float]) -> float:
            return float(np.mean(values)) if values else float("nan")

        return Summary(
            blocked=sum(counts.values()) + unfinished,
            arrived=self.arrived,
            refused=counts["refused"],
            no_room=counts["no_room"],
            late=counts["late"],
            unfinished=unfinished,
            throughput_bytes_per_s=done / self.horizon_s,
            mean_jct_s=mean([job.jct_s for job in completed]),
            mean_speedup=mean(
                [
                    self.jobs.jobs[job.arrival.model].sequential_jct_s / job.jct_s
                    for job in completed
                ]
            ),
            mean_degree=mean([job.degree for job in completed]),
            mean_workers=mean([len(job.servers) for job in completed]),
        )


_BLOCKED: tuple[Outcome, ...] = ("refused", "no_room", "late")


def check_arrivals(names: Collection[str], arrivals: Sequence[Arrival]) -> None:
    """Refuse invalid arrivals.

    Args:
        names: Names of the jobs.
        arrivals: Arrivals to be checked.

    Raises:
        UnknownNameError: If an arrival's model is no job.
        StrategyError: If an arrival's beta is not in (0, 1] or times go backwards.
    """
    before = 0.0
    for number, arrival in enumerate(arrivals):
        if arrival.model not in names:
            raise UnknownNameError("model of an arrival", arrival.model, names)
        if not 0.0 < arrival.beta <= 1.0:
            raise StrategyError(
                f"arrival {number} has beta={arrival.beta}; a job may take more than 0 "
                f"and at most 1 of its time on one device"
            )
        if not before <= arrival.time_s < np.inf:
            raise StrategyError(
                f"arrival {number} is at {arrival.time_s} s, after one at {before} s; "
                f"sort arrivals by time, from 0 on"
            )
        before = arrival.time_s
