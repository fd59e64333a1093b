"""The commands ``meshwright train``: partition, job-stream(-world), elastic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planner.cli.learning import RunFolder, processes, require_learning
from planner.cli.options import OptionalFile, OptionalFloat, OptionalInt, SeqLen
from planner.cli.output import emit_json, emit_table, note, progress

if TYPE_CHECKING:
    from policies.partition.settings import PartitionTrainConfig
    from policies.partition.training import WatchedStep

__all__ = [
    "TrainCommand",
    "TrainElastic",
    "TrainJobStream",
    "TrainJobStreamWorld",
    "TrainPartition",
]


@dataclass(frozen=True, kw_only=True)
class TrainPartition:
    """Train the network of plan's learned partitioner.

    With your own clusters or models, training begins with the shipped weights.
    """

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from those of the shipped weights."""
    clusters: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLUSTER")] = ()
    """Your clusters: names as for plan, or files."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL")] = ()
    """Your models: names or hf:PATH, as for plan."""
    seq_len: SeqLen = None
    start: Annotated[
        str | None, tyro.conf.arg(metavar="new|shipped|FOLDER", help_behavior_hint="")
    ] = None
    """Initial weights; by default shipped with clusters or models, else new."""
    steps: OptionalInt = None
    """Steps of training."""
    minutes: OptionalFloat = None
    """Limit of the time, if it comes first."""
    workers: int = 0
    """Processes; 0 for one a core. All but one prepare worlds; without a limit of
    minutes, the weights do not depend on it."""
    ray: Annotated[
        str | None, tyro.conf.arg(metavar="auto|local|ADDRESS", help_behavior_hint="")
    ] = None
    """Ray cluster whose machines prepare worlds instead."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and print the result on the validation worlds."""
        require_learning()
        workers = processes(self.workers)
        config = self._settings()
        from policies.partition.training import train_partition

        with _Bar(config.steps) as bar:
            made = train_partition(
                config, self.out, watch=bar.tell, workers=workers, ray=self.ray
            )
        found = made.notes["validated_on"]
        if self.json:
            emit_json({"policy": f"{self.out}/policy", **made.notes})
            return
        note(f"wrote {self.out}/policy")
        emit_table(("validated on", str(found["worlds"]), "worlds"), _rows(found))

    def _settings(self) -> PartitionTrainConfig:
        """Read the settings of the file, overridden by the command line."""
        from policies.partition.settings import PartitionTrainConfig
        from policies.run_folder import read_settings

        config = PartitionTrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        given: dict[str, Any] = {
            "clusters": self.clusters or None,
            "models": self.models or None,
            "seq_len": self.seq_len,
            "start": self.start,
            "steps": self.steps,
            "minutes": self.minutes,
        }
        changed = {name: v for name, v in given.items() if v is not None}
        return replace(config, **changed)


def _rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [
        (
            f"best of the first {count} meshes",
            f"{100 * math.expm1(regret):.1f} %",
            "over the best",
        )
        for count, regret in (
            (name.rpartition("_")[2], value)
            for name, value in found.items()
            if name.startswith("regret_at_")
        )
    ]
    for name, title in (
        ("orders_mean", "an order of the hosts"),
        ("orders_best", "the best of ten orders"),
    ):
        change = 100 * math.expm1(-found[name])
        rows.append((title, f"{change:+.1f} %", "against the plain orders"))
    return rows


class _Bar:
    """A progress bar of a training run."""

    def __init__(self, steps: int) -> None:
        self._bar = progress(steps, "step")

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, one: WatchedStep) -> None:
        """Show a step."""
        self._bar.update(one.step - self._bar.n)
        if one.judged is not None:
            found = one.judged
            self._bar.set_postfix(
                regret=f"{found.regret[2]:.3f}",
                orders=f"{found.reward:+.3f}",
                best=one.best,
            )


