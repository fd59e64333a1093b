from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster, device_type
from planner.errors import ClusterError, TopologyError
from planner.schema.cluster import Link

V100 = device_type("v100-16")


def test_link_by_level() -> None:
    cluster = Cluster.from_preset("gb200-nvl72", nodes=2)
    assert cluster.link(0, 3) == cluster.link(0, 71) == (900e9, 1.9e-6)
    assert cluster.link(71, 72)[0] == 50e9
    assert cluster.link(5, 5) == (np.inf, 0.0)


def test_link_to_a_device_that_does_not_exist() -> None:
    with pytest.raises(ClusterError, match=r"device 8 does not exist.*0 to 7"):
        Cluster.from_preset("dgx-h100").link(0, 8)


def test_matrix_links_have_a_direction() -> None:
    bandwidth = [[0, 2e9, 3e9], [4e9, 0, 5e9], [6e9, 7e9, 0]]
    latency = [[0, 1e-3, 0], [2e-3, 0, 0], [0, 0, 0]]
    cluster = Cluster.from_matrices(bandwidth, latency, V100)
    assert cluster.link(0, 1) == (2e9, 1e-3)
    assert cluster.link(1, 0) == (4e9, 2e-3)
    # A boundary is crossed both ways, activations forward and gradients back.
    found = cluster.boundary_links(3, 1)
    assert found[0].tolist() == [2e9, 5e9]
    assert found[1].tolist() == [2e-3, 0.0]
    assert cluster.p2p_link(1) == (2e9, 2e-3)


@pytest.mark.parametrize("hole", [0.0, np.nan])
def test_missing_link_names_both_devices(hole: float) -> None:
    bandwidth = np.full((3, 3), 1e9)
    bandwidth[2, 1] = hole
    with pytest.raises(TopologyError, match="missing link from device 2 to device 1"):
        Cluster.from_matrices(bandwidth, np.zeros((3, 3)), V100)


def test_missing_latency_is_a_missing_link() -> None:
    latency = np.zeros((3, 3))
    latency[0, 2] = latency[1, 2] = np.nan
    with pytest.raises(TopologyError, match=r"device 0 to device 2 \(and 1 more\)"):
        Cluster.from_matrices(np.ones((3, 3)), latency, V100)


