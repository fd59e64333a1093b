"""Problems in numbers: of order one, relative, and the same however it is numbered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from envs.partition.features import (
    GROUP_FEATURES,
    MESH_FEATURES,
    PAIR_FEATURES,
    UNIT_FEATURES,
    WHOLE_FEATURES,
    Observed,
    _nearest,
    observe,
)
from envs.partition.padding import Sizes, pad
from planner.cluster import Cluster
from planner.errors import StrategyError
from planner.search.device_order.groups import DeviceGroups, group_devices
from planner.search.device_order.subsets import Choices, list_choices
from tests.cost.made import device, hosts, request_for, uniform_graph
from tests.envs.partition.small import uneven_machines
from tests.search.device_order.made import far_sites, prepared

CLUSTERS = {
    "uneven": uneven_machines(),
    "occupied": uneven_machines().with_occupied([0, 1, 2, 3, 8]),
    "sites": far_sites(30, 4),
    "one host": hosts((1, 8, device())),
    "one device": hosts((1, 1, device())),
    "crumbs": hosts((1, 2, device()), (1, 2, device("crumbs", memory_bytes=1.0))),
    "large": hosts((64, 8, device())),
}
NAMES = ("units", "groups", "pairs", "meshes", "whole")


def _seen(cluster: Cluster, **changes: Any) -> tuple[Observed, DeviceGroups, Choices]:
    request, groups, choices = prepared(cluster, **changes)
    return observe(request, groups, choices), groups, choices


@pytest.mark.parametrize("devices", ["all", "any"])
@pytest.mark.parametrize("name", CLUSTERS)
def test_shapes_and_sizes(name: str, devices: str) -> None:
    seen, groups, choices = _seen(CLUSTERS[name], devices=devices)
    many = len(groups)
    assert seen.units.shape == (6, UNIT_FEATURES)
    assert seen.groups.shape == (many, GROUP_FEATURES)
    assert seen.pairs.shape == (many, many, PAIR_FEATURES)
    assert seen.meshes.shape == (len(choices), MESH_FEATURES)
    assert seen.whole.shape == (WHOLE_FEATURES,)
    for part in NAMES:
        array = getattr(seen, part)
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
        assert np.abs(array).max() < (40 if name == "crumbs" else 8)
    for edges, most in ((seen.unit_edges, 6), (seen.group_edges, many)):
        assert edges.dtype == np.int64
        assert edges.shape[0] == 2
        assert ((edges >= 0) & (edges < most)).all()
    source, target = seen.group_edges
    assert (source != target).all()
    assert (np.bincount(target, minlength=many) == min(12, many - 1)).all()


def test_edges_of_a_chain_go_both_ways() -> None:
    seen, _, _ = _seen(CLUSTERS["one host"])
    pairs = set(map(tuple, seen.unit_edges.T.tolist()))
    chain = {(at, at + 1) for at in range(5)}
    assert pairs == chain | {(b, a) for a, b in chain}


def test_edges_of_groups_are_those_that_are_nearest() -> None:
    seen, groups, _ = _seen(CLUSTERS["sites"])
    seconds = groups.seconds() + np.diag(np.full(30, np.inf))
    for group in range(30):
        near = seen.group_edges[0][seen.group_edges[1] == group]
        assert set(near.tolist()) == set(np.argsort(seconds[group])[:12].tolist())


@pytest.mark.parametrize("groups", [40, 600])
def test_of_many_groups_the_nearest_are_picked_as_of_few(groups: int) -> None:
    rng = np.random.default_rng(groups)
    seconds = rng.permutation(groups * groups).reshape(groups, groups) / 1e3
    alone = seconds + np.where(np.eye(groups, dtype=bool), np.inf, 0.0)
    found = _nearest(seconds.copy(), 12)
    assert (found == np.argsort(alone, axis=1)[:, :12]).all()
    # The earliest of those that are equally near.
    equal = _nearest(np.ones((600, 600)), 3)
    assert equal[0].tolist() == [1, 2, 3]
    assert equal[2].tolist() == [0, 1, 3]


def test_faster_links_are_higher_and_slower_ones_take_longer() -> None:
    seen, groups, _ = _seen(CLUSTERS["sites"])
    off = ~np.eye(30, dtype=bool)
    rate, wait = groups.bandwidth[off], groups.latency[off]
    assert seen.pairs[off, 0] == pytest.approx(np.log10(rate / 1e9) / 2, abs=1e-5)
    assert seen.pairs[off, 1] == pytest.approx(np.log10(wait / 1e-5) / 2, abs=1e-5)


def test_what_groups_are_is_relative_to_the_best() -> None:
    seen, _, _ = _seen(CLUSTERS["uneven"])
    assert seen.groups[:, 0] == pytest.approx(np.log2([4, 4, 2, 3]) / 3)
    assert seen.groups[:, 1] == pytest.approx([0, 0, np.log2(0.4), 0])
    assert seen.groups[:, 2] == pytest.approx([0, 0, -1, 0])
    # Devices that are all ten times as fast look the same.
    peaks = {"float32": 5e14, "bfloat16": 1e15}
    quick, slow = (
        hosts((2, 2, device(**c))) for c in ({}, {"peak_flops_per_s": peaks})
    )
    assert (_seen(quick)[0].groups == _seen(slow)[0].groups).all()


def test_a_subset_of_meshes_has_the_same_numbers() -> None:
    request, groups, choices = prepared(CLUSTERS["uneven"], devices="any")
    whole = observe(request, groups, choices)
    kept = np.array([0, 5, 40])
    few = Choices(
        subsets=choices.subsets, mesh=choices.mesh[kept], subset=choices.subset[kept]
    )
    some = observe(request, groups, few)
    assert (some.meshes == whole.meshes[kept]).all()
    assert (some.whole == whole.whole).all()


def test_requests_that_differ_look_different() -> None:
    def whole(**changes: Any) -> np.ndarray[Any, Any]:
        request = request_for(
            uniform_graph(6), CLUSTERS["uneven"], **{"global_batch": 12, **changes}
        )
        groups = group_devices(request.context)
        return observe(request, groups, list_choices(request, groups)).whole

    base = whole()
    for changes in (
        {"global_batch": 24},
        {"objective": "memory"},
        {"objective": "throughput_per_device"},
        {"devices": "any"},
        {"memory_fraction": 0.5},
    ):
        assert (whole(**changes) != base).any(), changes


def test_padding_says_what_is_there() -> None:
    seen, _, _ = _seen(CLUSTERS["uneven"])
    sizes = Sizes(units=9, groups=7, meshes=100)
    obs = pad(seen, sizes)
    masks = {"units": "unit_mask", "groups": "group_mask", "meshes": "mesh_mask"}
    for part in masks:
        array = getattr(seen, part)
        assert (obs[part][: len(array)] == array).all()
        assert (obs[part][len(array) :] == 0).all()
        mask = obs[
            {"units": "unit", "groups": "group", "meshes": "mesh"}[part] + "_mask"
        ]
        assert mask.sum() == len(array)
        assert (mask[: len(array)] == 1).all()
    for part in ("unit_edges", "group_edges"):
        edges = getattr(seen, part)
        assert (obs[part][:, : edges.shape[1]] == edges).all()
        assert (obs[part][:, edges.shape[1] :] == -1).all()
    assert (obs["chosen"], obs["phase"]) == (-1, 0)


def test_what_there_is_no_room_for_is_named() -> None:
    seen, _, choices = _seen(CLUSTERS["uneven"])
    with pytest.raises(StrategyError, match="6 units do not fit max_units=5"):
        pad(seen, Sizes(units=5, groups=4, meshes=len(choices)))
    with pytest.raises(StrategyError, match="4 groups do not fit max_groups=3"):
        pad(seen, Sizes(units=6, groups=3, meshes=len(choices)))
    with pytest.raises(StrategyError, match="make it with max_meshes="):
        pad(seen, Sizes(units=6, groups=4, meshes=1))
