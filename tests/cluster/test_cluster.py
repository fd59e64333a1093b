from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from planner.cluster import Cluster, device_type
from planner.errors import ClusterError
from planner.schema.cluster import Link, MeasuredCollective


def test_views_of_a_preset() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=3)
    assert cluster.num_devices == cluster.num_free == 24
    assert cluster.host_of_device.tolist() == [0] * 8 + [1] * 8 + [2] * 8
    assert cluster.type_index.tolist() == [0] * 24
    assert cluster.is_uniform
    assert cluster.ref == "dgx-h100:3"


def test_reference_counts_device_types() -> None:
    reference = Cluster.from_preset("internet-pcs", nodes=5).reference()
    assert reference.device_types == {"rtx3090-24": 3, "rtx4090-24": 2}
    assert reference.num_devices == 5
    assert reference.ref == "internet-pcs:5"
    assert sum(count for count, _ in reference.host_types) == 5
    assert {kind for _, kind in reference.host_types} == {"rtx3090-24", "rtx4090-24"}


def test_reference_names_the_type_of_each_host() -> None:
    boxes = [Cluster.parse(name) for name in ("dgx-a100:2", "dgx-h100:1", "dgx-a100:3")]
    wan = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3)
    mixed = Cluster.mixed(*boxes, level=wan).reference()
    first, second = boxes[0].device_types[0].name, boxes[1].device_types[0].name
    assert mixed.host_types == ((2, first), (1, second), (3, first))
    assert mixed.hosts == ((6, 8),)
    # One type needs no naming.
    assert boxes[2].reference().host_types == ()


def test_large_clusters_hold_nothing_of_size_n_squared() -> None:
    tracemalloc.start()
    try:
        cluster = Cluster.parse("dgx-h100:2048")
        assert cluster.num_free == 16384
        assert cluster.fingerprint
        assert [level.members for level in cluster.axis_levels(16384, 1)] == [8, 2048]
        assert cluster.boundary_links(16, 1024)[0].shape == (15,)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One byte for each pair would be 268 MB.
    assert peak < 32e6


def test_occupied_devices_are_not_free() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2)
    taken = cluster.with_occupied([3, 0, 1, 9, 3])
    assert taken.document.occupied == ((0, 2), (3, 4), (9, 10))
    assert taken.free.tolist() == [2, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15]
    assert taken.num_devices == 16
    assert not taken.is_uniform
    assert cluster.num_free == 16
    assert taken.with_occupied([]).free.tolist() == list(range(16))


@pytest.mark.parametrize("wrong", [-1, 16])
def test_occupied_out_of_range(wrong: int) -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2)
    with pytest.raises(ClusterError, match=f"device {wrong} does not exist.*0 to 15"):
        cluster.with_occupied([2, wrong])


def test_device_ids_out_of_range() -> None:
    with pytest.raises(ClusterError, match="reach from 0 to 8"):
        Cluster.from_preset("dgx-h100").axis_levels(2, 1, [0, 8])


def test_fingerprint_knows_hardware_but_not_measured_numbers() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2)
    device = cluster.device_types[0]
    slower = cluster.document.model_copy(
        update={
            "name": "ours",
            "calibration": "monday",
            "device_types": (device.model_copy(update={"matmul_efficiency": 0.5}),),
        }
    )
    assert Cluster.from_document(slower).fingerprint == cluster.fingerprint
    assert cluster.with_occupied([1]).fingerprint == cluster.fingerprint
    others = ("dgx-h200:2", "dgx-h100:3", "dgx-h100:1", "gb200-nvl72")
    prints = {Cluster.parse(other).fingerprint for other in others}
    assert len(prints | {cluster.fingerprint}) == 5


def test_fingerprint_does_not_depend_on_how_hosts_are_written() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=4)
    (group,) = cluster.document.hosts
    halves = tuple(
        group.model_copy(update={"count": 2, "name": name}) for name in ("a", "b")
    )
    same = cluster.document.model_copy(update={"hosts": halves})
    assert Cluster.from_document(same).fingerprint == cluster.fingerprint


def test_equal_documents_are_equal_clusters() -> None:
    one, two = Cluster.parse("dgx-h100:2"), Cluster.from_preset("hgx-h100", 2)
    assert one == two
    assert hash(one) == hash(two)
    assert one != Cluster.parse("dgx-h100:3")
    assert one != "dgx-h100:2"


def test_views_are_read_only_and_survive_pickling() -> None:
    cluster = Cluster.from_preset("dgx-h100")
    with pytest.raises(ValueError, match="read-only"):
        cluster.free[0] = 7
    with pytest.raises(AttributeError):
        cluster.ref = "other"  # type: ignore[misc]
    levels = cluster.axis_levels(8, 1)
    assert pickle.loads(pickle.dumps(cluster)).axis_levels(8, 1) == levels


def test_slowdown_is_devices_over_cores() -> None:
    document = Cluster.detect(4).document
    group = document.hosts[0].model_copy(update={"compute_slots": 2.0})
    shared = document.model_copy(update={"hosts": (group,)})
    assert Cluster.from_document(shared).slowdown.tolist() == [2.0] * 4
    assert Cluster.from_preset("dgx-h100").slowdown.tolist() == [1.0] * 8


@pytest.mark.parametrize(
    ("cluster", "uniform"),
    [
        (Cluster.from_preset("ramp"), True),
        (Cluster.from_preset("internet-pcs", 4), False),
        (
            Cluster.from_matrices(
                np.full((4, 4), 1e9), np.zeros((4, 4)), device_type("v100-16")
            ),
            True,
        ),
        (
            Cluster.from_matrices(
                np.arange(1.0, 17.0).reshape(4, 4),
                np.zeros((4, 4)),
                device_type("v100-16"),
            ),
            False,
        ),
        (
            Cluster.mixed(
                Cluster.from_preset("dgx-h100", 1),
                Cluster.from_preset("dgx-h100", 1),
                level=Link(bandwidth_bytes_per_s=1e9, latency_s=0.0),
            ),
            True,
        ),
    ],
)
def test_is_uniform(cluster: Cluster, uniform: bool) -> None:
    assert cluster.is_uniform is uniform


def test_measured_collective_of_this_or_the_next_larger_group() -> None:
    entries = tuple(
        MeasuredCollective(
            kind="all_reduce", group_size=n, alpha_s=1e-3, bandwidth_bytes_per_s=1e9
        )
        for n in (2, 4)
    )
    document = Cluster.from_preset("dgx-h100").document
    cluster = Cluster.from_document(
        document.model_copy(update={"collectives": entries})
    )
    assert cluster.measured("all_reduce", 2) == entries[0]
    assert cluster.measured("all_reduce", 3) == entries[1]
    assert cluster.measured("all_reduce", 5) is None
    assert cluster.measured("all_gather", 2) is None


def test_describe_has_devices_and_links() -> None:
    rows = Cluster.from_preset("dgx-h100", nodes=2).with_occupied([0]).describe()
    assert rows["devices"] == "16 on 2 hosts"
    assert rows["free"] == "15"
    assert "989TFLOP/s bfloat16" in rows["h100-80"]
    assert "450 GB/s" in rows["inside dgx-h100"]
    assert "50 GB/s" in rows["InfiniBand NDR"]
