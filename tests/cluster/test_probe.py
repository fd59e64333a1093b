from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.cluster import Cluster, device_type
from planner.cluster.probe import fit_line, probe_process_group
from planner.errors import ClusterError, PlanFileError
from planner.schema.cluster import MeasuredCollective
from planner.schema.probe import MeasuredLink, ProbeDocument, ProbeEnvironment
from tests.cluster.gloo import run_ranks


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("probe")
    options = {"seconds": 0.6, "seed": 3, "name": "here", "date": "2026-01-02"}
    return run_ranks(2, folder, probe_process_group, **options)


def test_rank_zero_has_the_document(probed: list[Any]) -> None:
    assert probed[1] == {}
    document = ProbeDocument.from_data(probed[0])
    assert document.world_size == 2
    assert (document.name, document.seed) == ("here", 3)
    assert document.backend == "gloo"
    assert document.environment.date == "2026-01-02"
    assert document.host_of_rank == (0, 0)


def test_everything_measured_is_finite_and_positive(probed: list[Any]) -> None:
    document = ProbeDocument.from_data(probed[0])
    numbers = [
        document.compute_slots,
        document.kernel_overhead_s,
        document.memory_bytes,
        document.memory_bandwidth_bytes_per_s,
        document.elapsed_s,
        *document.peak_flops_per_s.values(),
        *(entry.bandwidth_bytes_per_s for entry in document.collectives),
        *(link.bandwidth_bytes_per_s for link in document.links),
        *(
            time
            for point in document.matmul
            for time in (point.alone_s, point.together_s)
        ),
    ]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert document.compute_slots <= 2
    assert {link.scope for link in document.links} == {"host"}
    assert {(entry.kind, entry.group_size) for entry in document.collectives} == {
        (kind, 2)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    # Products that grow eightfold take longer, whatever the machine.
    alone = [p.alone_s for p in document.matmul if p.dtype == "float32"]
    assert alone == sorted(alone)


def test_probe_makes_a_cluster(probed: list[Any], tmp_path: Path) -> None:
    document = ProbeDocument.from_data(probed[0])
    path = tmp_path / "probe.json"
    document.save(path)
    cluster = Cluster.parse(str(path))
    assert cluster.ref == str(path)
    assert cluster.document.calibration == "here"
    assert cluster.num_devices == 2
    assert cluster.fingerprint == Cluster.detect(2).fingerprint
    measured = cluster.measured("all_reduce", 2)
    assert measured in document.collectives
    assert cluster.link(0, 1)[0] == document.links[0].bandwidth_bytes_per_s


def hand_made(**change: Any) -> ProbeDocument:
    link = {"alpha_s": 1e-4, "bandwidth_bytes_per_s": 1e9}
    data: dict[str, Any] = {
        "name": "made",
        "backend": "gloo",
        "device_name": "cpu",
        "host_of_rank": (0, 0, 1, 1),
        "compute_slots": 1.0,
        "peak_flops_per_s": {"float32": 5e10},
        "half_efficiency_flops": 1e6,
        "kernel_overhead_s": 1e-5,
        "memory_bytes": 1e9,
        "memory_bandwidth_bytes_per_s": 1e10,
        "links": (
            MeasuredLink(scope="host", **link),
            MeasuredLink(scope="network", alpha_s=1e-3, bandwidth_bytes_per_s=1e8),
        ),
        "collectives": (
            MeasuredCollective(
                kind="all_reduce", group_size=4, alpha_s=1e-3, bandwidth_bytes_per_s=1e8
            ),
        ),
        "environment": ProbeEnvironment(
            torch_version="2.13.0",
            host_hashes=("a", "b"),
            usable_cores=1,
            threads_per_rank=1,
            date="",
        ),
    }
    return ProbeDocument(**{**data, **change})


def test_two_hosts_have_a_network_between_them() -> None:
    cluster = Cluster.from_probe(hand_made())
    assert cluster.host_of_device.tolist() == [0, 0, 1, 1]
    assert cluster.link(0, 1) == (1e9, 1e-4)
    assert cluster.link(1, 2) == (1e8, 1e-3)
    assert cluster.slowdown.tolist() == [2.0] * 4
    assert cluster.device_types[0].matmul_efficiency == 1.0


def test_one_rank_and_uneven_hosts() -> None:
    alone = hand_made(host_of_rank=(0,), links=(), collectives=())
    assert Cluster.from_probe(alone).num_devices == 1
    uneven = Cluster.from_probe(hand_made(host_of_rank=(0, 0, 1)))
    assert uneven.host_of_device.tolist() == [0, 0, 1]
    assert uneven.slowdown.tolist() == [2.0, 2.0, 1.0]


def test_known_chip_keeps_its_name_and_peaks() -> None:
    chip = device_type("h100-80")
    probe = hand_made(
        backend="nccl",
        device_name="h100-80",
        memory_bytes=chip.memory_bytes * 0.99,
        peak_flops_per_s={"float32": 5e13, "bfloat16": 0.7 * 989.4e12},
    )
    device = Cluster.from_probe(probe).device_types[0]
    assert device.name == "h100-80"
    assert device.peak_flops_per_s == chip.peak_flops_per_s
    assert device.matmul_efficiency == pytest.approx(0.7)


def test_probe_needs_a_group() -> None:
    with pytest.raises(ClusterError, match="no process group to probe"):
        probe_process_group()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host_of_rank": (0, 1, 0)}, "number ranks host by host"),
        ({"links": ()}, "no links were measured"),
    ],
)
def test_probe_documents_must_make_sense(change: dict[str, Any], message: str) -> None:
    data = {**hand_made().model_dump(mode="json"), **change}
    with pytest.raises(PlanFileError, match=message):
        ProbeDocument.from_data(data)


def test_exact_line_is_found() -> None:
    sizes = np.array([4e3, 6e4, 1e6, 8e6])
    fixed, rate = fit_line(sizes, 2e-4 + sizes / 5e8)
    assert fixed == pytest.approx(2e-4, rel=1e-9)
    assert rate == pytest.approx(5e8, rel=1e-9)


def test_no_part_is_negative() -> None:
    sizes = np.array([1.0, 2.0, 4.0])
    assert fit_line(sizes, sizes**2)[0] == 0.0
    fixed, rate = fit_line(sizes, [3.0, 2.0, 1.0])
    assert fixed == 2.0
    assert rate == 4.0


def test_one_size_gives_a_rate_alone() -> None:
    assert fit_line([8.0, 8.0], [2.0, 2.0]) == (0.0, 4.0)


def test_small_times_count_as_much_as_large_ones() -> None:
    sizes = np.array([1e3, 1e4, 1e5, 1e9])
    times = 1e-4 + sizes / 1e9
    times[-1] *= 1.2
    assert fit_line(sizes, times)[0] == pytest.approx(1e-4, rel=0.1)
