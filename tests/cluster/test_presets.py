from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from planner.cluster import Cluster, cluster_names, device_type, device_type_names
from planner.errors import ClusterError, PlanFileError, UnknownNameError
from planner.schema.cluster import ClusterDocument
from planner.units import GIB

DATA = os.environ.get("MESHWRIGHT_DATA", "")
needs_dtfm = pytest.mark.skipif(
    not Path(DATA, "dtfm").is_dir() or not DATA,
    reason="MESHWRIGHT_DATA does not name a folder that holds dtfm/",
)
NAMES = [name for name in cluster_names() if not name.startswith("dtfm")]


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_loads_and_is_plausible(name: str) -> None:
    cluster = Cluster.from_preset(name)
    document = cluster.document
    assert ClusterDocument.from_json(document.to_json()) == document
    assert document.source
    assert cluster.describe()["name"]
    for device in cluster.device_types:
        assert device.source
        assert 10 * GIB < device.memory_bytes < 300 * GIB
        assert 5e11 < device.memory_bandwidth_bytes_per_s < 1e13
        rates = device.peak_flops_per_s
        # Halving the width never makes a chip slower.
        order = ["float32", "tensorfloat32", "bfloat16", "float8_e4m3fn"]
        known = [rates[dtype] for dtype in order if dtype in rates]
        assert known == sorted(known)
        ridge = rates.get("bfloat16", rates["float16"])
        assert 50 < ridge / device.memory_bandwidth_bytes_per_s < 500
    if name != "ramp":
        many = Cluster.from_preset(name, nodes=3)
        assert many.num_devices == 3 * cluster.num_devices
        outside = many.link(0, many.num_devices - 1)[0]
        assert outside <= many.link(0, 1)[0]


@pytest.mark.parametrize(
    ("name", "dtype", "rate"),
    [
        ("v100-32", "float16", 125e12),  # NVIDIA V100 datasheet 2020
        ("a100-80", "bfloat16", 312e12),  # NVIDIA A100 datasheet 2021
        ("a100-80", "tensorfloat32", 156e12),  # NVIDIA A100 datasheet 2021
        ("h100-80", "bfloat16", 989.4e12),  # NVIDIA H100 whitepaper 2023, dense
        ("h100-80", "float8_e4m3fn", 1978.9e12),  # NVIDIA H100 whitepaper 2023, dense
        ("b200-180", "bfloat16", 2250e12),  # NVIDIA HGX B200 page 2025, dense
        ("mi300x-192", "bfloat16", 1307.4e12),  # AMD MI300X data sheet 2023
        ("rtx4090-24", "bfloat16", 165.2e12),  # NVIDIA Ada whitepaper 2023
    ],
)
def test_peaks_are_dense(name: str, dtype: str, rate: float) -> None:
    assert device_type(name).peak_flops_per_s[dtype] == pytest.approx(rate)


def test_v100_has_no_bfloat16() -> None:
    assert "bfloat16" not in device_type("v100-32").peak_flops_per_s


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [
        ("dgx-v100", 150e9 / 7, 6.25e9),  # no switch
        ("dgx2-v100", 150e9, 6.25e9),
        ("dgx-a100", 300e9, 25e9),
        ("dgx-h100", 450e9, 50e9),
        ("dgx-b200", 900e9, 50e9),
        ("dgx-b300", 900e9, 100e9),
        ("gb200-nvl72", 900e9, 50e9),
        ("gb300-nvl72", 900e9, 100e9),
        ("a40-pcie", 31.5e9, 3.125e9),
    ],
)
def test_links_are_per_device_and_direction(
    name: str, inside: float, outside: float
) -> None:
    cluster = Cluster.from_preset(name, nodes=2)
    assert cluster.link(0, 1)[0] == inside
    assert cluster.link(0, cluster.num_devices - 1)[0] == outside


def test_pcs_over_ethernet() -> None:
    assert Cluster.from_preset("rtx4090-pc", 2).link(0, 1) == (1.25e9, 20e-6)
    assert Cluster.from_preset("rtx4090-pc-1gbe", 2).link(0, 1) == (0.125e9, 55e-6)


def test_ramp_is_the_cluster_of_pacml() -> None:
    ramp = Cluster.from_preset("ramp")
    assert ramp.num_devices == 32
    assert ramp.document.topology == "ramp"
    assert ramp.device_types[0].memory_bytes == 80e9
    for a, b in ((0, 1), (0, 2), (0, 8), (5, 31)):
        bandwidth, latency = ramp.link(a, b)
        assert bandwidth == 4e11
        # A one-to-one message of 1e9 B takes 2.500 ms (Parsonson et al. 2023).
        assert latency + 1e9 / bandwidth == pytest.approx(2.500e-3, abs=5e-7)
    sizes = [len(np.unique(domain)) for domain in ramp.topology.domains]
    assert sizes == [32, 16, 4, 1]


def test_names_and_nearest() -> None:
    assert set(device_type_names()) >= {"h100-80", "mi300x-192"}
    with pytest.raises(UnknownNameError, match="did you mean 'h100-80'"):
        device_type("h100-8")
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        Cluster.from_preset("dgx-h1000")
    with pytest.raises(ClusterError, match="at least 1"):
        Cluster.from_preset("dgx-h100", nodes=0)


def test_dtfm_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)
    with pytest.raises(ClusterError, match="set MESHWRIGHT_DATA"):
        Cluster.from_preset("dtfm-1")
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    with pytest.raises(ClusterError, match="has no folder dtfm"):
        Cluster.from_preset("dtfm-1")
    (tmp_path / "dtfm").mkdir()
    with pytest.raises(PlanFileError, match="cannot read the matrix"):
        Cluster.from_preset("dtfm-1")


@needs_dtfm
@pytest.mark.parametrize(
    ("name", "stem", "hosts"),
    [
        ("dtfm-1", "sched_case1_datacenter", 8),
        ("dtfm-2", "sched_case2_spot", 40),
        ("dtfm-3", "sched_case3_multi_dc", 64),
        ("dtfm-4", "sched_case4_regional", 64),
        ("dtfm-5", "sched_case5_worldwide", 64),
    ],
)
def test_dtfm_equals_its_matrices(name: str, stem: str, hosts: int) -> None:
    cluster = Cluster.from_preset(name)
    folder = Path(DATA, "dtfm")
    gbits = np.loadtxt(folder / f"{stem}_bandwidth_gbps.csv", delimiter=",")
    delay = np.loadtxt(folder / f"{stem}_delay_ms.csv", delimiter=",")
    assert cluster.num_devices == 64
    assert len(np.unique(cluster.host_of_device)) == hosts
    for a in range(64):
        for b in range(64):
            if a != b:
                bandwidth, latency = cluster.link(a, b)
                assert bandwidth == pytest.approx(gbits[a, b] * 1e9 / 8, rel=1e-12)
                assert latency == pytest.approx(delay[a, b] / 1000, rel=1e-12)
