"""Published rules that place pods on hosts, in our words, and their registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from envs.elastic.pods import MILLI, NodeTable, PodRoom, PodTable
from planner.errors import UnknownNameError
from planner.simulate.compiled import compiled, inner

__all__ = ["PLACEMENT_RULES", "PlacementRule", "fill", "make_placement"]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Largest host, which best fit measures in. Source: Weng et al. 2023's simulator.
_MOST_CPU, _MOST_GPU = 128000.0, 8000.0
#: Share of the pods whose requests are typical. Source: as above.
_TYPICAL = 0.95


class PlacementRule(Protocol):
    """A rule that chooses a host, and a GPU for a part of one."""

    def choose(
        self, room: PodRoom, pods: PodTable, pod: int, able: Index
    ) -> tuple[int, int]:
        """Return the host, among those that are able, and the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A registered rule.

    Attributes:
        make: Makes one from the hosts, the pods that are typical, and a generator.
        source: The publication.
    """

    make: Callable[[NodeTable, PodTable, np.random.Generator], PlacementRule]
    source: str


def make_placement(
    name: str,
    nodes: NodeTable,
    typical: PodTable,
    seed: int | np.random.Generator = 0,
) -> PlacementRule:
    """Make a rule by its name in :data:`PLACEMENT_RULES`.

    Args:
        name: Name of the rule.
        nodes: The hosts.
        typical: Pods that are usual here.
        seed: Seed of what the rule draws, ties included.

    Raises:
        UnknownNameError: If there is no such rule.
    """
    if name not in PLACEMENT_RULES:
        raise UnknownNameError("placement rule", name, PLACEMENT_RULES)
    return PLACEMENT_RULES[name].make(nodes, typical, np.random.default_rng(seed))


def fill(room: PodRoom, pods: PodTable, rule: PlacementRule) -> int:
    """Place pods in their order; one for which no host has room is passed over.

    Returns:
        Number of pods that were passed over.
    """
    failed = 0
    for pod in range(len(pods)):
        able = room.able(pods, pod)
        if len(able):
            room.place(pods, pod, *rule.choose(room, pods, pod, able))
        else:
            failed += 1
    return failed


class _Random:
    """A random host, and a random GPU with room."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def choose(
        self, room: PodRoom, pods: PodTable, pod: int, able: Index
    ) -> tuple[int, int]:
        """Return the host, among those that are able, and the GPU."""
        node = int(self._random.choice(able))
        fits = np.flatnonzero(room.gpu[node] >= max(1, pods.milli[pod]))
        return node, int(self._random.choice(fits)) if len(fits) else 0


class _BestFit:
    """The host with the least left over, of processors and GPUs together.

    Scores are whole numbers from 0 to 100, and the first host of those that tie is
    taken, as by Weng et al.
    """

    def choose(
        self, room: PodRoom, pods: PodTable, pod: int, able: Index
    ) -> tuple[int, int]:
        """Return the host, among those that are able, and the GPU."""
        rest = (room.cpu[able] - pods.cpu[pod]) / _MOST_CPU + (
            room.gpu[able].sum(axis=1) - pods.gpus[pod] * pods.milli[pod]
        ) / _MOST_GPU
        score = np.floor(100.0 * (1.0 - 0.5 * rest))
        node = int(able[score.argmax()])
        left = room.gpu[node]
        fits = np.where(left >= max(1, pods.milli[pod]), left, 2 * MILLI)
        return node, int(fits.argmin())


class _Fragmentation:
    """The host whose GPUs become least useless to typical pods.

    What is left of a host's GPUs is a fragment for a pod that the host cannot take, or
    that a GPU with too little left cannot take. The expected fragments over typical
    pods are to grow least. Scores are whole numbers from 0 to 100, and the first host
    of those that tie is taken, as by Weng et al.: with a random one, FGD would allocate
    5 points less of openb's cluster.

    Source: Weng et al. 2023 (FGD), sections 3 and 4.
    """

    def __init__(self, nodes: NodeTable, typical: PodTable) -> None:
        self._typical = _typical(typical)
        self._kind = nodes.kind
        self._type: dict[bytes, int] = {}
        self._version: Index = np.ones(len(nodes.cpu), dtype=np.int64)
        self._score: list[Index] = []
        self._gpu: list[Index] = []
        self._seen: list[Index] = []

    def choose(
        self, room: PodRoom, pods: PodTable, pod: int, able: Index
    ) -> tuple[int, int]:
        """Return the host, among those that are able, and the GPU."""
        what = np.array([pods.cpu[pod], pods.gpus[pod], pods.milli[pod]])
        key = what.tobytes() + pods.allowed[pod].tobytes()
        if key not in self._type:
            self._type[key] = len(self._type)
            for kept in (self._score, self._gpu, self._seen):
                kept.append(np.zeros(len(self._kind), dtype=np.int64))
        number = self._type[key]
        score, gpu, seen = self._score[number], self._gpu[number], self._seen[number]
        stale = able[seen[able] != self._version[able]]
        if len(stale):
            _growth(
                stale, room.cpu, room.gpu, self._kind, *self._typical, what, score, gpu
            )
            seen[stale] = self._version[stale]
        node = int(able[score[able].argmax()])
        self._version[node] += 1
        return node, int(gpu[node])


