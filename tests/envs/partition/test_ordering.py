"""Numbers of each step against the definitions, computed anew in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.partition.features import observe
from envs.partition.ordering import STEP_FEATURES, Ordering
from planner.cluster import Cluster
from planner.search.device_order.subsets import Choices
from tests.cost.made import device, hosts
from tests.envs.partition.small import slow_device, uneven_machines
from tests.search.device_order.made import far_sites, prepared

CLUSTERS = {
    "uneven": uneven_machines(),
    "occupied": uneven_machines().with_occupied([0, 5, 6, 12]),
    "sites": far_sites(9, 3),
    "many": hosts((2, 1, device()), (1, 6, slow_device()), (3, 2, device("c"))),
}


class _Naive:
    """One order, described from the devices placed so far and nothing else."""

    def __init__(
        self, world: dict[str, Any], mesh: np.ndarray[Any, Any], count: int
    ) -> None:
        self.sizes, self.kinds = world["sizes"], world["kinds"]
        self.speed, self.memory = world["groups"][:, 1], world["groups"][:, 2]
        self.rate, self.wait = world["pairs"][:, :, 0], world["pairs"][:, :, 1]
        pp, _, shard, cp, tp, _ = mesh.tolist()
        self.count, self.stage = count, count // pp
        self.block, self.inner = shard * cp * tp, cp * tp
        self.placed: list[int] = []  # Group of each device.
        self.sequence: list[int] = []

    def take(self, group: int) -> None:
        free = self.count - len(self.placed)
        self.placed += [group] * min(int(self.sizes[group]), free)
        self.sequence.append(group)

    def _since(self, length: int) -> list[int]:
        """Groups with a device in the run of ``length`` that is not yet full."""
        start = len(self.placed) // length * length
        return list(dict.fromkeys(self.placed[start:]))

    def describe(self, left: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen = np.zeros((len(self.sizes), STEP_FEATURES), dtype=np.float32)
        at, stage = len(self.placed), self.stage
        offset = at % stage
        mine, near = self._since(stage), self._since(self.block)
        remaining = self.sizes[left].sum()
        for group in np.flatnonzero(left).tolist():
            size, row = int(self.sizes[group]), seen[group]
            row[0], row[1] = at / self.count, offset / stage
            row[2] = (at // stage) / (self.count // stage)
            row[3], row[4] = offset + size <= stage, offset + size == stage
            whole = size % self.inner == 0 or self.inner % size == 0
            row[5] = at % self.inner == 0 and whole
            row[6] = offset > 0
            if offset:
                row[7] = min(self.rate[one, group] for one in mine)
                row[12] = self.speed[group] - min(self.speed[one] for one in mine)
                row[13] = self.memory[group] - min(self.memory[one] for one in mine)
            if at % self.block:
                row[8] = min(self.rate[one, group] for one in near)
            if at >= stage:
                peer = self.placed[at - stage]
                row[9], row[10] = self.rate[peer, group], self.wait[peer, group]
                first = (at // stage - 1) * stage
                before = self.placed[first : first + stage]
                row[11] = min(self.rate[one, group] for one in before)
            if self.sequence:
                row[14] = self.rate[self.sequence[-1], group]
            alike = left & (self.kinds == self.kinds[group])
            row[15] = self.sizes[alike].sum() / remaining
        return seen


def _begun(
    cluster: Cluster, **changes: Any
) -> tuple[Choices, dict[str, Any], Ordering, np.ndarray[Any, Any]]:
    """An order for every mesh of a world."""
    request, groups, choices = prepared(cluster, **changes)
    seen = observe(request, groups, choices)
    count = np.array([subset.count for subset in choices.subsets])[choices.subset]
    world = {
        "sizes": groups.sizes,
        "kinds": groups.kinds,
        "groups": seen.groups,
        "pairs": seen.pairs,
    }
    usable = np.stack([subset.usable for subset in choices.subsets])[choices.subset]
    ordering = Ordering.start(mesh=choices.mesh, count=count, usable=usable, **world)
    return choices, world, ordering, count


def _walk(
    world: dict[str, Any],
    meshes: np.ndarray[Any, Any],
    ordering: Ordering,
    count: np.ndarray[Any, Any],
    rng: np.random.Generator,
) -> None:
    """Take groups at random and compare what is said of them at every step."""
    naive = [
        _Naive(world, mesh, int(many)) for mesh, many in zip(meshes, count, strict=True)
    ]
    steps = 0
    while (going := ordering.going).any():
        steps += 1
        left = ordering.left.copy()
        described = ordering.describe()
        assert described.dtype == np.float32
        chosen = np.where(left, rng.random(left.shape), -1).argmax(axis=1)
        for row in range(len(meshes)):
            if not going[row]:
                assert (described[row] == 0).all()
                continue
            wanted = naive[row].describe(left[row])
            np.testing.assert_allclose(described[row], wanted, atol=1e-6)
            naive[row].take(int(chosen[row]))
        ordering.take(chosen)
    assert steps == max(len(one.sequence) for one in naive)
    for row, one in enumerate(naive):
        assert len(one.placed) == count[row]


@pytest.mark.parametrize("name", CLUSTERS)
def test_steps_are_described_as_defined(name: str) -> None:
    choices, world, ordering, count = _begun(CLUSTERS[name], devices="any")
    _walk(world, choices.mesh, ordering, count, np.random.default_rng(0))


@pytest.mark.parametrize("seed", range(6))
def test_groups_may_straddle_stages_and_blocks(seed: int) -> None:
    """No two links alike, groups larger and smaller than stages, the last in part."""
    rng = np.random.default_rng(seed)
    many = int(rng.integers(2, 8))
    pairs = rng.normal(size=(many, many, 2)).astype(np.float32)
    world = {
        "sizes": rng.integers(1, 9, size=many),
        "kinds": rng.integers(0, 3, size=many),
        "groups": rng.normal(size=(many, 13)).astype(np.float32),
        "pairs": pairs + pairs.transpose(1, 0, 2),
    }
    meshes, counts = [], []
    for count in range(1, int(world["sizes"].sum()) + 1):
        for pp in (n for n in range(1, count + 1) if count % n == 0):
            shard, tp = rng.choice([1, 2, 3], size=2).tolist()
            if count // pp % (shard * tp) == 0:
                replicate = count // pp // (shard * tp)
                meshes.append([pp, replicate, shard, 1, tp, 1])
                counts.append(count)
    mesh, count = np.array(meshes), np.array(counts)
    usable = np.ones((len(mesh), many), dtype=bool)
    ordering = Ordering.start(mesh=mesh, count=count, usable=usable, **world)
    _walk(world, mesh, ordering, count, rng)


@pytest.mark.parametrize("name", CLUSTERS)
def test_sequences_are_permutations_of_the_usable_groups(name: str) -> None:
    rng = np.random.default_rng(1)
    choices, _, ordering, _ = _begun(CLUSTERS[name])
    taken: list[list[int]] = [[] for _ in range(len(choices))]
    while (going := ordering.going).any():
        scores = np.where(ordering.left, rng.random(ordering.left.shape), -1)
        chosen = scores.argmax(axis=1)
        for row in np.flatnonzero(going).tolist():
            taken[row].append(int(chosen[row]))
        ordering.take(chosen)
    for row, sequence in enumerate(ordering.sequences()):
        usable = choices.subsets[choices.subset[row]].usable
        members = np.flatnonzero(usable).tolist()
        assert sorted(sequence[: len(members)].tolist()) == members
        assert (sequence[len(members) :] == -1).all()
        assert sequence[: len(taken[row])].tolist() == taken[row]


def test_one_device_is_one_step() -> None:
    _, _, ordering, _ = _begun(hosts((1, 1, device())))
    assert ordering.going.all()
    assert np.isfinite(ordering.describe()).all()
    ordering.take(np.zeros(len(ordering.left), dtype=np.int64))
    assert not ordering.going.any()
    assert (ordering.sequences() == 0).all()
