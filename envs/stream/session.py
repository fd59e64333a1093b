"""Sessions of the job stream: configuration, episodes, and their documents."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from envs.ramp.record import device_runs
from envs.ramp.state import Past
from envs.stream.arrivals import StreamLaw, mean_interval_s, read_stream
from envs.stream.decisions import OUTCOMES, decide, empty_options, list_options
from envs.stream.events import Rewards, Stream, proceed
from envs.stream.jobs import JobType, built_in_jobs
from envs.stream.log import StreamLog
from envs.stream.network import StreamNetwork
from envs.stream.observation import StreamObserver
from envs.stream.prices import PlanPrice, PlanSearch, PriceBook
from envs.stream.state import StreamState, new_state, summarize, total
from envs.stream.tables import Bursts, StreamTables, stream_tables
from planner.cluster import Cluster, device_type
from planner.errors import StrategyError
from planner.schema.stream import (
    StreamCluster,
    StreamJobs,
    StreamModel,
    StreamPlan,
    StreamRecord,
)

__all__ = [
    "StreamConfig",
    "StreamSession",
    "stream_record",
]


def stream_record(session: StreamSession) -> StreamRecord:
    """Make the document of the session's episode, as far as it has gone.

    Args:
        session: Its configuration has ``record=True``.

    Raises:
        StrategyError: If there is no log.
    """
    if session.log is None:
        raise StrategyError(
            "nothing was kept of the episode; give record=True to the environment"
        )
    session.log.measure(session.state)
    kept, stream, tables = session.log.jobs, session.stream, session.tables
    count = len(kept)
    ways, plans = _plans(session)
    sets = {one.devices: None for one in kept if one.devices}
    numbers = {runs: number for number, runs in enumerate(sets)}
    model = stream.model[:count].tolist()
    summary = summarize(tables, session.state)
    told = {**asdict(summary), "blocking_rate": summary.blocking_rate}
    return StreamRecord(
        world="job-stream-world",
        cluster=_cluster(session),
        horizon_s=float(session.state.clock[1]),
        interval_s=float(session.state.clock[2]),
        blocked=("refused", "no_room", "late"),
        models=tuple(
            StreamModel(name=name, sequential_s=float(seconds))
            for name, seconds in zip(
                session.names, tables.sequential_jct_s, strict=True
            )
        ),
        plans=plans,
        device_sets=tuple(sets),
        jobs=StreamJobs(
            arrival_s=tuple(stream.time_s[:count].tolist()),
            model=tuple(model),
            beta=tuple(stream.beta[:count].tolist()),
            size=tuple(stream.size[:count].tolist()),
            asked=tuple(one.asked for one in kept),
            decided_s=tuple(one.decided_s for one in kept),
            start_s=tuple(one.start_s for one in kept),
            end_s=tuple(one.end_s for one in kept),
            plan=tuple(
                -1 if one.way is None else ways[kind, *one.way]
                for kind, one in zip(model, kept, strict=True)
            ),
            devices=tuple(numbers.get(one.devices, -1) for one in kept),
            done=tuple(one.done for one in kept),
            outcome=tuple(one.outcome for one in kept),
        ),
        summary={name: float(value) for name, value in told.items()},
    )


def _plans(
    session: StreamSession,
) -> tuple[dict[tuple[int, int, int], int], tuple[StreamPlan, ...]]:
    """Number the plans of jobs by model, shape and reach; return the plans, too."""
    log, tables = session.log, session.tables
    ways: dict[tuple[int, int, int], int] = {}
    plans = []
    for number, one in enumerate(log.jobs if log is not None else ()):
        if one.way is None:
            continue
        model, (choice, reach) = int(session.stream.model[number]), one.way
        if (model, choice, reach) in ways:
            continue
        ways[model, choice, reach] = len(ways)
        plan, shape = session.plan(model, choice, reach), session.shapes[choice]
        on = f"{shape.hosts} {'host' if shape.hosts == 1 else 'hosts'}"
        plans.append(
            StreamPlan(
                model=model,
                label=f"{'a plan' if plan is None else plan.label} on {on}",
                degree=shape.devices,
                alone_s=float(
                    tables.steps[model] * tables.step_s[model, choice, reach, 0]
                ),
            )
        )
    return ways, tuple(plans)


def _cluster(session: StreamSession) -> StreamCluster:
    network = session.network
    sizes = np.bincount(network.host_of_device, minlength=network.num_hosts).tolist()
    return StreamCluster(
        name=network.cluster.name,
        hosts=tuple((len(list(run)), size) for size, run in groupby(sizes)),
        occupied=device_runs(np.flatnonzero(~network.usable).tolist()),
    )


#: Default length of an episode in mean intervals.
_INTERVALS = 1000.0
_REWARD = total("reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """Configuration of a job stream: cluster, jobs, arrivals and rewards.

    Attributes:
        cluster: A Cluster, or a name that :meth:`planner.cluster.Cluster.parse` reads.
        jobs: Jobs that may arrive; the built-in ones by default.
        law: Law of the arrivals; or several, one of which is drawn for each episode.
        trace: CSV file of arrivals, instead of a law.
        horizon_s: End of an episode; 1000 mean intervals by default.
        max_waiting: Places in the queue. With 0 each job is decided at its arrival.
        max_degree: Most devices of a job; by default 32, or all if there are fewer.
        spread: Largest number of hosts of a job over the least it needs: twice with 1,
            four times with 2.
        frugal: Whether several hosts get a second candidate whose plan sends less,
            where the planner finds one. Their prices do not ship.
        reference: Name of the device type that deadlines refer to; the fastest of the
            cluster by default.
        oversubscription: Rate at which the devices behind a link between hosts can send
            over that which it carries; 1 for networks that do not block. The default is
            an assumption.
        bursts: Jobs that share a link send in bursts: ``spread`` over their steps, as
            mean rates; so that they ``collide``, each at its full rate with the means
            of others; ``shifted`` in time against each other, as long as a step has
            time for the bursts of all, where ``collide`` holds else; or ``chosen``:
            each action names the part of a step in which the job sends.
        shifts: Offsets in a step among which actions choose with ``bursts="chosen"``,
            for jobs of several hosts.
        prices: File of prices besides those that ship; see
            :class:`envs.stream.prices.PriceBook`.
        search: Search of the plans that have no price there: by ``closed_forms``, all
            shapes of a job at once, or ``exhaustive``, 0.1 to 0.3 s each.
        observe: Whether observations are encoded in full; see StreamObserver.
        accepted_reward: Reward of a placed job; taken back if it ends too late.
        blocked_reward: Reward of any other job, and of one that ends too late.
        work_reward: Reward of a placed job, times its work over that of the mean job: 1
            with the other two at 0 is throughput. Taken back if it ends too late.
        record: Whether to keep the fate of every job; at the end of an episode
            ``info["record"]`` then is a :class:`planner.schema.stream.StreamRecord`.
    """

    cluster: Cluster | str = "dgx-a100:4"
    jobs: tuple[JobType, ...] = ()
    law: StreamLaw | tuple[StreamLaw, ...] = field(default_factory=StreamLaw)
    trace: str | os.PathLike[str] | None = None
    horizon_s: float | None = None
    max_waiting: int = 0
    max_degree: int | None = None
    spread: int = 1
    frugal: bool = False
    reference: str | None = None
    oversubscription: float = 4.0
    bursts: Bursts = "spread"
    shifts: int = 4
    prices: str | os.PathLike[str] | None = None
    search: PlanSearch = "closed_forms"
    observe: bool = True
    accepted_reward: float = 1.0
    blocked_reward: float = -1.0
    work_reward: float = 0.0
    record: bool = False

    def __post_init__(self) -> None:
        for name in ("accepted_reward", "blocked_reward", "work_reward"):
            if not np.isfinite(getattr(self, name)):
                raise StrategyError(
                    f"{name}={getattr(self, name)}; a reward is a finite number"
                )
        if self.horizon_s is not None and not 0.0 < self.horizon_s < np.inf:
            raise StrategyError(
                f"horizon_s={self.horizon_s}; give a positive number of seconds"
            )
        if self.max_waiting < 0:
            raise StrategyError(
                f"max_waiting={self.max_waiting}; give 0 for no queue, or its places"
            )
        if not 1 <= self.shifts <= 64:
            raise StrategyError(
                f"shifts={self.shifts}; give 1 to 64 offsets in a step, among which "
                f"bursts='chosen' lets actions choose"
            )
        if isinstance(self.law, tuple) and not self.law:
            raise StrategyError("no law; give at least one, or a trace")

    @property
    def laws(self) -> tuple[StreamLaw, ...]:
        """Laws to draw episodes from."""
        return (self.law,) if isinstance(self.law, StreamLaw) else self.law


class StreamSession:
    """Plays one episode after the other.

    Args:
        config: Configuration of the stream.

    Raises:
        ClusterError: If the cluster has no free device, a job is larger than it, or
            ``max_degree`` is.
        UnknownNameError: If a law, a trace or the reference names something unknown.
        StrategyError: If a trace is invalid, or has no arrival before the horizon.
    """

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        parsed = config.cluster
        cluster = Cluster.parse(parsed) if isinstance(parsed, str) else parsed
        self.network = StreamNetwork(cluster)
        self.jobs = config.jobs or built_in_jobs()
        self.names = tuple(job.name for job in self.jobs)
        most = min(32, int(self.network.usable.sum()))
        self.shapes = self.network.shapes(
            most if config.max_degree is None else config.max_degree,
            config.spread,
            frugal=config.frugal,
            shifts=config.shifts if config.bursts == "chosen" else 1,
        )
        self.book = PriceBook(config.prices, search=config.search)
        self.tables: StreamTables = stream_tables(
            self.jobs,
            self.network,
            self.shapes,
            self.book,
            reference=None if config.reference is None else _device(config, cluster),
            oversubscription=config.oversubscription,
            bursts=config.bursts,
        )
        self.observer = StreamObserver(
            self.tables, observe=config.observe, max_waiting=config.max_waiting
        )
        self.graphs = tuple(self.book.graph(job) for job in self.jobs)
        self.book.save()
        self._intervals = [
            law.mean_interval_s(self.names, self.tables) for law in config.laws
        ]
        self._trace = None if config.trace is None else self._read(config.trace)
        self.rewards = Rewards(
            accepted=float(config.accepted_reward),
            blocked=float(config.blocked_reward),
            work=float(config.work_reward),
            mean_work_s=float(self.tables.sequential_jct_s.mean()),
        )
        self.options = empty_options(self.tables)
        self._plans: dict[tuple[int, int, int], PlanPrice | None] = {}
        self.stream = Stream(*(np.zeros(0, dtype=d) for d in "dldd"))
        self.state: StreamState = new_state(self.tables, 1.0, 1.0, config.max_waiting)
        self.state.counts[3] = 1
        self.log: StreamLog | None = None

    def _read(self, path: str | os.PathLike[str]) -> Stream:
        stream = read_stream(path, self.names)
        horizon_s = self.config.horizon_s
        if horizon_s is not None and stream.time_s[0] >= horizon_s:
            raise StrategyError(
                f"trace {path} has no arrival before the horizon of {horizon_s:g} s; "
                f"there is nothing to decide"
            )
        return stream

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return bool(self.state.counts[3])

    def past(self) -> Past:
        """Return copies of the jobs that have arrived, the head included."""
        count = int(self.state.counts[1])
        return Past(
            time_s=self.stream.time_s[:count].copy(),
            model=self.stream.model[:count].copy(),
            beta=self.stream.beta[:count].copy(),
        )

    def begin(self, generator: np.random.Generator) -> None:
        """Start the next episode."""
        horizon_s = self.config.horizon_s
        if self._trace is not None:
            stream, last_s = self._trace, float(self._trace.time_s[-1])
            interval_s = mean_interval_s(stream, horizon_s or 1.0)
            horizon_s = horizon_s or last_s + interval_s
        else:
            which = int(generator.integers(len(self._intervals)))
            interval_s = self._intervals[which]
            horizon_s = horizon_s or _INTERVALS * interval_s
            stream = self.config.laws[which].draw(
                self.names, interval_s, horizon_s, generator
            )
        self.start(stream, horizon_s, interval_s)

    def start(self, stream: Stream, horizon_s: float, interval_s: float) -> None:
        """Start an episode of given arrivals.

        Args:
            stream: The arrivals.
            horizon_s: End of the episode.
            interval_s: Mean time between arrivals.
        """
        self.stream = stream
        self.state = new_state(
            self.tables, horizon_s, interval_s, self.config.max_waiting
        )
        if self.config.record:
            places = len(self.state.waiting.model)
            self.log = StreamLog(self.tables, stream, places)
        self._go_on()

    def plan(self, job: int, choice: int, reach: int) -> PlanPrice | None:
        """Return the planner's plan for a job in a shape; None if none fits.

        Args:
            job: Index of the job.
            choice: Index of the shape.
            reach: Level at which its hosts meet, 0 for one host.
        """
        key = (job, choice, reach)
        if key not in self._plans:
            shape = self.shapes[choice]
            self._plans[key] = self.book.price(
                self.jobs[job],
                self.network.kinds[shape.kind],
                shape,
                self.network.levels[reach - 1] if reach else None,
                self.network.cluster.document.collectives,
            )
        return self._plans[key]

    def _go_on(self) -> None:
        proceed(self.tables, self.state, self.stream, self.rewards)
        if self.log is not None:
            self.log.went_on(self.state)
        if not self.over:
            list_options(self.tables, self.state, self.options, 0)

    def decide(self, action: int) -> tuple[float, dict[str, Any]]:
        """Decide the head, and go on to the next decision.

        Args:
            action: See :func:`envs.stream.decisions.decide`.
        Returns:
            Reward of this decision and of events until the next; and the info.

        Raises:
            StrategyError: If the action is out of range, or the episode has ended.
        """
        actions = int(self.observer.action_space.n)
        if not 0 <= action < actions:
            raise StrategyError(
                f"action {action}; give 0 to turn the job away, 1 to "
                f"{len(self.shapes)} for a candidate"
                + (f", {actions - 1} to let it wait" if self.config.max_waiting else "")
            )
        if self.over:
            raise StrategyError("the episode has ended; reset it")
        before = float(self.state.totals[_REWARD])
        job = int(self.state.waiting.model[0])
        number = decide(self.tables, self.state, self.options, self.rewards, action)
        if self.log is not None:
            self.log.decided(self.state, action - 1, number)
        info = self._info(job, action - 1, OUTCOMES[number])
        self._go_on()
        if self.state.counts[3]:
            summary = summarize(self.tables, self.state)
            info["summary"] = {
                **asdict(summary),
                "blocking_rate": summary.blocking_rate,
            }
            if self.log is not None:
                info["record"] = stream_record(self)
        return float(self.state.totals[_REWARD]) - before, info

    def _info(self, job: int, choice: int, outcome: str) -> dict[str, Any]:
        """Return the info of a decision."""
        taken = self.shapes[choice] if 0 <= choice < len(self.shapes) else None
        info = {
            "outcome": outcome,
            "degree": 0 if taken is None else taken.devices,
            "hosts": 0 if taken is None else taken.hosts,
        }
        if outcome != "placed":
            return info
        plan = self.plan(job, choice, int(self.options.reach[choice]))
        return info if plan is None else {**info, "plan": plan.label}


def _device(config: StreamConfig, cluster: Cluster) -> Any:
    for device in cluster.device_types:
        if device.name == config.reference:
            return device
    return device_type(str(config.reference))
