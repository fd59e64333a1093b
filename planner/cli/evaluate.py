"""The commands ``meshwright evaluate``: partition, job-stream(-world), elastic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from planner.cli.learning import WeightsFolder, read_seeds, require_learning
from planner.cli.options import OptionalFloat, SeqLen
from planner.cli.output import emit_json, emit_table, note, progress
from planner.errors import StrategyError

if TYPE_CHECKING:
    from envs.elastic.session import ElasticConfig, ElasticSummary
    from envs.partition import GraphStore
    from envs.partition.world import World
    from planner.schema.stream import StreamRecord
    from planner.search import Partitioner
    from policies.partition.evaluation import Compared, Pair

__all__ = [
    "EvaluateCommand",
    "EvaluateElastic",
    "EvaluateJobStream",
    "EvaluateJobStreamWorld",
    "EvaluatePartition",
]


@dataclass(frozen=True, kw_only=True)
class EvaluatePartition:
    """Compare the learned partitioner with the others."""

    weights: WeightsFolder = None
    kinds: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KIND")] = (
        "uniform",
        "mixed",
        "uneven",
        "sites",
        "occupied",
        "transfer",
    )
    """Kinds of worlds, if no clusters and models are given."""
    clusters: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLUSTER")] = ()
    """Your clusters: names as for plan, or files."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL")] = ()
    """Your models: names or hf:PATH, as for plan."""
    seq_len: SeqLen = None
    split: Literal["train", "validation", "test"] = "validation"
    """Split of their models and clusters; transfer is never trained on."""
    seeds: Annotated[str, tyro.conf.arg(metavar="FIRST:COUNT")] = "0:4"
    """Seeds of the worlds of each kind. Training validates on seeds from 0 on."""
    budget_s: float = 1.0
    """Seconds of each partitioner for a world."""
    against: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (
        "expert",
        "beam",
        "anneal",
        "evolutionary",
    )
    """Partitioners to compare with; the best of them counts. shipped is the learned
    one with the weights that ship."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Plan every world with all of them, and print."""
        require_learning()
        seeds = read_seeds(self.seeds)
        from envs.partition import GraphStore, WorldSampler
        from policies.partition.evaluation import compare, summarise
        from policies.partition.network import load_network
        from policies.partition.partitioner import LearnedPartitioner

        # Wrong kinds, names and weights are refused before long work.
        WorldSampler(kinds=self.kinds, split=self.split)
        if not 0 <= self.budget_s < math.inf:
            raise StrategyError(
                f"--budget-s {self.budget_s} is not a number of seconds from 0 on"
            )
        others = [_rival(name) for name in self.against]
        load_network(None if self.weights is None else Path(self.weights))
        judged = LearnedPartitioner(self.weights)
        graphs = GraphStore()
        own = bool(self.clusters or self.models)
        with progress(len(seeds) * (1 if own else len(self.kinds)), "world") as bar:
            pairs = compare(
                self._worlds(seeds, graphs),
                judged,
                others,
                budget_s=self.budget_s,
                graphs=graphs,
                watch=lambda: bar.update(1),
            )
        if self.json:
            _emit_json(summarise(pairs), pairs)
        else:
            _emit_table(summarise(pairs))

    def _worlds(self, seeds: range, graphs: GraphStore) -> Iterator[World]:
        """Draw worlds of given clusters and models, or of all kinds."""
        from envs.partition import sample_world
        from envs.partition.sampler import OwnWorlds

        if self.clusters or self.models:
            drawn = OwnWorlds(
                clusters=self.clusters,
                models=self.models,
                seq_len=self.seq_len,
                split=self.split,
                graphs=graphs,
            )
            return (drawn.world(seed) for seed in seeds)
        return (
            sample_world(kind, self.split, seed, graphs)
            for kind in self.kinds
            for seed in seeds
        )


