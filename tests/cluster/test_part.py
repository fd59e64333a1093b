"""Some devices of a cluster are a cluster of their own, with the same links."""

from __future__ import annotations

import numpy as np
import pytest

from planner import Cluster
from planner.cluster import device_type
from planner.errors import ClusterError
from planner.schema.cluster import Link

WAN = Link(bandwidth_bytes_per_s=1.25e6, latency_s=0.05, name="WAN")
FLEETS = {
    "hierarchical": Cluster.mixed(
        Cluster.from_preset("dgx-a100", 2), Cluster.from_preset("dgx-h100"), level=WAN
    ),
    "matrix": Cluster.from_matrices(
        np.arange(1.0, 401.0).reshape(20, 20),
        np.arange(400.0).reshape(20, 20) / 1e3,
        [device_type(kind) for kind in ("t4-16", "rtx3090-24") for _ in range(10)],
        [0, 0, *range(1, 19)],
    ),
}


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("ids", [[0, 1], [5, 9, 10, 17, 18], [3], [*range(16)]])
def test_links_and_types_stay(name: str, ids: list[int]) -> None:
    fleet = FLEETS[name]
    part = fleet.part(ids)
    assert part.num_devices == part.num_free == len(ids)
    types = [fleet.device_types[fleet.type_index[i]].name for i in ids]
    assert [part.device_types[i].name for i in part.type_index] == types
    for a, first in enumerate(ids):
        for b, second in enumerate(ids):
            assert part.link(a, b) == fleet.link(first, second)


def test_hosts_are_divided_with_their_cores_and_memory() -> None:
    document = Cluster.detect(processes=4).document
    (group,) = document.hosts
    group = group.model_copy(update={"memory_bytes": 64e9, "compute_slots": 2.0})
    fleet = Cluster.from_document(document.model_copy(update={"hosts": (group,)}))
    (half,) = fleet.part([1, 2]).document.hosts
    assert half.devices_per_host == 2
    assert half.compute_slots == 1.0
    assert half.memory_bytes == 32e9


def test_the_whole_is_the_cluster() -> None:
    fleet = Cluster.from_preset("dgx-a100", 2)
    whole = fleet.part(range(16), name=fleet.name)
    assert whole.fingerprint == fleet.fingerprint


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "no devices of dgx-a100 are given"),
        ([8], "device 8 does not exist; dgx-a100 has devices 0 to 7"),
        ([-1], "device -1 does not exist"),
        ([1, 1], "device 1 is given twice"),
    ],
)
def test_wrong_devices_are_refused(ids: list[int], said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        Cluster.from_preset("dgx-a100").part(ids)
