"""Settings of a training run of the partitioner."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from envs.partition.clusters import CLUSTER_KINDS
from envs.partition.graphs import GraphStore, process_store
from envs.partition.models import Split
from envs.partition.sampler import OwnWorlds, WorldSampler
from envs.partition.world import World
from planner.errors import StrategyError, UnknownNameError
from policies.partition.learning import LearningConfig
from policies.partition.network import NetworkConfig
from policies.run_folder import read_settings

__all__ = ["PartitionTrainConfig", "WorldSource", "read_partition_config", "worlds_of"]

#: Learning rates at the start: of weights that are random, and of trained ones.
_ANEW, _AGAIN = 1e-3, 2e-4


class WorldSource(Protocol):
    """Worlds by their place in a sequence."""

    def world(self, index: int) -> World:
        """The world at a place, at least 0; the same in every process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTrainConfig:
    """Settings of a training run.

    With ``clusters`` or ``models`` the network is trained for those, and begins as the
    one that is shipped unless ``start`` says otherwise.

    Attributes:
        seed: Of everything that is drawn.
        kinds: Of worlds, where neither clusters nor models are given.
        clusters: Names or files of one's own.
        models: Names or references of one's own (``llama3-8b``, ``hf:PATH``).
        seq_len: Tokens per sample of one's own models; None for their own.
        start: ``new``, ``shipped``, or a folder of weights; None for ``shipped`` with
            clusters or models, ``new`` without.
        steps: After which the run ends.
        minutes: After which it ends even so; what comes out then depends on the
            machine. None for no limit.
        rate: Learning rate at the start, from where it falls linearly; None for 1e-3
            of a new network, 2e-4 of a trained one.
        last_rate: Learning rate at the end.
        batch: Lessons of a step.
        clip: Largest norm of the gradient.
        first_lessons: Lessons that are prepared before the first step.
        lessons: Most lessons that are kept; a new one takes the place of the oldest.
        lesson_every: Steps after which a new lesson is prepared.
        evaluate_every: Steps between validations, which choose the network that is
            returned.
        checkpoint_every: Steps between checkpoints.
        validation_count: Worlds of split ``validation`` to validate on.
        network: Sizes of a new network.
        learning: Of one step.
    """

    seed: int = 0
    kinds: tuple[str, ...] = ("uniform", "mixed", "uneven", "sites", "occupied")
    clusters: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seq_len: int | None = None
    start: str | None = None
    steps: int = 16_000
    minutes: float | None = None
    rate: float | None = None
    last_rate: float = 2e-5
    batch: int = 2
    clip: float = 1.0
    first_lessons: int = 24
    lessons: int = 600
    lesson_every: int = 12
    evaluate_every: int = 400
    checkpoint_every: int = 50
    validation_count: int = 40
    network: NetworkConfig = field(default_factory=NetworkConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in CLUSTER_KINDS:
                raise UnknownNameError(
                    "kind of worlds to train on", kind, CLUSTER_KINDS
                )
        if not self.kinds:
            known = ", ".join(CLUSTER_KINDS)
            raise StrategyError(f"kinds is empty; give some of {known}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name}={getattr(self, name)} is below 1; give at least 1"
                )
        if self.seed < 0:
            raise StrategyError(f"seed={self.seed} is below 0; give at least 0")
        if self.lessons < self.first_lessons:
            raise StrategyError(
                f"lessons={self.lessons} is below first_lessons={self.first_lessons}; "
                f"keep at least as many as there are at first"
            )
        for name in ("minutes", "rate", "last_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise StrategyError(f"{name}={value} is not a number above 0")

    @property
    def own(self) -> bool:
        """Whether the worlds are of given clusters or models."""
        return bool(self.clusters or self.models)

    @property
    def source(self) -> str:
        """Where the weights begin: ``new``, ``shipped`` or a folder."""
        return self.start or ("shipped" if self.own else "new")

    @property
    def first_rate(self) -> float:
        """Learning rate of the first step."""
        if self.rate is not None:
            return self.rate
        return _ANEW if self.source == "new" else _AGAIN


_COUNTS = (
    "steps",
    "batch",
    "first_lessons",
    "lesson_every",
    "evaluate_every",
    "checkpoint_every",
    "validation_count",
)


def read_partition_config(path: str | Path) -> PartitionTrainConfig:
    """Read settings from a JSON file; what it leaves out is as by default.

    Raises:
        StrategyError: If it cannot be read, or a field is unknown or of a wrong value.
    """
    return read_settings(path, PartitionTrainConfig())


def worlds_of(
    config: PartitionTrainConfig, split: Split, graphs: GraphStore | None = None
) -> WorldSource:
    """What a run is trained (split ``train``) or validated on.

    Raises:
        MeshwrightError: If a cluster or a model cannot be read.
    """
    for model in config.models:
        (graphs or process_store()).graph(model, seq_len=config.seq_len)
    if config.own:
        return OwnWorlds(
            clusters=config.clusters,
            models=config.models,
            seq_len=config.seq_len,
            split=split,
            seed=config.seed,
            graphs=graphs,
        )
    return WorldSampler(
        kinds=config.kinds, split=split, seed=config.seed, graphs=graphs
    )
