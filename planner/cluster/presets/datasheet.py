"""A device type made of what a datasheet says and of the defaults that it does not."""

from __future__ import annotations

from typing import Literal

from planner.cluster.presets.processors import PROCESSORS
from planner.schema.cluster import DeviceType

__all__ = ["MIB", "of_datasheet"]

MIB = 2**20
_TERA = 1e12
_FILL_S = 3e-6  # assumption


def of_datasheet(
    name: str,
    source: str,
    *,
    memory_bytes: float,
    memory_bandwidth_bytes_per_s: float,
    efficiency: float,
    kernel_overhead_s: float = 4e-6,  # assumption
    backend: Literal["nccl", "gloo", "rccl"] = "nccl",
    **teraflops: float,
) -> DeviceType:
    """An accelerator by its printed numbers.

    Args:
        name: The chip and its memory in GB: ``"h100-80"``.
        source: Where the numbers are from.
        memory_bytes: What the driver reports as total.
        memory_bandwidth_bytes_per_s: Reads plus writes.
        efficiency: Share of the peak that a very large matrix product reaches.
        kernel_overhead_s: Time that one op costs whatever its size.
        backend: Communication backend.
        teraflops: dtype to dense peak, 10^12 FLOP/s.
    """
    peaks = {dtype: value * _TERA for dtype, value in teraflops.items()}
    best = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    return DeviceType(
        name=name,
        peak_flops_per_s=peaks,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        matmul_efficiency=efficiency,
        half_efficiency_flops=best * efficiency * _FILL_S,
        kernel_overhead_s=kernel_overhead_s,
        processors=PROCESSORS.get(name.rpartition("-")[0]),
        backend=backend,
        source=source,
    )