def _rival(name: str) -> Partitioner:
    """Return a partitioner by its name, or the learned one with shipped weights."""
    from planner.search import get_partitioner

    if name != "shipped":
        return get_partitioner(name)
    made = get_partitioner("learned")
    made.name = name
    return made


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _emit_json(found: Sequence[Compared], pairs: Sequence[Pair]) -> None:
    emit_json(
        {
            "kinds": [asdict(one) for one in found],
            "worlds": [
                {
                    "world": pair.world,
                    "kind": pair.kind,
                    "learned": _finite(pair.score),
                    **{name: _finite(v) for name, v in pair.others.items()},
                }
                for pair in pairs
            ],
        }
    )


def _emit_table(found: Sequence[Compared]) -> None:
    emit_table(
        ("kind", "worlds", "over the best other", "95 %", "won", "lost"),
        [
            (
                one.kind,
                str(one.worlds),
                "" if one.ratio is None else f"{one.ratio:.4f}",
                "" if one.low is None else f"{one.low:.4f} to {one.high:.4f}",
                str(one.wins),
                str(one.losses),
            )
            for one in found
        ],
        numbers=True,
    )


Policy = Annotated[
    str,
    tyro.conf.arg(
        metavar="NAME",
        help="A baseline (para_max, para_min, min_feasible, random, constant_K), "
        "rollout, learned or learned+lookahead.",
    ),
]
Seeds = Annotated[
    str,
    tyro.conf.arg(
        metavar="FIRST:COUNT",
        help="Seeds for each law or load. The shipped policies were chosen on seeds "
        "from 5000 on.",
    ),
]
Record = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="FOLDER",
        help="Folder for the fate of every job, a file a stream, for meshwright "
        "report.",
        help_behavior_hint="",
    ),
]
Force = Annotated[
    bool,
    tyro.conf.arg(help="Overwrite records of the same names with other contents."),
]


@dataclass(frozen=True, kw_only=True)
class EvaluateJobStream:
    """Evaluate a policy of the job stream on the benchmark's cluster."""

    policy: Policy = "learned"
    weights: WeightsFolder = None
    seeds: Seeds = "600:4"
    laws: tuple[str, ...] = ("A", "B", "C", "D")
    """Laws of the arrivals."""
    horizon_s: float = 1e6
    """End of a stream."""
    record: Record = None
    force: Force = False
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Play, and print."""
        require_learning()
        from envs.ramp.jobs import read_jobs
        from policies.by_name import OBSERVING, make_policy
        from policies.ramp.evaluation import play

        keep = _Records(self.record, self.force)
        seeds, jobs, found = read_seeds(self.seeds), read_jobs(), {}
        # Only the fixed policies are defined over the benchmark's mask.
        plans = self.policy.startswith(("learned", "rollout"))
        with progress(len(self.laws), "law") as bar:
            for law in self.laws:
                found[law] = play(
                    lambda env: make_policy(self.policy, env, folder=self.weights),
                    jobs,
                    law,
                    seeds,
                    horizon_s=self.horizon_s,
                    observe=self.policy in OBSERVING,
                    mask="possible" if plans else "benchmark",
                    record=self.record is not None,
                )
                keep.add(self, found[law].records, "job_stream")
                bar.update(1)
        keep.write()
        if self.json:
            emit_json(
                {
                    law: {
                        "blocking_rate": one.blocking_rate,
                        "blocking_rates": list(one.blocking_rates),
                        "throughput_bytes_per_s": one.mean("throughput_bytes_per_s"),
                        "mean_jct_s": one.mean("mean_jct_s"),
                        "decision_s": one.decision_s,
                    }
                    for law, one in found.items()
                }
            )
            return
        emit_table(
            ("law", "blocked", "GB/s", "mean JCT s", "ms a decision"),
            [
                (
                    law,
                    f"{one.blocking_rate:.4f}",
                    f"{one.mean('throughput_bytes_per_s') / 1e9:.4g}",
                    f"{one.mean('mean_jct_s'):.0f}",
                    f"{1e3 * one.decision_s:.3f}",
                )
                for law, one in found.items()
            ],
            numbers=True,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateJobStreamWorld:
    """Evaluate a policy of the job stream on any cluster."""

    policy: Policy = "learned"
    weights: WeightsFolder = None
    seeds: Seeds = "600:4"
    cluster: str = "dgx-a100:4"
    """The cluster."""
    models: tuple[str, ...] = ()
    """Jobs that may arrive; the built-in ones by default."""
    loads: tuple[float, ...] = (0.5, 1.0, 1.5)
    """Work offered over the capacity of the cluster."""
    intervals: float = 1000.0
    """Length of a stream in mean times between arrivals."""
    waiting: int = 0
    """Places in the queue."""
    record: Record = None
    force: Force = False
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Play, and print."""
        require_learning()
        from envs.stream.jobs import built_in_jobs
        from policies.by_name import make_stream_policy, stream_observes
        from policies.stream.evaluation import StreamCase, play_stream
        from policies.stream.worlds import StreamWorld

        keep = _Records(self.record, self.force)
        seeds, found = read_seeds(self.seeds), {}
        world = StreamWorld(
            cluster=self.cluster,
            models=self.models or tuple(job.name for job in built_in_jobs()),
            max_waiting=self.waiting,
        )
        with progress(len(self.loads), "load") as bar:
            for load in self.loads:
                case = StreamCase(world=world, load=load, intervals=self.intervals)
                found[load] = play_stream(
                    lambda env: make_stream_policy(
                        self.policy, env, folder=self.weights
                    ),
                    case.env(
                        observe=stream_observes(self.policy),
                        record=self.record is not None,
                    ),
                    seeds,
                )
                keep.add(self, found[load].records, "job_stream_world", load)
                bar.update(1)
        keep.write()
        if self.json:
            emit_json(
                {
                    f"{load:g}": {
                        **{name: one.mean(name) for name in one.summaries[0]},
                        "blocking_rates": list(one.blocking_rates),
                        "decision_s": one.decision_s,
                    }
                    for load, one in found.items()
                }
            )
            return
        causes = ("refused", "no_room", "late")
        emit_table(
            ("load", "blocked", *causes, "mean JCT h", "used", "ms a decision"),
            [
                (
                    f"{load:g}",
                    f"{one.blocking_rate:.4f}",
                    *(
                        f"{one.mean(cause) / one.mean('arrived'):.4f}"
                        for cause in causes
                    ),
                    f"{one.mean('mean_jct_s') / 3600:.3g}",
                    f"{one.mean('utilisation'):.3f}",
                    f"{1e3 * one.decision_s:.3f}",
                )
                for load, one in found.items()
            ],
            numbers=True,
        )


