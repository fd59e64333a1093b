"""Subsets of devices, their plain orders, and the meshes over each subset.

A subset is a number of devices out of some groups. A cluster that is used whole has
one, a mixed cluster also one for each device type and for the fastest few; where
devices may be left out there is one for each number worth trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.base import Request
from planner.search.device_order.groups import DeviceGroups
from planner.search.orders import device_orders, type_sets, usable_counts
from planner.space import MESH_COLUMNS, StrategyTable, enumerate_meshes, expand_meshes
from planner.space.table import distinct

__all__ = ["Choices", "DeviceSubset", "distinct_meshes", "list_choices", "mesh_of_row"]

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Edges of ranges of which a few numbers of devices are tried, if some may be left out,
#: in sixteenths of all; and of the range that is of interest where one kind is used.
_EDGES, _NEAREST = (16, 15, 12, 8, 6, 4, 3, 2, 1, 0.5, 0.25, 0), (16, 12)
#: Devices up to which every number is tried.
_FEW = 16
#: Distance, in the list of meshes, of those that are tested together for legal rows.
_STRIDE = 16


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class DeviceSubset:
    """A number of devices, out of some groups.

    Attributes:
        count: Number of devices that are used.
        usable: Mask of the groups that they may be in. Shape [groups].
        sequences: Plain orders of the usable groups, -1 after the last; the last order
            is by links from the fastest group. Shape [n, groups].
    """

    count: int
    usable: Mask
    sequences: Index


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choices:
    """Every mesh over every subset of devices.

    Attributes:
        subsets: The subsets.
        mesh: Degrees of each mesh, in the columns :data:`planner.space.MESH_COLUMNS`.
            Shape [choices, 6].
        subset: Index of each mesh's subset. Shape [choices].
    """

    subsets: tuple[DeviceSubset, ...]
    mesh: Index
    subset: Index

    def __len__(self) -> int:
        return len(self.subset)


def _sequences(request: Request, groups: DeviceGroups, usable: Mask) -> Index:
    """Return plain orders: by number, most memory, slowest or fastest first, links."""
    members = np.flatnonzero(usable)
    found = [members]
    types = request.context.cluster.device_types
    kinds = groups.kinds[members]
    if len(np.unique(kinds)) > 1:
        memory = np.array([kind.memory_bytes for kind in types])[kinds]
        speed = np.array([max(kind.peak_flops_per_s.values()) for kind in types])[kinds]
        found += [
            members[np.argsort(value, kind="stable")]
            for value in (-memory, speed, -speed)
        ]
    if groups.links_differ(members):
        seconds = groups.seconds()[np.ix_(members, members)]
        central = int(members[seconds.sum(axis=1).argmin()])
        found.append(groups.by_links(central, usable))
        if len(np.unique(kinds)) > 1:
            found.append(groups.by_links(int(found[3][0]), usable))
    # Of equal ones the last: the order after all others is the one to look at first.
    unique = {tuple(sequence.tolist()): sequence for sequence in reversed(found)}
    padded = np.full((len(unique), len(groups)), -1, dtype=np.int64)
    for row, sequence in enumerate(reversed(unique.values())):
        padded[row, : len(sequence)] = sequence
    return padded


def _expressible(
    request: Request, groups: DeviceGroups, sequences: Index, count: int
) -> Index:
    """Return the sequences that the request's launcher can express."""
    if request.launcher_limits is None:
        return sequences
    ids = groups.orders(sequences, count)
    return np.asarray(sequences[request.launcher_limits.mask(ids)])


def _counts(
    request: Request, most: int, edges: Sequence[float], each: int = 2
) -> list[int]:
    """Return numbers of devices below ``most`` that meshes can use in most ways.

    Args:
        request: The question.
        most: Devices that there are.
        edges: Sixteenths of ``most``, between which numbers are taken.
        each: How many of each range, those of most ways.

    Returns:
        The numbers, largest first.
    """
    numbers, ways = usable_counts(request)
    found: list[int] = []
    for high, low in pairwise(int(most * part / 16) for part in edges):
        inside = np.flatnonzero((numbers > low) & (numbers <= min(high, most - 1)))
        best = inside[np.lexsort((numbers[inside], ways[inside]))[-each:]]
        found += sorted(numbers[best].tolist(), reverse=True)
    return found


