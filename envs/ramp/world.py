"""An episode of the benchmark: jobs arrive one by one, each placed or blocked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.ramp.communication import link_rates
from envs.ramp.job import NUM_TRAINING_STEPS, RampJob
from envs.ramp.placement import SplitJob, place, split_job
from envs.ramp.step_time import step_time_s
from envs.ramp.sub_graph import JobEdges, job_edges, sub_graph
from envs.ramp.topology import RampTopology
from planner.errors import StrategyError, UnknownNameError

__all__ = [
    "Accepted",
    "Arrival",
    "Outcome",
    "RampJobs",
    "RampWorld",
    "Summary",
    "check_arrivals",
]

#: What became of a job at its arrival.
Outcome = Literal["placed", "refused", "no_room", "late"]

#: Ends of jobs and arrivals this close are at one time.
_SAME_TIME_S = 1e-7

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A job's owner at the door.

    Attributes:
        time_s: When.
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
        arrival: Of the job.
        start_s: When it was placed.
        jct_s: Its completion time.
        degree: Into how many sub-ops its ops are split at most.
        servers: That it holds. Shape [workers].
    """

    arrival: Arrival
    start_s: float
    jct_s: float
    degree: int
    servers: Index

    @property
    def end_s(self) -> float:
        """When it leaves."""
        return self.start_s + self.jct_s


class RampJobs:
    """The jobs of a benchmark on a topology, with what is worked out about them.

    Placements and step times depend on nothing but the job, its degree and which
    servers are held, so that worlds can share them.

    Args:
        jobs: By name.
        topology: Of the cluster.
    """

    def __init__(self, jobs: Mapping[str, RampJob], topology: RampTopology) -> None:
        self.jobs, self.topology = dict(jobs), topology
        self.degrees: tuple[int, ...] = tuple(topology.degrees.tolist())
        self._rates = link_rates(topology)
        self._edges: dict[str, JobEdges] = {n: job_edges(j) for n, j in jobs.items()}
        self._split: dict[tuple[str, int], SplitJob] = {
            (name, degree): split_job(job, degree, topology)
            for name, job in jobs.items()
            for degree in self.degrees
        }
        self._steps: dict[tuple[str, int, bytes], float] = {}
        free = np.zeros(topology.num_servers, dtype=np.bool_)
        self._empty: dict[tuple[str, int], float] = {}
        for name, degree in self._split:
            servers = self.place(name, degree, free)
            self._empty[name, degree] = (
                np.inf if servers is None else self.jct_s(name, degree, servers)
            )

    def forget(self) -> None:
        """Let go of step times, to time how long working them out takes."""
        self._steps.clear()

    def split(self, name: str, degree: int) -> SplitJob:
        """A job at a degree."""
        return self._split[name, degree]

    def place(self, name: str, degree: int, busy: Flags) -> Index | None:
        """Servers of each op's sub-ops, then -1; None without room. [n, p]."""
        split = self._split[name, degree]
        shape = (len(split.splits), int(split.splits.max()))
        servers = np.full(shape, -1, dtype=np.int64)
        fits = place(split, busy, self.topology.memory_bytes, servers)
        return servers if fits else None

    def jct_s(self, name: str, degree: int, servers: Index) -> float:
        """Completion time of a placed job."""
        key = (name, degree, servers.tobytes())
        if key not in self._steps:
            split = self._split[name, degree]
            graph = sub_graph(self._edges[name], split.splits, servers, self._rates)
            self._steps[key] = step_time_s(graph)
        return NUM_TRAINING_STEPS * self._steps[key]

    def empty_jct_s(self, name: str, degree: int) -> float:
        """Completion time where no other job is; infinity if it never fits."""
        return self._empty[name, degree]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What an episode came to, under the benchmark's own names.

    Attributes:
        blocked: Jobs turned away, late, without room, or running at the horizon.
        arrived: Jobs up to the horizon, one that arrives on it included.
        refused: Blocked by the action; likewise no_room, late, unfinished.
        throughput_bytes_per_s: Memory and edges of accepted jobs, by the share done.
        mean_jct_s: Of completed jobs; likewise the rest. NaN if there are none.
        mean_speedup: Over one device.
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
        """Blocked over arrived."""
        return self.blocked / self.arrived if self.arrived else 0.0


class RampWorld:
    """One episode, decision by decision.

    Args:
        jobs: What may arrive.
        arrivals: In order of time; those at or after the horizon are not decided.
        horizon_s: When the episode ends.

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
        """The job that waits for a decision; None at the end."""
        done = len(self.outcomes)
        return self._decided[done] if done < len(self._decided) else None

    @property
    def held(self) -> int:
        """Servers held in the interval that ends now, which the mask is made from."""
        return self._held

    @property
    def busy(self) -> Flags:
        """Which servers running jobs hold. Shape [servers]."""
        busy = np.zeros(self.jobs.topology.num_servers, dtype=np.bool_)
        for job in self.running:
            busy[job.servers] = True
        return busy

    def mask(self) -> Flags:
        """Which of the degrees are valid: no more servers than are not held. [d]."""
        left = self.jobs.topology.num_servers - self._held
        return np.array([degree <= left for degree in self.jobs.degrees])

    def known_jct_s(self, model: str, degree: int) -> float | None:
        """Completion time that this episode's first placement decided, if there was."""
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
        """Go on to the next arrival: what has ended by then leaves."""
        head = self.head
        now = self.horizon_s if head is None else head.time_s
        # Who leaves just now still counts in the mask.
        before = [job for job in self.running if job.end_s >= now - _SAME_TIME_S]
        self._held = sum(len(job.servers) for job in before)
        self.running = [job for job in before if job.end_s > now + _SAME_TIME_S]

    def summary(self) -> Summary:
        """What the episode has come to, as if it ended at the horizon."""
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
    """Refuse arrivals that no episode can be of.

    Args:
        names: Of the jobs that there are.
        arrivals: To be checked.

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
