"""METIS splits: fast links inside a part, and a fair answer from each order."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from planner.cluster import Cluster, device_type
from planner.errors import MeshwrightError
from planner.schema.cluster import Link
from planner.search import Request
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.metis import MetisPartitioner, device_splits
from planner.search.orders import device_orders
from tests.cost.made import request_for, uniform_graph

#: Site of each of 12 lone devices, as far out of order as can be.
SITES = np.array([0, 1, 2] * 4)


def sites() -> Cluster:
    """Three sites of four PCs: fast inside, slow between 0 and 2, slower to 1."""
    rate = np.array([[1e10, 1e7, 1e8], [1e7, 1e10, 1e7], [1e8, 1e7, 1e10]])
    bandwidth = rate[SITES[:, None], SITES[None, :]]
    latency = np.full((12, 12), 1e-4)
    return Cluster.from_matrices(bandwidth, latency, device_type("a100-80"))


def asked(cluster: Cluster, **options: object) -> Request:
    return request_for(uniform_graph(12), cluster, global_batch=24, **options)


def test_without_pymetis_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MeshwrightError, match=r"pip install 'meshwright\[metis\]'"):
        MetisPartitioner().search(asked(sites()))


def test_parts_are_sites_and_neighbours_are_near() -> None:
    pytest.importorskip("pymetis")
    (stages,) = [s for s in device_splits(asked(sites())) if s.pins == {"pp": 3}]
    where = SITES[stages.order].reshape(3, 4)
    assert (where == where[:, :1]).all()
    # The one good link between sites joins two neighbours.
    assert where[:, 0].tolist() in ([1, 0, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1])


def test_replicas_are_sites_too() -> None:
    pytest.importorskip("pymetis")
    splits = device_splits(asked(sites()))
    (pipelines,) = [s for s in splits if s.pins == {"pp": 4, "tp": 1}]
    where = SITES[pipelines.order].reshape(4, 3)
    assert (where == where[:1]).all()
    assert set(where[0].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.parse("dgx-h100:2").with_occupied([0, 3, 9]),
        Cluster.mixed(
            Cluster.parse("dgx-h100"),
            Cluster.parse("dgx-a100:2"),
            level=Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5),
        ),
        Cluster.parse("dgx-h100:1").with_occupied(range(1, 8)),
    ],
    ids=["occupied", "mixed", "one device"],
)
def test_each_order_has_a_set_of_devices_that_exhaustive_search_has(
    cluster: Cluster,
) -> None:
    pytest.importorskip("pymetis")
    request = asked(cluster)
    sets = {frozenset(order.tolist()) for order in device_orders(request)}
    splits = device_splits(request)
    assert {frozenset(split.order.tolist()) for split in splits} == sets
    for split in splits:
        assert len(set(split.order.tolist())) == len(split.order)
        assert not set(split.order.tolist()) - set(cluster.free)


def test_pins_are_kept() -> None:
    pytest.importorskip("pymetis")
    splits = device_splits(asked(sites(), pins={"pp": 3}))
    assert {split.pins["pp"] for split in splits} == {3}
    result = MetisPartitioner().search(asked(sites(), pins={"pp": 3}))
    assert {c.strategy.mesh.pp for c in result.candidates} == {3}


def test_the_same_request_has_the_same_answer_within_its_budget() -> None:
    pytest.importorskip("pymetis")
    request = asked(sites(), evaluation_budget=20)
    first = MetisPartitioner().search(request)
    second = MetisPartitioner().search(request)
    assert first.partitioner == "metis"
    assert [c.strategy for c in first.candidates] == [
        c.strategy for c in second.candidates
    ]
    assert 0 < first.evaluations["simulated"] <= 20
    assert all(c.cost.fits for c in first.candidates)


def test_on_scattered_sites_it_beats_the_order_of_ids() -> None:
    pytest.importorskip("pymetis")
    request = asked(sites(), pins={"pp": 3})
    found = MetisPartitioner().search(request).candidates[0].cost.step_time_s
    by_id = ExhaustivePartitioner().search(request).candidates[0].cost.step_time_s
    assert found < by_id / 2
