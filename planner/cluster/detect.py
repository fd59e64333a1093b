"""Describe the machine at hand: its GPUs, or its CPU cores as gloo devices.

Nothing is measured here; numbers that no datasheet gives are estimates until
``meshwright probe`` replaces them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

from planner.cluster.documents import whole_number
from planner.cluster.presets import known_links, known_type
from planner.errors import ClusterError
from planner.schema.cluster import (
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)

__all__ = [
    "cpu_device_type",
    "detect_document",
    "usable_cores",
    "usable_memory_bytes",
]

_LOG = logging.getLogger(__name__)
_CGROUP = Path("/sys/fs/cgroup")
_NVLINK_OF = {
    "v100": "nvlink2",
    "a100": "nvlink3",
    "h100": "nvlink4",
    "h200": "nvlink4",
    "b200": "nvlink5",
    "b300": "nvlink5",
    "gb200": "nvlink5",
    "gb300": "nvlink5",
    "mi300x": "infinity-fabric",
}
#: Between two gloo processes of one machine; an estimate: TCP over loopback.
_LOOPBACK = Link(
    name="loopback",
    bandwidth_bytes_per_s=1e9,
    latency_s=60e-6,
    source="estimate; measure it with meshwright probe",
)


def detect_document(processes: int | None = None) -> ClusterDocument:
    """Describe this machine; see :meth:`planner.cluster.Cluster.detect`."""
    if processes is not None:
        processes = whole_number("processes", processes)
    gpus = _nvidia_gpus() or _amd_gpus()
    if gpus:
        if processes is not None and processes > len(gpus):
            raise ClusterError(
                f"processes={processes}, but this machine shows {len(gpus)} GPUs; use "
                f"at most {len(gpus)}, or hide them with CUDA_VISIBLE_DEVICES= to use "
                f"CPU cores"
            )
        return _gpu_document(gpus[:processes])
    cores = usable_cores()
    count = processes if processes is not None else max(1, int(cores))
    device = cpu_device_type(usable_memory_bytes() / count)
    group = HostGroup(
        name="this machine",
        count=1,
        devices_per_host=count,
        device=device.name,
        link=_LOOPBACK,
        compute_slots=cores if cores < count else None,
    )
    return ClusterDocument(
        name="local",
        device_types=(device,),
        hosts=(group,),
        calibration="estimate",
        source="detected",
    )


# -- CPU -------------------------------------------------------------------------


def usable_cores() -> float:
    """CPU cores that this process may use: affinity, and the quota of its cgroup."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota = _cgroup_cores()
    return min(cores, quota) if quota else cores