def _with_copies(request: Request, most: int, counts: list[int]) -> list[int]:
    """Return the numbers, and the largest below ``most`` that divides the batch.

    So many copies of the whole model share a batch equally; where its factors are odd,
    that is seldom one of the numbers that divide in many ways.
    """
    batch = request.global_batch
    downwards = range(min(most - 1, batch), 0, -1)
    copies = next((number for number in downwards if batch % number == 0), 0)
    return [*counts, copies] if copies and copies not in counts else counts


def _has_rows(request: Request, count: int) -> bool:
    """Return True if any strategy on ``count`` devices is legal."""
    mesh = enumerate_meshes(request.facts, count, request.pins)
    return any(
        len(expand_meshes(mesh[start::_STRIDE], request.facts, request.pins))
        for start in range(min(_STRIDE, len(mesh)))
    )


def _subsets(request: Request, groups: DeviceGroups) -> list[tuple[int, Mask]]:
    every = np.ones(len(groups), dtype=bool)
    masks = [
        np.isin(groups.kinds, kinds)
        for kinds in type_sets(request.context.cluster, groups.kinds)
    ]
    single = [(int(groups.sizes[mask].sum()), mask) for mask in masks]
    if request.launcher_limits is not None:
        return _of_orders(request, groups)
    total = int(groups.sizes.sum())
    if request.devices == "any":
        # Most of a kind may divide in more ways than all of it.
        some = [
            (fewer, mask)
            for count, mask in single
            for fewer in _with_copies(
                request, count, _counts(request, count, _NEAREST, 1)
            )
        ]
        edges = _EDGES if total > _FEW else range(16, -1, -1)
        fewer = _with_copies(request, total, _counts(request, total, edges))
        return [(n, every) for n in (total, *fewer)] + single + some
    if _has_rows(request, total):
        return [(total, every), *single]
    # The largest numbers with a legal strategy.
    counts = {len(order) for order in device_orders(request)}
    whole = [
        n for n in sorted(counts, reverse=True) if (n not in {c for c, _ in single})
    ]
    return [(n, every) for n in whole] + single


def _of_orders(request: Request, groups: DeviceGroups) -> list[tuple[int, Mask]]:
    """Fleets of whole groups, or of the first of them, that a launcher can express."""
    found: dict[tuple[int, bytes], tuple[int, Mask]] = {}
    for order in device_orders(request):
        usable = np.zeros(len(groups), dtype=bool)
        usable[groups.sequence_of(order)] = True
        found[len(order), usable.tobytes()] = (len(order), usable)
    return list(found.values())


def list_choices(request: Request, groups: DeviceGroups) -> Choices:
    """List every mesh over every subset of a request; empty if nothing divides."""
    subsets: list[DeviceSubset] = []
    meshes: list[Index] = []
    owners: list[Index] = []
    known: dict[bytes, Index] = {}
    for count, usable in _subsets(request, groups):
        mesh = enumerate_meshes(request.facts, count, request.pins)
        if not len(mesh):
            continue
        key = usable.tobytes()
        if key not in known:
            known[key] = _sequences(request, groups, usable)
        sequences = _expressible(request, groups, known[key], count)
        if not len(sequences):
            continue
        owners.append(np.full(len(mesh), len(subsets), dtype=np.int64))
        subsets.append(DeviceSubset(count=count, usable=usable, sequences=sequences))
        meshes.append(mesh)
    return Choices(
        subsets=tuple(subsets),
        mesh=np.concatenate(meshes) if meshes else np.zeros((0, 6), dtype=np.int64),
        subset=np.concatenate(owners) if owners else np.zeros(0, dtype=np.int64),
    )


def distinct_meshes(choices: Choices, chosen: Index) -> tuple[Index, Index]:
    """Return the meshes of choices, each once, and the index of each choice's mesh."""
    mesh = choices.mesh[chosen]
    if not len(mesh):
        return mesh, chosen
    first, which = distinct(*mesh.T)
    return mesh[first], which


def mesh_of_row(table: StrategyTable, mesh: Index) -> Index:
    """Return the index of the mesh that each row has. Shape [n]."""
    both = [
        np.concatenate([mesh[:, at], getattr(table, name)])
        for at, name in enumerate(MESH_COLUMNS)
    ]
    number = distinct(*both)[1]
    place = np.empty(int(number.max()) + 1, dtype=np.int64)
    place[number[: len(mesh)]] = np.arange(len(mesh))
    return np.asarray(place[number[len(mesh) :]])