@dataclass(frozen=True, kw_only=True)
class EvaluateElastic:
    """Evaluate schedulers of elastic jobs on a trace."""

    trace: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """CSV file of jobs; .gz if it is gzipped."""
    throughputs: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """ElasticFlow's folder of throughputs, throughputs_TYPE, or Arena's file."""
    trace_format: str = "elasticflow"
    """Format of the trace: elasticflow, arena, philly or openb."""
    cluster: str = "dgx-a100-40:32"
    """The cluster; its device types are found among those of the throughputs."""
    policies: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = (
        "elasticflow",
        "cheapest-first",
    )
    """Schedulers: edf, edf+admission, tiresias, gandiva, elasticflow, learned …"""
    loads: tuple[float, ...] = (1.0,)
    """Shares of the trace's own load, 0.25 to 2."""
    jobs: Annotated[
        str | None, tyro.conf.arg(metavar="FIRST:COUNT", help_behavior_hint="")
    ] = None
    """Jobs of the trace; all by default."""
    slot_s: float = 60.0
    """Least time between two decisions."""
    failure_s: OptionalFloat = None
    """Mean time until a device fails; none fails by default."""
    seed: int = 0
    """Seed of the failures, and of what a trace lacks."""
    record: Record = None
    force: Force = False
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Play, and print."""
        require_learning()
        from envs.elastic.record import RecordedSession
        from envs.elastic.session import ElasticSession
        from envs.elastic.traces import at_load
        from policies.elastic.registry import make_rule, play
        from policies.recording import require_folder, write_records

        if self.record is not None:
            require_folder(self.record)
        # Wrong names and loads are refused before long work.
        for policy in self.policies:
            make_rule(policy)
        config = self._config()
        traces = [at_load(config.trace, load) for load in self.loads]
        kind = ElasticSession if self.record is None else RecordedSession
        rows, records = [], []
        with progress(len(self.policies) * len(traces), "run") as bar:
            for policy in self.policies:
                for load, trace in zip(self.loads, traces, strict=True):
                    session = kind(replace(config, trace=trace))
                    play(session, make_rule(policy), self.seed)
                    rows.append((policy, load, session.summary()))
                    if isinstance(session, RecordedSession):
                        records.append(session.record(policy, load))
                    bar.update(1)
        if self.record is not None:
            paths = write_records(records, self.record, force=self.force)
            note(f"{len(paths)} records in {self.record}")
        self._print(rows)

    def _print(self, rows: Sequence[tuple[str, float, ElasticSummary]]) -> None:
        if self.json:
            emit_json(
                [
                    {"policy": policy, "load": load, **_plain(asdict(found))}
                    for policy, load, found in rows
                ]
            )
            return
        emit_table(
            ("policy", "load", "blocked", "declined", "late", "broken", "mean JCT h"),
            [
                (
                    *(policy, f"{load:g}", f"{found.blocked:.4f}"),
                    *(f"{found.declined}", f"{found.late}", f"{len(found.broken)}"),
                    f"{found.mean_jct_s / 3600:.3g}",
                )
                for policy, load, found in rows
            ],
            numbers=True,
        )

    def _config(self) -> ElasticConfig:
        from envs.elastic.costs import FailureLaw
        from envs.elastic.session import ElasticConfig
        from envs.elastic.throughput import arena_throughputs, elasticflow_throughputs
        from envs.elastic.traces import read_trace, window
        from planner.cluster import Cluster

        path = Path(self.throughputs)
        read = elasticflow_throughputs if path.is_dir() else arena_throughputs
        source = read(path)
        trace = read_trace(self.trace, self.trace_format, source, seed=self.seed)
        if self.jobs is not None:
            chosen = read_seeds(self.jobs, "jobs")
            trace = window(trace, chosen.start, len(chosen))
        mean_s = math.inf if self.failure_s is None else self.failure_s
        return ElasticConfig(
            trace=trace,
            source=source,
            cluster=Cluster.parse(self.cluster),
            slot_s=self.slot_s,
            failures=FailureLaw(mean_s=mean_s),
        )


def _plain(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures with null for those that there are not."""
    return {k: _finite(v) if isinstance(v, float) else v for k, v in figures.items()}


