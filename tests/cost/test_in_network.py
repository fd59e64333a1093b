"""Sums on switches that add: half of a ring's bytes, priced alone, and told."""

from __future__ import annotations

import numpy as np
import pytest

from planner import Cluster, plan
from planner.cluster import AxisLevel, device_type
from planner.cost.traffic.collectives import Groups, time_of
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link


def _cluster(aggregates: bool, hosts: int = 4) -> Cluster:
    device = device_type("a100-80")
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    group = HostGroup(
        name="host",
        count=hosts,
        devices_per_host=2,
        device=device.name,
        link=Link(bandwidth_bytes_per_s=1e11, latency_s=1e-6),
    )
    level = Level(name="switch", link=link, aggregates=aggregates)
    return Cluster.from_document(
        ClusterDocument(
            name="c", device_types=(device,), hosts=(group,), levels=(level,)
        )
    )


def _groups(aggregates: bool, rings: bool) -> Groups:
    levels = (
        AxisLevel(members=2, bandwidth_bytes_per_s=1e11, latency_s=0.0, name="host"),
        AxisLevel(
            members=4,
            bandwidth_bytes_per_s=1e9,
            latency_s=1e-5,
            name="switch",
            aggregates=aggregates,
        ),
    )
    return Groups.from_levels([levels], rings=rings)


@pytest.mark.parametrize("rings", [False, True])
def test_all_goes_up_once_and_comes_down_once(rings: bool) -> None:
    size = 1e9
    added = float(time_of("all_reduce", size, _groups(True, rings))[0])
    plain = float(time_of("all_reduce", size, _groups(False, rings))[0])
    # Inside hosts 2 (m - 1) / m n / β; between them n over two interfaces, and 2 hops.
    assert added == pytest.approx(1e9 / 1e11 + 1e9 / 2 / 1e9 + 2e-5)
    assert plain > 1.4 * added
    for kind in ("all_gather", "reduce_scatter"):
        one, other = (time_of(kind, size, _groups(a, rings)) for a in (True, False))
        np.testing.assert_array_equal(one, other)


def test_plans_are_priced_so_and_say_so() -> None:
    pins = {"pp": 1, "tp": 1, "cp": 1, "dp_shard": 1}
    made, plain = (
        plan(
            "gpt2",
            _cluster(aggregates),
            global_batch=8,
            seq_len=128,
            pin=pins,
            partitioner="exhaustive",
            certify=False,
        )
        for aggregates in (True, False)
    )
    assert made.prediction.step_time_s < plain.prediction.step_time_s
    assert made.prediction.collective_bytes == plain.prediction.collective_bytes
    assert "those of switch are priced as adding sums" in made.explain()
    assert "adding sums" not in plain.explain()
