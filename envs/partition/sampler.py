"""A sampler of worlds: seeded, split by construction, each of them solvable.

The splits share no model and no cluster: models are split by a hash of their shape,
clusters by a hash of their composition (:mod:`envs.partition.models`,
:mod:`envs.partition.clusters`), and the split is part of every seed. Worlds of kind
``transfer`` have device types, sizes or both that no world of another kind has; there
are none to train on. :class:`OwnWorlds` draws worlds of given clusters and models.

    python -m envs.partition.sampler --kind mixed --split test --count 200 --out w.json
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

from envs.partition.clusters import CLUSTER_KINDS, Scale, draw_cluster
from envs.partition.graphs import GraphStore
from envs.partition.machines import KNOWN, UNSEEN
from envs.partition.models import SPLITS, ModelShape, Split, catalogue, profiled
from envs.partition.world import World, save_worlds
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.errors import StrategyError, UnknownNameError
from planner.schema.base import require_writable
from planner.schema.cluster import ClusterDocument
from planner.search import Objective, Request
from planner.search.orders import device_orders
from planner.space import enumerate_strategies

__all__ = [
    "KINDS",
    "SPLITS",
    "TRANSFERS",
    "OwnWorlds",
    "WorldSampler",
    "draw_batch",
    "draw_objective",
    "draw_shape",
    "free_bytes",
    "is_feasible",
    "main",
    "sample_world",
]


#: Kinds of worlds.
KINDS: tuple[str, ...] = (*CLUSTER_KINDS, "transfer")
#: Novelties of a world of kind ``transfer``.
TRANSFERS = ("types", "size", "both")

#: Scale of worlds to train on.
_USUAL = Scale()
#: Scale of worlds with more hosts and devices than any of those, up to twice as many.
_LARGE = Scale(hosts=(65, 128), devices=(514, 1024), site_devices=(136, 256))

#: Bytes of training state a scalar: weight, gradient and two states in float32.
_STATE_BYTES = 16
#: Least and largest share of the free memory for a model's state, so that neither all
#: models are toys nor most draws are infeasible.
_STATE_SHARES = (0.003, 0.6)
#: Draws before giving up; about half of them are feasible.
_ATTEMPTS = 100
#: Distance between the seeds of two samplers, so that their worlds do not overlap.
_STRIDE = 1_000_000

_log = logging.getLogger(__name__)


def sample_world(
    kind: str,
    split: Split,
    seed: int,
    graphs: GraphStore | None = None,
    profiles: str | os.PathLike[str] | None = None,
) -> World:
    """Draw the world of a seed, the same in every process.

    It changes with the catalogue and with the closed forms of memory; keep a file of
    worlds to compare results over versions.

    Args:
        kind: One of :data:`KINDS`.
        split: One of :data:`SPLITS`; worlds to train on are never of kind
            ``transfer``.
        seed: At least 0.
        graphs: Store of model graphs; that of the process if None.
        profiles: Folder of PipeDream profiles that worlds may train, too; such a world
            names its file.

    Raises:
        UnknownNameError: If there is no such kind or split.
        StrategyError: If the seed is negative, or the kind is not for training.
    """
    _check(kind, split, seed)
    shapes = catalogue(split)
    if profiles is not None:
        shapes += profiled(Path(profiles), split)
    for attempt in range(_ATTEMPTS):
        entropy = [KINDS.index(kind), SPLITS.index(split), seed, attempt]
        world = _draw(kind, split, seed, shapes, np.random.default_rng(entropy))
        if is_feasible(world.request(graphs)):
            return world
    raise StrategyError(
        f"{_ATTEMPTS} draws of kind={kind!r}, split={split!r}, seed={seed} gave no "
        f"world that any strategy fits; use another seed"
    )


def is_feasible(request: Request) -> bool:
    """Return True if a legal strategy fits by closed forms, in any order of devices.

    Tables are priced one by one until one has such a row.
    """
    for order in device_orders(request):
        model = CostModel(replace(request.context, order=order))
        tables = enumerate_strategies(
            request.facts, num_devices=len(order), pins=request.pins, rows=20_000
        )
        if any(bool(model.table(table).fits.any()) for table in tables):
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSampler:
    """Draws worlds one after another, the kinds in turn.

    Attributes:
        kinds: Some of :data:`KINDS`.
        split: Split of all worlds.
        seed: The same seed gives the same worlds.
        graphs: As for :func:`sample_world`.
        profiles: As for :func:`sample_world`.
    """

    kinds: tuple[str, ...]
    split: Split
    seed: int = 0
    graphs: GraphStore | None = None
    profiles: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not self.kinds:
            raise StrategyError(f"kinds is empty; give some of {', '.join(KINDS)}")
        for kind in self.kinds:
            _check(kind, self.split, self.seed)

    def world(self, index: int) -> World:
        """Return the world at a place in the sequence, at least 0."""
        kind = self.kinds[index % len(self.kinds)]
        turn = index // len(self.kinds)
        return sample_world(
            kind,
            self.split,
            self.seed * _STRIDE + turn,
            graphs=self.graphs,
            profiles=self.profiles,
        )

    def __iter__(self) -> Iterator[World]:
        """Iterate over all worlds, without end."""
        index = 0
        while True:
            yield self.world(index)
            index += 1

    def take(self, count: int) -> list[World]:
        """Return the first worlds."""
        return list(islice(self, count))


def _check(kind: str, split: str, seed: int) -> None:
    if kind not in KINDS:
        raise UnknownNameError("kind of worlds", kind, KINDS)
    if split not in SPLITS:
        raise UnknownNameError("split", split, SPLITS)
    if seed < 0:
        raise StrategyError(f"seed={seed} is below 0; give at least 0")
    if kind == "transfer" and split == "train":
        raise StrategyError(
            "worlds of kind 'transfer' are what is never trained on; use "
            "split='validation' or 'test'"
        )


def _draw(
    kind: str,
    split: Split,
    seed: int,
    shapes: Sequence[ModelShape],
    rng: np.random.Generator,
) -> World:
    document = _cluster(kind, split, rng)
    free = document.num_devices - sum(stop - start for start, stop in document.occupied)
    objective, fraction = draw_objective(rng)
    shape = draw_shape(rng, shapes, free_bytes(document) * fraction)
    return World(
        name=f"{kind}-{split}-{seed}",
        kind=kind,
        model=shape.model if isinstance(shape.model, str) else dict(shape.model),
        seq_len=shape.seq_len,
        cluster=document,
        global_batch=draw_batch(rng, free),
        objective=objective,
        memory_fraction=fraction,
        # Where devices or links differ, a plan may leave some out.
        devices="all" if kind == "uniform" else "any",
        seed=seed,
    )


def _cluster(kind: str, split: Split, rng: np.random.Generator) -> ClusterDocument:
    if kind != "transfer":
        return draw_cluster(kind, split, rng, KNOWN, _USUAL)
    new = TRANSFERS[int(rng.integers(len(TRANSFERS)))]
    machines = KNOWN if new == "size" else UNSEEN
    scale = _USUAL if new == "types" else _LARGE
    base = sorted(CLUSTER_KINDS)[int(rng.integers(len(CLUSTER_KINDS)))]
    return draw_cluster(base, split, rng, machines, scale)


def free_bytes(document: ClusterDocument) -> float:
    """Return the memory of all devices that are free."""
    size = {device.name: device.memory_bytes for device in document.device_types}
    each = np.repeat(
        [size[group.device] for group in document.hosts],
        [group.count * group.devices_per_host for group in document.hosts],
    )
    for start, stop in document.occupied:
        each[start:stop] = 0
    return float(each.sum())


def draw_objective(rng: np.random.Generator) -> tuple[Objective, float]:
    """Draw the objective, and the share of memory that may be filled."""
    fate = rng.random()
    if fate < 0.1:
        return "throughput_per_device", 0.9
    if fate < 0.3:
        return "throughput", float(rng.choice([0.5, 0.6, 0.7, 0.8]))
    return "throughput", 0.9


def draw_shape(
    rng: np.random.Generator, shapes: Sequence[ModelShape], memory: float
) -> ModelShape:
    """Draw a shape whose state takes a suitable share of the memory."""
    low, high = (share * memory / _STATE_BYTES for share in _STATE_SHARES)
    fair = [shape for shape in shapes if low <= shape.parameters <= high]
    if not fair:
        fair = sorted(shapes, key=lambda shape: abs(shape.parameters - high))[:3]
    return fair[int(rng.integers(len(fair)))]


def draw_batch(rng: np.random.Generator, devices: int) -> int:
    """Draw samples per step: mostly with many divisors, sometimes with few."""
    aim = float(np.clip(devices * 2 ** rng.uniform(-1, 5), 4, 4096))
    power: int = 2 ** round(math.log2(aim))
    fate = rng.random()
    if fate < 0.6:
        return power
    if fate < 0.85:
        return devices * max(1, round(aim / devices))
    if fate < 0.95:
        return max(1, power // 4) * int(rng.choice([3, 5, 6]))
    return 2 * round(aim / 2) + 1


#: Draws before giving up on a world of given clusters or models.
_OWN_ATTEMPTS = 60
#: Probability that hosts are occupied by other work, and the largest occupied part.
_TAKEN, _LARGEST_PART = 0.5, 0.6


@cache
def _machines(name: str) -> Cluster:
    return Cluster.parse(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWorlds:
    """Draws worlds one after another, each of a given cluster and a given model.

    Batch, objective and the share of memory that may be filled are drawn, and in half
    of the worlds hosts that other work occupies. The splits have different seeds, but
    the same clusters and models.

    Attributes:
        clusters: Names or files; if none, clusters are drawn as for
            :class:`envs.partition.sampler.WorldSampler`.
        models: As for :func:`planner.api.read_model`; if none, those of the split's
            catalogue.
        seq_len: Tokens per sample of the models; None for their own.
        split: Selects the seeds.
        seed: The same seed gives the same worlds.
        graphs: Store of model graphs; that of the process if None.

    Raises:
        ClusterError: If a cluster is described wrongly.
        UnknownNameError: If a cluster or the split is not known.
        StrategyError: If neither clusters nor models are given.
    """

    clusters: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    seq_len: int | None = None
    split: Split = "train"
    seed: int = 0
    graphs: GraphStore | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.clusters and not self.models:
            raise StrategyError("no clusters and no models are given; give either")
        if self.split not in SPLITS:
            raise UnknownNameError("split", self.split, SPLITS)
        for name in self.clusters:
            _machines(name)

    def world(self, index: int) -> World:
        """Return the world at a place in the sequence, at least 0.

        Raises:
            CaptureError: If a model cannot be read.
            StrategyError: If nothing fits on any of many drawn worlds.
        """
        for attempt in range(_OWN_ATTEMPTS):
            entropy = [SPLITS.index(self.split), self.seed, index, attempt]
            world = self._draw(index, np.random.default_rng(entropy))
            if is_feasible(world.request(self.graphs)):
                return world
        raise StrategyError(
            f"{_OWN_ATTEMPTS} draws of clusters "
            f"{', '.join(self.clusters) or 'of any kind'}"
            f" and models {', '.join(self.models) or 'of the catalogue'} gave no world "
            f"that any strategy fits; give smaller models or larger clusters"
        )

    def _draw(self, index: int, rng: np.random.Generator) -> World:
        document, uniform = self._cluster(rng)
        taken = sum(stop - start for start, stop in document.occupied)
        objective, fraction = draw_objective(rng)
        model, seq_len = self._model(document, fraction, rng)
        return World(
            name=f"own-{self.split}-{self.seed}-{index}",
            kind="own",
            model=model,
            seq_len=seq_len,
            cluster=document,
            global_batch=draw_batch(rng, document.num_devices - taken),
            objective=objective,
            memory_fraction=fraction,
            devices="all" if uniform else "any",
            seed=index,
        )

    def _cluster(self, rng: np.random.Generator) -> tuple[ClusterDocument, bool]:
        """Draw a cluster; also return True if all of its devices are equal and free."""
        if not self.clusters:
            kind = sorted(CLUSTER_KINDS)[int(rng.integers(len(CLUSTER_KINDS)))]
            drawn = draw_cluster(kind, self.split, rng, KNOWN, Scale())
            return drawn, kind == "uniform"
        cluster = _machines(self.clusters[int(rng.integers(len(self.clusters)))])
        hosts = np.asarray(cluster.host_of_device)
        free = np.asarray(cluster.free)
        left = np.unique(hosts[free])
        most = int(_LARGEST_PART * len(left))
        if most and rng.random() < _TAKEN:
            gone = rng.permutation(left)[: int(rng.integers(1, most + 1))]
            busy = np.setdiff1d(np.arange(len(hosts)), free).tolist()
            cluster = cluster.with_occupied(
                [*busy, *np.flatnonzero(np.isin(hosts, gone)).tolist()]
            )
        document = cluster.document
        sizes = {(group.device, group.devices_per_host) for group in document.hosts}
        alike = len(sizes) == 1 and not document.occupied and document.matrices is None
        return document, alike

    def _model(
        self, document: ClusterDocument, fraction: float, rng: np.random.Generator
    ) -> tuple[str | dict[str, object], int | None]:
        if self.models:
            return self.models[int(rng.integers(len(self.models)))], self.seq_len
        memory = free_bytes(document) * fraction
        shape = draw_shape(rng, catalogue(self.split), memory)
        model = shape.model if isinstance(shape.model, str) else dict(shape.model)
        return model, self.seq_len or shape.seq_len


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Draw worlds and write them to a file."""

    kind: tuple[str, ...]
    """Kinds of worlds; each is drawn count times."""
    out: str
    """File to write."""
    split: Split = "test"
    """Split of their models and clusters."""
    count: int = 200
    """Worlds of each kind."""
    seed: int = 0
    """The same seed gives the same worlds."""
    cache: str | None = None
    """Folder that keeps the graphs of models from one run to the next."""
    profiles: str | None = None
    """Folder of PipeDream profiles that worlds may train, too."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw worlds as the command line says."""
    options = tyro.cli(_Options, args=arguments)
    require_writable(options.out)
    sampler = WorldSampler(
        kinds=options.kind,
        split=options.split,
        seed=options.seed,
        graphs=GraphStore(options.cache),
        profiles=options.profiles,
    )
    total = options.count * len(options.kind)
    drawn = islice(sampler, total)
    worlds = list(tqdm(drawn, total=total, unit="world", disable=None))
    save_worlds(worlds, options.out)
    _log.info("wrote %d worlds to %s", len(worlds), options.out)


if __name__ == "__main__":
    main()