def _typical(pods: PodTable) -> tuple[Index, Index, Index, Mask, Floats]:
    """Return the most frequent requests, and their shares."""
    rows = np.column_stack([pods.cpu, pods.gpus, pods.milli, pods.allowed])
    kinds, counts = np.unique(rows, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    kinds, counts = kinds[order], counts[order]
    last = int(np.searchsorted(np.cumsum(counts), _TYPICAL * counts.sum())) + 1
    kinds, counts = kinds[:last], counts[:last]
    columns = [np.ascontiguousarray(kinds[:, at]).astype(np.int64) for at in range(3)]
    return (
        columns[0],
        columns[1],
        columns[2],
        kinds[:, 3:].astype(np.bool_),
        counts / counts.sum(),
    )


@inner
def _fragments(
    cpu: int,
    gpu: Index,
    kind: int,
    pod_cpu: Index,
    pod_gpus: Index,
    pod_milli: Index,
    pod_allowed: Mask,
    share: Floats,
) -> float:
    """Expected thousandths of a host's GPUs that typical pods cannot use."""
    total = 0
    for one in range(len(gpu)):
        total += gpu[one]
    found = 0.0
    for pod in range(len(share)):
        lost = total
        if pod_gpus[pod] > 0 and pod_allowed[pod, kind] and cpu >= pod_cpu[pod]:
            fits, short = 0, 0
            for one in range(len(gpu)):
                if gpu[one] >= pod_milli[pod]:
                    fits += 1
                else:
                    short += gpu[one]
            if fits >= pod_gpus[pod]:
                lost = short
        found += share[pod] * lost
    return found


@compiled
def _growth(
    nodes: Index,
    cpu: Index,
    gpu: Index,
    kind: Index,
    pod_cpu: Index,
    pod_gpus: Index,
    pod_milli: Index,
    pod_allowed: Mask,
    share: Floats,
    what: Index,
    score: Index,
    best: Index,
) -> None:
    """Score hosts from 0 to 100 by how little their fragments grow, in steps of 1.

    Args:
        what: Processors, GPUs and thousandths that the pod asks for.
        score: Score of each host; written. Shape [nodes].
        best: GPU with the best score; written. Shape [nodes].
    """
    trial = np.zeros(gpu.shape[1], np.int64)
    for node in nodes:
        now = _fragments(
            cpu[node],
            gpu[node],
            kind[node],
            pod_cpu,
            pod_gpus,
            pod_milli,
            pod_allowed,
            share,
        )
        score[node], best[node] = -1, 0
        part = what[1] == 1 and what[2] < 1000
        for one in range(gpu.shape[1] if part else 1):
            if part and gpu[node, one] < what[2]:
                continue
            trial[:] = gpu[node]
            if part:
                trial[one] -= what[2]
            else:
                rest = what[1]
                for other in range(len(trial)):
                    if rest > 0 and trial[other] >= what[2]:
                        trial[other] -= what[2]
                        rest -= 1
            after = _fragments(
                cpu[node] - what[0],
                trial,
                kind[node],
                pod_cpu,
                pod_gpus,
                pod_milli,
                pod_allowed,
                share,
            )
            found = int(100.0 / (1.0 + np.exp(-(now - after) / 1000.0)))
            if found > score[node]:
                score[node], best[node] = found, one


#: Placement rules by name.
PLACEMENT_RULES: Mapping[str, Placement] = {
    "random": Placement(
        make=lambda *given: _Random(given[2]),
        source="Random in Weng et al. 2023",
    ),
    "best_fit": Placement(
        make=lambda *_: _BestFit(),
        source="BestFit in Weng et al. 2023",
    ),
    "fgd": Placement(
        make=lambda *given: _Fragmentation(given[0], given[1]),
        source="Weng et al. 2023 (FGD)",
    ),
}