def _cgroup_cores() -> float | None:
    text = _read(_CGROUP / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else float(quota) / float(period)
    quota = _read(_CGROUP / "cpu" / "cpu.cfs_quota_us")
    period = _read(_CGROUP / "cpu" / "cpu.cfs_period_us")
    if quota and period and float(quota) > 0:
        return float(quota) / float(period)
    return None


def usable_memory_bytes() -> float:
    """Memory that can still be allocated by the system and the cgroup."""
    free = float(psutil.virtual_memory().available)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _read(_CGROUP / limit), _read(_CGROUP / used)
        if most and now and most != "max":
            free = min(free, max(0.0, float(most) - float(now)))
    # A full cgroup still says so with a positive number, which documents require.
    return max(free, 1.0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def cpu_device_type(memory_bytes: float) -> DeviceType:
    """Estimate one process on one core from its clock and vector width.

    Args:
        memory_bytes: Bytes that the process can allocate.
    """
    per_cycle, bfloat16 = _vector_width()
    clock = psutil.cpu_freq() if hasattr(psutil, "cpu_freq") else None
    hertz = max(clock.current, clock.max) * 1e6 if clock else 0.0
    if hertz < 1e9:
        hertz = 2.5e9  # virtual machines often hide the clock
    peak = per_cycle * hertz
    return DeviceType(
        name="cpu",
        peak_flops_per_s={"float32": peak, "bfloat16": peak * bfloat16},
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e10,
        matmul_efficiency=0.7,
        half_efficiency_flops=1e6,
        kernel_overhead_s=5e-6,
        backend="gloo",
        source="estimate; measure it with meshwright probe",
    )


def _vector_width() -> tuple[float, float]:
    """FLOPs of float32 a core does per cycle, and bfloat16 relative to it."""
    flags = set()
    for line in _read_text("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags = set(line.partition(":")[2].split())
            break
    if "avx512f" in flags:
        width = 64.0  # two 16-lane fused multiply-adds
    elif "avx2" in flags or platform.machine().lower() in {"amd64", "x86_64"}:
        width = 32.0  # two 8-lane fused multiply-adds
    else:
        width = 16.0  # two 4-lane fused multiply-adds, as NEON has
    if "amx_bf16" in flags:
        return width, 8.0
    return width, 2.0 if "avx512_bf16" in flags else 1.0


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# -- GPUs ------------------------------------------------------------------------


def _nvidia_gpus() -> list[DeviceType]:
    """GPUs that NVML shows and CUDA_VISIBLE_DEVICES leaves visible."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _LOG.debug("NVML shows no GPU: %s", error)
        return []
    try:
        count = int(nvml.nvmlDeviceGetCount())
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        return [_nvidia_type(nvml, handles[i]) for i in _visible(count)]
    finally:
        nvml.nvmlShutdown()


def _visible(count: int) -> Iterable[int]:
    """Indices of GPUs that CUDA would show."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return range(count)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if all(name.isdigit() for name in names):
        return [int(name) for name in names if int(name) < count]
    if any(name.startswith("-") for name in names):
        return []
    # UUIDs: which GPU is which does not matter, how many does.
    return range(min(len(names), count))


def _nvidia_type(nvml: Any, handle: Any) -> DeviceType:
    name = nvml.nvmlDeviceGetName(handle)
    text = name.decode() if isinstance(name, bytes) else str(name)
    memory = float(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    known = known_type(text, memory)
    if known is not None:
        return known
    cores = float(nvml.nvmlDeviceGetNumGpuCores(handle))
    clock = float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)) * 1e6
    bus = float(nvml.nvmlDeviceGetMemoryBusWidth(handle))
    transfer = float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)) * 2e6
    peak = 2 * cores * clock
    return DeviceType(
        name=text.lower().removeprefix("nvidia ").replace(" ", "-"),
        # Matrix units do at least twice the float32 rate since Volta.
        peak_flops_per_s={"float32": peak, "bfloat16": 2 * peak, "float16": 2 * peak},
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=bus / 8 * transfer,
        source="NVML: cores, clock and bus width; measure it with meshwright probe",
    )


def _amd_gpus() -> list[DeviceType]:
    """GPUs that a ROCm build of torch shows."""
    # Without the kernel driver's device there is no GPU, and torch need not load.
    if not Path("/dev/kfd").exists() or importlib.util.find_spec("torch") is None:
        return []
    torch: Any = importlib.import_module("torch")
    if not torch.version.hip or not torch.cuda.is_available():
        return []
    return [
        _amd_type(torch.cuda.get_device_properties(index))
        for index in range(torch.cuda.device_count())
    ]


def _amd_type(properties: Any) -> DeviceType:
    memory = float(properties.total_memory)
    known = known_type(properties.name, memory)
    if known is not None:
        return known
    # 128 lanes a compute unit at 2 GHz; matrix units do at least twice that.
    peak = 2 * 128 * 2e9 * float(properties.multi_processor_count)
    return DeviceType(
        name=str(properties.name).lower().replace(" ", "-"),
        peak_flops_per_s={"float32": peak, "bfloat16": 2 * peak, "float16": 2 * peak},
        memory_bytes=memory,
        memory_bandwidth_bytes_per_s=1e12,
        processors=int(properties.multi_processor_count),
        backend="rccl",
        source="estimate; measure it with meshwright probe",
    )


def _inside(device: DeviceType, count: int) -> str:
    """Name of the link between the GPUs of one kind in a machine."""
    kind = device.name.rpartition("-")[0]
    if kind == "v100" and count <= 8:
        # A switch came with the 16 of DGX-2; 8 are a cube mesh.
        return "nvlink2-mesh"
    plugged = "pcie5" if device.name.startswith("rtx5090") else "pcie4"
    return _NVLINK_OF.get(kind, plugged)


def _gpu_document(gpus: list[DeviceType]) -> ClusterDocument:
    links = known_links()
    groups = []
    for device, run in groupby(gpus, key=lambda gpu: gpu):
        count = len(list(run))
        groups.append(
            HostGroup(
                name="this machine",
                count=1,
                devices_per_host=count,
                device=device.name,
                link=links[_inside(device, count)],
                memory_bytes=usable_memory_bytes(),
            )
        )
    types = {device.name: device for device in gpus}
    return ClusterDocument(
        name="local",
        device_types=tuple(types.values()),
        hosts=tuple(groups),
        # GPUs of several kinds in one machine: each kind a host, joined by PCIe.
        levels=(Level(name="PCIe", link=links["pcie4"]),) if len(groups) > 1 else (),
        source="detected",
    )
