"""Meshes and device subsets to choose from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.subsets import Choices
from planner.search.orders import device_orders
from planner.space import (
    MESH_COLUMNS,
    StrategyTable,
    enumerate_meshes,
    enumerate_strategies,
    expand_meshes,
)
from tests.cost.made import device, hosts, uniform_graph
from tests.search.device_order.made import far_sites, mixed_hosts, prepared

CLUSTERS = {
    "mixed": mixed_hosts(),
    "occupied": mixed_hosts().with_occupied([0, 1, 2, 3, 5]),
    "one device": hosts((1, 1, device())),
    "one host": hosts((1, 8, device())),
    "one left": mixed_hosts().with_occupied(range(1, 13)),
    "sites": far_sites(7, 2),
}


def _meshes(table: StrategyTable) -> set[tuple[int, ...]]:
    columns = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
    return set(map(tuple, columns.tolist()))


def _check(choices: Choices, groups: DeviceGroups) -> None:
    assert len(choices) == len(choices.mesh) == len(choices.subset)
    for number, subset in enumerate(choices.subsets):
        mesh = choices.mesh[choices.subset == number]
        assert len(mesh)
        # ep divides the replicas and is no factor of its own.
        assert (mesh[:, :5].prod(axis=1) == subset.count).all()
        assert len(np.unique(mesh, axis=0)) == len(mesh)
        assert subset.count <= groups.sizes[subset.usable].sum()
        usable = np.flatnonzero(subset.usable).tolist()
        for sequence in subset.sequences:
            assert sorted(sequence[: len(usable)].tolist()) == usable
            assert (sequence[len(usable) :] == -1).all()
        assert len(np.unique(subset.sequences, axis=0)) == len(subset.sequences)


@pytest.mark.parametrize("devices", ["all", "any"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_every_mesh_that_a_legal_strategy_has_is_there(name: str, devices: str) -> None:
    request, groups, choices = prepared(CLUSTERS[name], devices=devices)
    _check(choices, groups)
    for number, subset in enumerate(choices.subsets):
        mesh = choices.mesh[choices.subset == number]
        known = set(map(tuple, mesh.tolist()))
        legal = set()
        for table in enumerate_strategies(request.facts, num_devices=subset.count):
            legal |= _meshes(table)
        assert legal <= known
        assert _meshes(expand_meshes(mesh, request.facts)) == legal


def test_rows_of_a_mesh_are_those_of_the_whole_enumeration() -> None:
    request, _, _ = prepared(mixed_hosts())
    mesh = enumerate_meshes(request.facts, 12)
    split = [expand_meshes(mesh[[at]], request.facts) for at in range(len(mesh))]
    some = {tuple(row.items()) for table in split for row in table.rows()}
    whole = {
        tuple(row.items())
        for table in enumerate_strategies(request.facts, num_devices=12)
        for row in table.rows()
    }
    assert some == whole
    assert sum(map(len, split)) == len(some)


def test_pins_hold_in_meshes() -> None:
    request, _, choices = prepared(CLUSTERS["one host"], pins={"pp": 2, "tp": 2})
    assert {(m[0], m[4]) for m in choices.mesh.tolist()} == {(2, 2)}
    assert len(expand_meshes(choices.mesh, request.facts, request.pins))


@pytest.mark.parametrize("name", CLUSTERS)
def test_all_devices_are_used_as_far_as_any_strategy_uses_them(name: str) -> None:
    request, groups, choices = prepared(CLUSTERS[name])
    counts = {subset.count for subset in choices.subsets}
    orders = {len(order) for order in device_orders(request)}
    # A mesh without a legal row may be among the choices, none that has one is not.
    assert {n for n in orders if len(enumerate_meshes(request.facts, n))} <= counts
    whole = [subset for subset in choices.subsets if subset.usable.all()]
    assert {subset.count for subset in choices.subsets if not subset.usable.all()} <= {
        int(groups.sizes[groups.kinds == kind].sum()) for kind in groups.kinds
    }
    assert whole


def test_any_number_of_devices_may_be_left_out() -> None:
    _, groups, choices = prepared(mixed_hosts(), devices="any")
    whole = [f.count for f in choices.subsets if f.usable.all()]
    # Neither 6 units nor 12 samples divide into 7 or 11 parts.
    assert whole == [int(groups.sizes.sum()), 12, 10, 9, 8, 6, 5, 4, 3, 2, 1]


def test_numbers_of_devices_are_thinned_on_large_clusters() -> None:
    big = hosts((64, 8, device()))
    _, _, choices = prepared(big, units=8, global_batch=512, devices="any")
    counts = [subset.count for subset in choices.subsets]
    assert counts[0] == 512
    assert len(counts) <= 24
    for count in counts:
        left = count
        for factor in (2, 3, 5, 7):
            while left % factor == 0:
                left //= factor
        assert left == 1


def test_each_type_of_device_may_work_alone() -> None:
    _, groups, choices = prepared(mixed_hosts())
    alone = [f for f in choices.subsets if not f.usable.all()]
    assert {(f.count, tuple(f.usable.tolist())) for f in alone} == {
        (11, (True, True, False, True)),
        (2, (False, False, True, False)),
    }
    for subset in alone:
        assert len(set(groups.kinds[subset.usable].tolist())) == 1


def test_plain_orders_are_by_number_memory_speed_and_links() -> None:
    _, groups, choices = prepared(mixed_hosts())
    (subset,) = [f for f in choices.subsets if f.usable.all()][:1]
    found = {tuple(s.tolist()) for s in subset.sequences}
    # Slow ones are the ones with little memory here.
    assert {(0, 1, 2, 3), (0, 1, 3, 2), (2, 0, 1, 3)} <= found
    _, groups, choices = prepared(far_sites(8, 2))
    sequences = choices.subsets[0].sequences
    central = int(groups.seconds().sum(axis=1).argmin())
    assert groups.by_links(central).tolist() in sequences.tolist()


def test_nothing_that_divides_gives_no_choices() -> None:
    graph = uniform_graph(1, seq_len=None, tp_dims={"features": 1}, sharding={})
    # One unit, batch 1: the seven devices of a host divide nothing but themselves.
    request, _, choices = prepared(
        hosts((1, 7, device())), graph=graph, global_batch=1, pins={"pp": 7}
    )
    assert len(choices) == 0
    assert choices.mesh.shape == (0, len(MESH_COLUMNS))
    assert math.prod(choices.subset.shape) == 0
    assert request.facts.num_units == 1


def test_most_of_a_kind_is_a_choice_where_it_divides_in_more_ways_than_all() -> None:
    # Of 200 fast devices 192 are 64 times 3.
    fast = device("fast", peak_flops_per_s={"float32": 4e13, "bfloat16": 8e13})
    cluster = hosts((25, 8, fast), (20, 8, device("slow")), latency=1e-5)
    _, groups, choices = prepared(cluster, units=8, global_batch=1024, devices="any")
    kind = groups.kinds[0]
    of_fast = {
        subset.count
        for subset in choices.subsets
        if (groups.kinds[subset.usable] == kind).all()
    }
    assert {200, 192} <= of_fast
    of_all = {subset.count for subset in choices.subsets if subset.usable.all()}
    assert {360, 320, 256, 128, 64} <= of_all


def test_the_last_plain_order_begins_with_the_fastest_devices() -> None:
    """Meshes are screened under it; slow ones first, small fleets are all slow."""
    for cluster in (mixed_hosts(), mixed_hosts().with_occupied([0, 1, 2, 3])):
        request, groups, choices = prepared(cluster, devices="any")
        types = request.context.cluster.device_types
        speed = np.array([kind.peak_flops_per_s["bfloat16"] for kind in types])
        for subset in choices.subsets:
            members = groups.kinds[subset.usable]
            first = groups.kinds[subset.sequences[-1][0]]
            assert speed[first] == speed[members].max()


def test_as_many_devices_as_copies_share_the_batch_are_tried() -> None:
    cluster = hosts((5, 8, device()), (2, 8, device("slow", memory_bytes=40e9)))
    _, groups, choices = prepared(cluster, devices="any", global_batch=41 * 8)
    counts = {
        (subset.count, int(groups.sizes[subset.usable].sum()))
        for subset in choices.subsets
    }
    assert (41, 56) in counts
    assert (8, 40) in counts
    assert (8, 16) in counts
    assert len(counts) == len(choices.subsets)