@dataclass(frozen=True, kw_only=True)
class _StreamTraining:
    """Options of both commands that train a policy of the job stream."""

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from those of the shipped policy."""
    workers: int = 0
    """Processes; 0 for one a core. The policy does not depend on it."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class TrainJobStream(_StreamTraining):
    """Train a policy of the job stream on the benchmark's cluster."""

    def run(self) -> None:
        """Train, and print the gains on the validation streams."""
        require_learning()
        workers = processes(self.workers)
        from policies.ramp.training import TrainConfig, train
        from policies.run_folder import read_settings

        config = TrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        with _Watched(config.laws) as watched:
            train(config, self.out, workers=workers, watch=watched.tell)
        watched.report(self.out, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class TrainJobStreamWorld(_StreamTraining):
    """Train a policy of the job stream on any cluster."""

    def run(self) -> None:
        """Train, and print the gains on the validation streams."""
        require_learning()
        workers = processes(self.workers)
        from policies.run_folder import read_settings
        from policies.stream.training import StreamTrainConfig, train_stream

        config = StreamTrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        names = tuple(
            f"{case.world.cluster}, {len(case.world.models)} jobs, "
            + (f"{case.world.max_waiting} may wait, " if case.world.max_waiting else "")
            + f"load {case.load:g}"
            for case in config.cases
        )
        last = config.improvement.last is not None
        with _Watched(names, last=last) as watched:
            train_stream(config, self.out, workers=workers, watch=watched.tell)
        watched.report(self.out, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class TrainElastic:
    """Train a network that chooses which elastic jobs start, on ElasticFlow's traces.

    The traces are in the folder traces/elasticflow of MESHWRIGHT_DATA.
    """

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from the defaults."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and print the result on the validation windows."""
        require_learning()
        from policies.elastic.training import ElasticTrainConfig, train_elastic
        from policies.run_folder import read_settings

        config = ElasticTrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        with progress(config.generations, "generation") as bar:
            made = train_elastic(
                config,
                self.out,
                watch=lambda *told: bar.update(told[1] - bar.n),
            )
        found = made.validated_on
        if self.json:
            emit_json({"policy": f"{self.out}/policy", "validated_on": found})
            return
        note(f"wrote {self.out}/policy")
        rows = [
            ("cheapest-first", f"{100 * found['rule_blocked']:.1f} %"),
            ("the network", f"{100 * found['blocked']:.1f} %"),
        ]
        emit_table((f"on {found['trace']}", "blocked"), rows)


class _Watched:
    """Progress bars of a training run, and the gains of the policy it returns.

    Args:
        names: Names of the validation cases.
        last: Return the last network instead of the best.
    """

    def __init__(self, names: tuple[str, ...], *, last: bool = False) -> None:
        self._names, self._last = names, last
        self._best: tuple[float, ...] = ()
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def tell(self, stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
        """Show a round or an evaluation."""
        if self._last or not self._best or sum(gains) > sum(self._best):
            self._best = gains
        if stage not in self._bars:
            self._bars[stage] = progress(of, stage)
        bar = self._bars[stage]
        bar.update(done - bar.n)
        bar.set_postfix(gain=f"{100 * sum(gains) / len(gains):.1f} %")

    def report(self, out: str, *, as_json: bool) -> None:
        """Print the gains of the returned network."""
        gains = dict(zip(self._names, self._best, strict=True))
        if as_json:
            emit_json({"policy": f"{out}/policy", "gains": gains})
            return
        rows = [(name, f"{100 * gain:.1f} %") for name, gain in gains.items()]
        emit_table(("validated on", "less blocking than the best baseline"), rows)


_World = (
    Annotated[TrainPartition, tyro.conf.subcommand("partition", prefix_name=False)]
    | Annotated[TrainJobStream, tyro.conf.subcommand("job-stream", prefix_name=False)]
    | Annotated[
        TrainJobStreamWorld,
        tyro.conf.subcommand("job-stream-world", prefix_name=False),
    ]
    | Annotated[TrainElastic, tyro.conf.subcommand("elastic", prefix_name=False)]
)


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a policy; the same command resumes a run that was stopped."""

    world: Annotated[_World, tyro.conf.arg(name="")]

    def run(self) -> None:
        """Train."""
        self.world.run()