def _with(wrong: float) -> np.ndarray[Any, Any]:
    """Ones, and a number that no link has; the diagonal is not read."""
    matrix = np.ones((3, 3))
    matrix[1, 2] = matrix[0, 0] = wrong
    return matrix


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latency": np.zeros((2, 2))}, "latency has shape"),
        (
            {"bandwidth": -np.ones((3, 3))},
            r"bandwidth from device 0 to device 1 is -1\.0 \(and 5 more\).*negative",
        ),
        ({"latency": _with(np.inf)}, "latency from device 1 to device 2 is inf; it is"),
        ({"bandwidth": _with(np.inf)}, "bandwidth from device 1 to device 2 is inf"),
        ({"latency": _with(-np.inf)}, "is -inf; .* give it in seconds"),
        ({"bandwidth": [["fast"]]}, "bandwidth is no matrix of numbers"),
        ({"bandwidth": [[1, 2], [3]]}, "bandwidth is no matrix of numbers"),
        ({"bandwidth": 3}, r"bandwidth has shape \(\)"),
        ({"device": ["v100-16"] * 3}, "device 'v100-16' is no DeviceType"),
        ({"hosts": ["a", "a", "b"]}, "host of a device='a' is no whole number"),
        ({"hosts": [0, 0.5, 1]}, r"host of a device=0\.5 is no whole number"),
        ({"hosts": [0, 1]}, "hosts names 2 devices"),
        ({"hosts": [0, 1, 0]}, "do not lie side by side"),
        ({"device": [V100]}, "device names 1 types"),
        (
            {"hosts": [0, 0, 1], "device": [V100, device_type("h100-80"), V100]},
            "host 0",
        ),
    ],
)
def test_matrices_that_contradict_themselves(
    change: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {
        "bandwidth": np.ones((3, 3)),
        "latency": np.zeros((3, 3)),
        "device": V100,
    }
    with pytest.raises(ClusterError, match=message):
        Cluster.from_matrices(**{**arguments, **change})  # type: ignore[arg-type]


def test_boundaries_of_a_pipeline_over_two_hosts() -> None:
    cluster = Cluster.from_preset("dgx-h100", nodes=2)
    bandwidth, latency = cluster.boundary_links(4, 4)
    assert bandwidth.tolist() == [450e9, 50e9, 450e9]
    assert latency[1] > latency[0] == latency[2]
    around, _ = cluster.boundary_links(4, 4, wrap=True)
    assert around.tolist() == [450e9, 50e9, 450e9, 50e9]
    assert cluster.p2p_link(4)[0] == 50e9
    assert cluster.boundary_links(1, 16)[0].shape == (0,)


def test_devices_that_send_alone_have_a_whole_interface() -> None:
    # Hosts of 8 devices with two interfaces of 12.5e9 bytes/s: shares of 3.125e9.
    cluster = Cluster.from_preset("a40-pcie", nodes=2)
    crossing = {pp: cluster.boundary_links(pp, 16 // pp)[0].min() for pp in (2, 4, 16)}
    assert crossing == {2: 3.125e9, 4: 6.25e9, 16: 12.5e9}
    # A pipeline that goes back and forth between the hosts has no more than its share.
    there = [
        device for pair in zip(range(8), range(8, 16), strict=True) for device in pair
    ]
    assert cluster.boundary_links(16, 1, there, wrap=True)[0].max() == 3.125e9


def test_no_device_sends_faster_than_its_own_link() -> None:
    document = Cluster.from_preset("a40-pcie", nodes=2).document
    group = document.hosts[0]
    slow = group.link.model_copy(update={"bandwidth_bytes_per_s": 5e9})
    hosts = (group.model_copy(update={"link": slow}),)
    cluster = Cluster.from_document(document.model_copy(update={"hosts": hosts}))
    assert cluster.boundary_links(16, 1)[0][7] == 5e9


def test_p2p_needs_a_second_stage() -> None:
    with pytest.raises(ClusterError, match="stride from 1 to 4"):
        Cluster.from_preset("dgx-h100").p2p_link(5)


def test_boundaries_equal_the_links_one_by_one() -> None:
    rng = np.random.default_rng(3)
    cluster = Cluster.from_matrices(
        rng.uniform(1, 9, (12, 12)), rng.uniform(0, 1, (12, 12)), V100
    )
    ids = rng.permutation(12)
    bandwidth, latency = cluster.boundary_links(4, 3, ids.tolist())
    for stage in range(3):
        ways = [
            cluster.link(int(ids[a]), int(ids[b]))
            for r in range(stage * 3, stage * 3 + 3)
            for a, b in ((r, r + 3), (r + 3, r))
        ]
        assert bandwidth[stage] == min(band for band, _ in ways)
        assert latency[stage] == max(wait for _, wait in ways)


def test_mixed_generations_meet_at_the_slower_nic() -> None:
    wan = Link(name="wan", bandwidth_bytes_per_s=1e9, latency_s=1e-2)
    mixed = Cluster.mixed(
        Cluster.from_preset("dgx-a100", 2),
        Cluster.from_preset("dgx-h100", 3),
        level=wan,
    )
    assert mixed.link(0, 8)[0] == 25e9
    assert mixed.link(16, 24)[0] == 50e9
    assert mixed.link(0, 16) == (1e9, 1e-2)
    assert mixed.link(0, 7)[0] == 300e9
    assert mixed.type_index.tolist() == [0] * 16 + [1] * 24


def test_mixing_keeps_what_is_taken_and_every_link_of_a_matrix() -> None:
    matrix = Cluster.from_matrices([[0, 2e9], [3e9, 0]], np.zeros((2, 2)), V100)
    wan = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-2)
    box = Cluster.from_preset("dgx-h100").with_occupied([1, 2])
    joined = Cluster.mixed(matrix, box, level=wan)
    assert joined.document.occupied == ((3, 5),)
    assert joined.link(1, 0) == (3e9, 0.0)
    assert joined.link(2, 9) == box.link(0, 7)
    assert joined.link(0, 9) == (1e8, 1e-2)


def test_mixing_refuses_two_types_of_one_name() -> None:
    other = V100.model_copy(update={"memory_bytes": 1e9})
    a = Cluster.from_matrices([[0]], [[0]], V100)
    b = Cluster.from_matrices([[0]], [[0]], other)
    with pytest.raises(ClusterError, match="two device types are called 'v100-16'"):
        Cluster.mixed(a, b, level=Link(bandwidth_bytes_per_s=1.0, latency_s=0.0))
    with pytest.raises(ClusterError, match="at least two"):
        Cluster.mixed(a, level=Link(bandwidth_bytes_per_s=1.0, latency_s=0.0))