class _Records:
    """Records of streams, written when all are played.

    Raises:
        PlanFileError: If the target is not a folder, before anything is played.
    """

    def __init__(self, folder: str | None, force: bool) -> None:
        from policies.recording import require_folder

        self.folder, self.force = folder, force
        self.records: list[StreamRecord] = []
        if folder is not None:
            require_folder(folder)

    def add(
        self,
        command: EvaluateJobStream | EvaluateJobStreamWorld,
        records: Sequence[StreamRecord],
        world: str,
        load: float | None = None,
    ) -> None:
        """Add the streams of one law or load."""
        if self.folder is None:
            return
        from policies.by_name import LEARNED
        from policies.recording import label_record, weights_id
        from policies.saved import shipped_folder

        weights = None
        if command.policy in LEARNED:
            weights = weights_id(command.weights or shipped_folder(world))
        self.records += [
            label_record(
                record, policy=command.policy, weights=weights, offered_load=load
            )
            for record in records
        ]

    def write(self) -> None:
        """Write all records, or none."""
        if self.folder is None:
            return
        from policies.recording import write_records

        paths = write_records(self.records, self.folder, force=self.force)
        note(f"{len(paths)} records in {self.folder}")


_World = (
    Annotated[EvaluatePartition, tyro.conf.subcommand("partition", prefix_name=False)]
    | Annotated[
        EvaluateJobStream, tyro.conf.subcommand("job-stream", prefix_name=False)
    ]
    | Annotated[
        EvaluateJobStreamWorld,
        tyro.conf.subcommand("job-stream-world", prefix_name=False),
    ]
    | Annotated[EvaluateElastic, tyro.conf.subcommand("elastic", prefix_name=False)]
)


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Evaluate a policy on worlds that it was not trained on."""

    world: Annotated[_World, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Evaluate, and print."""
        self.world.run()
