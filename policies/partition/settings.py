"""Settings of a training run of the partitioner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from envs.partition.clusters import CLUSTER_KINDS
from envs.partition.graphs import GraphStore, process_store
from envs.partition.models import Split
from envs.partition.sampler import OwnWorlds, WorldSampler
from envs.partition.world import World
from planner.errors import StrategyError, UnknownNameError
from policies.partition.network import NetworkConfig

__all__ = [
    "LearningConfig",
    "PartitionTrainConfig",
    "WorldSource",
    "worlds_of",
]

#: Learning rates at the start, for random and for trained weights.
_ANEW, _AGAIN = 1e-3, 2e-4


class WorldSource(Protocol):
    """Source of worlds, by their place in a sequence."""

    def world(self, index: int) -> World:
        """Return the world at a place, at least 0; the same in every process."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """Settings of one training step.

    Attributes:
        softness: Log reward by which a mesh is worse when its target weight is 1/e.
        meshes: Meshes of one problem that orders are drawn for.
        draws: Orders drawn for each.
        entropy: Weight of the entropy of a step's choice.
        imitation: Weight of imitating the best orders that search has found.
        searching: Probability of searching a problem further.
        rounds: Rounds of such a search.
        worst: Log reward of an arrangement that does not fit, and the least of all.
        most_steps: Groups times orders above which fewer orders are drawn.
    """

    softness: float = 0.06
    meshes: int = 3
    draws: int = 10
    entropy: float = 0.01
    imitation: float = 0.3
    searching: float = 0.2
    rounds: int = 6
    worst: float = -2.0
    most_steps: int = 60_000

    def __post_init__(self) -> None:
        for name in ("meshes", "draws", "rounds", "most_steps"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of learning is below 1; give at "
                    f"least 1"
                )
        if not self.softness > 0:
            raise StrategyError(f"softness={self.softness} is not a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionTrainConfig:
    """Settings of a training run.

    With ``clusters`` or ``models`` the network is trained for those, and begins with
    the shipped weights unless ``start`` says otherwise.

    Attributes:
        seed: Seed of everything that is drawn.
        kinds: Kinds of worlds, where neither clusters nor models are given.
        clusters: Names or files of given clusters.
        models: Names or references of given models (``llama3-8b``, ``hf:PATH``).
        seq_len: Tokens per sample of given models; None for the models' own.
        start: ``new``, ``shipped``, or a folder of weights; None for ``shipped`` with
            clusters or models, ``new`` without.
        steps: Steps of the run.
        minutes: Limit of its time, with which results depend on the machine. None for
            no limit.
        rate: Learning rate at the start, from where it falls linearly; None for 1e-3
            for a new network, 2e-4 for a trained one.
        last_rate: Learning rate at the end.
        batch: Examples in a step.
        clip: Largest norm of the gradient.
        first_examples: Examples that are prepared before the first step.
        examples: Most examples that are kept; a new one replaces the oldest.
        example_every: Steps between new examples.
        evaluate_every: Steps between validations; the network that is best in one of
            them is returned.
        checkpoint_every: Steps between checkpoints.
        validation_count: Worlds of split ``validation`` to validate on.
        network: Sizes of a new network.
        learning: Settings of one step.
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
    first_examples: int = 24
    examples: int = 600
    example_every: int = 12
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
        if self.seq_len is not None and self.seq_len < 1:
            raise StrategyError(
                f"seq_len={self.seq_len} is below 1; give at least 1, or leave it out "
                f"for the models' own"
            )
        if self.examples < self.first_examples:
            raise StrategyError(
                f"examples={self.examples} is below "
                f"first_examples={self.first_examples}; keep at least as many as "
                f"there are at first"
            )
        for name in ("minutes", "rate", "last_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise StrategyError(f"{name}={value} is not a number above 0")

    @property
    def own(self) -> bool:
        """True if clusters or models are given."""
        return bool(self.clusters or self.models)

    @property
    def source(self) -> str:
        """Initial weights: ``new``, ``shipped`` or a folder."""
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
    "first_examples",
    "example_every",
    "evaluate_every",
    "checkpoint_every",
    "validation_count",
)


def worlds_of(
    config: PartitionTrainConfig, split: Split, graphs: GraphStore | None = None
) -> WorldSource:
    """Return the worlds of a split, to train or to validate on.

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
