"""Worlds of one's own: given clusters and models under drawn circumstances."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import numpy as np

from envs.partition.clusters import CLUSTER_KINDS, Scale, draw_cluster
from envs.partition.graphs import GraphStore
from envs.partition.machines import KNOWN
from envs.partition.models import SPLITS, Split, catalogue
from envs.partition.sampler import (
    draw_batch,
    draw_objective,
    draw_shape,
    free_bytes,
    is_feasible,
)
from envs.partition.world import World
from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError
from planner.schema.cluster import ClusterDocument

__all__ = ["OwnWorlds"]

#: Draws before giving up on a world.
_ATTEMPTS = 60
#: How often other work has taken a part of the hosts, and the largest such part.
_TAKEN, _LARGEST_PART = 0.5, 0.6


@cache
def _machines(name: str) -> Cluster:
    return Cluster.parse(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnWorlds:
    """Worlds one after another, each of one of the clusters and one of the models.

    What is drawn besides: the batch, the objective, the memory that may be filled, and
    in half of the worlds hosts that other work has taken. The splits draw from other
    seeds; the clusters and the models are the same in all of them.

    Attributes:
        clusters: Names or files; if none, clusters are drawn as for
            :class:`envs.partition.sampler.WorldSampler`.
        models: As :func:`planner.api.read_model` takes them; if none, those of the
            split's catalogue.
        seq_len: Tokens per sample of the models; None for their own.
        split: Which seeds.
        seed: The same seed gives the same worlds.
        graphs: Where graphs are kept; None for the store of the process.

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
        """The world at a place in the sequence, at least 0.

        Raises:
            CaptureError: If a model cannot be read.
            StrategyError: If nothing fits on what is drawn, however often.
        """
        for attempt in range(_ATTEMPTS):
            entropy = [SPLITS.index(self.split), self.seed, index, attempt]
            world = self._draw(index, np.random.default_rng(entropy))
            if is_feasible(world.request(self.graphs)):
                return world
        raise StrategyError(
            f"{_ATTEMPTS} draws of clusters {', '.join(self.clusters) or 'of any kind'}"
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
        """A cluster, and whether all of its devices are alike and free."""
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
