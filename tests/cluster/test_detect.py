from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import psutil
import pytest

from planner.cluster import Cluster, detect
from planner.cluster.presets import known_links, known_type
from planner.errors import ClusterError
from planner.units import GIB


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_nvidia_gpus", list)
    monkeypatch.setattr(detect, "_amd_gpus", list)


@pytest.mark.usefixtures("no_gpus")
def test_cores_become_gloo_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(detect, "usable_memory_bytes", lambda: 8e9)
    cluster = Cluster.detect(processes=4)
    (group,) = cluster.document.hosts
    assert (group.count, group.devices_per_host, group.compute_slots) == (1, 4, 2.0)
    assert cluster.slowdown.tolist() == [2.0] * 4
    assert cluster.device_types[0].name == "cpu"
    assert cluster.device_types[0].backend == "gloo"
    assert cluster.device_types[0].memory_bytes == 2e9
    assert cluster.ref == "local:4"
    assert Cluster.parse("local").num_devices == 2
    assert Cluster.parse("local:4").fingerprint == cluster.fingerprint


@pytest.mark.usefixtures("no_gpus")
def test_at_least_one_process() -> None:
    with pytest.raises(ClusterError, match="use at least 1"):
        Cluster.detect(0)


def test_cores_and_memory_are_this_machines() -> None:
    assert 0 < detect.usable_cores() <= (os.cpu_count() or 1)
    assert 0 < detect.usable_memory_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_the_cgroup(
    files: dict[str, str],
    cores: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(detect, "_CGROUP", tmp_path)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda _: set(range(16)), raising=False
    )
    assert detect.usable_cores() == (cores or 16.0)


def test_memory_limit_of_the_cgroup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert detect.usable_memory_bytes() == 4e6
    (tmp_path / "memory.max").write_text("max\n")
    assert detect.usable_memory_bytes() > 4e6


def test_detection_works_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "pynvml" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(detect, "_amd_gpus", list)
    assert Cluster.detect(2).device_types[0].name == "cpu"


def fake_nvml(names: list[tuple[str, float]], *, broken: bool = False) -> Any:
    nvml = types.ModuleType("pynvml")
    nvml.__spec__ = ModuleSpec("pynvml", None)

    class NVMLError(Exception):
        pass

    def init() -> None:
        if broken:
            raise NVMLError("driver not loaded")

    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": init,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: len(names),
        "nvmlDeviceGetHandleByIndex": lambda i: i,
        "nvmlDeviceGetName": lambda i: names[i][0],
        "nvmlDeviceGetMemoryInfo": lambda i: types.SimpleNamespace(total=names[i][1]),
        "nvmlDeviceGetNumGpuCores": lambda _: 1000,
        "nvmlDeviceGetMaxClockInfo": lambda _, kind: 1500 if kind == 1 else 1000,
        "nvmlDeviceGetMemoryBusWidth": lambda _: 256,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
    }
    for name, value in functions.items():
        setattr(nvml, name, value)
    return nvml


H100 = ("NVIDIA H100 80GB HBM3", 79.6 * GIB)


def test_known_gpus_get_their_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([H100] * 8))
    cluster = Cluster.detect()
    assert cluster.reference().device_types == {"h100-80": 8}
    assert cluster.link(0, 7)[0] == 450e9
    assert cluster.fingerprint == Cluster.from_preset("dgx-h100").fingerprint
    assert Cluster.detect(3).num_devices == 3
    with pytest.raises(ClusterError, match="shows 8 GPUs"):
        Cluster.detect(9)


@pytest.mark.parametrize(
    ("gpu", "count", "link"),
    [
        (("Tesla V100-SXM2-32GB", 31.7 * GIB), 8, "nvlink2-mesh"),
        (("Tesla V100-SXM3-32GB", 31.7 * GIB), 16, "nvlink2"),
        (("NVIDIA GeForce RTX 4090", 23.6 * GIB), 2, "pcie4"),
        (("NVIDIA GeForce RTX 5090", 31.8 * GIB), 2, "pcie5"),
    ],
)
def test_gpus_are_joined_as_their_machines_join_them(
    gpu: tuple[str, float], count: int, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu] * count))
    assert Cluster.detect().link(0, 1)[0] == known_links()[link].bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("visible", "count"), [("0,3", 2), ("1,9", 1), ("GPU-aa,GPU-bb,GPU-cc", 3)]
)
def test_visible_devices(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([H100] * 4))
    assert Cluster.detect().num_devices == count


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_leave_the_cores(
    visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([H100] * 4))
    monkeypatch.setattr(detect, "_amd_gpus", list)
    assert Cluster.detect(2).device_types[0].name == "cpu"


def test_nvml_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], broken=True))
    monkeypatch.setattr(detect, "_amd_gpus", list)
    assert Cluster.detect(1).device_types[0].name == "cpu"


def test_unknown_and_mixed_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    odd = ("NVIDIA Odd 9000", 12e9)
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([H100, odd, odd]))
    cluster = Cluster.detect()
    assert cluster.reference().device_types == {"h100-80": 1, "odd-9000": 2}
    assert cluster.device_types[1].peak_flops_per_s["float32"] == 3e12
    assert cluster.device_types[1].memory_bandwidth_bytes_per_s == 64e9
    assert cluster.link(0, 1)[0] == 31.5e9


@pytest.mark.parametrize(
    ("name", "memory", "known"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.5 * GIB, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79.2 * GIB, "a100-80"),
        ("NVIDIA GB200", 184 * GIB, "gb200-186"),
        ("NVIDIA B200", 178 * GIB, "b200-180"),
        ("Tesla V100-SXM2-16GB", 15.8 * GIB, "v100-16"),
        ("NVIDIA GeForce RTX 4090", 23.6 * GIB, "rtx4090-24"),
        ("AMD Instinct MI300X", 191.9 * GIB, "mi300x-192"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5 * GIB, None),
        ("NVIDIA GeForce GTX 1080", 8 * GIB, None),
    ],
)
def test_names_of_drivers(name: str, memory: float, known: str | None) -> None:
    found = known_type(name, memory)
    assert (found.name if found else None) == known


def test_planner_cluster_imports_neither_torch_nor_nvml() -> None:
    code = (
        "import sys, planner.cluster\n"
        "bad = {'torch', 'torch.distributed', 'pynvml'} & set(sys.modules)\n"
        "sys.exit(','.join(bad) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
