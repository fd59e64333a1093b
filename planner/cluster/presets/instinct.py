"""AMD's Instinct accelerators but for the MI300X, which is in :mod:`.devices`.

An MI250 or MI250X is two dies, each of which is a device to ROCm and to torch; "-64"
is one of them.
"""

from __future__ import annotations

from planner.cluster.presets.datasheet import MIB, of_datasheet
from planner.cluster.presets.processors import PROCESSORS
from planner.schema.cluster import DeviceType

__all__ = ["INSTINCT"]

_LAUNCH_S = 6e-6  # assumption: HIP launches cost more than CUDA's

_MI50 = of_datasheet(
    "mi50-16",
    "AMD Radeon Instinct MI50 data sheet, 2018",
    float64=6.6,  # AMD MI50 data sheet 2018
    float32=13.3,  # AMD MI50 data sheet 2018
    float16=26.5,  # AMD MI50 data sheet 2018; no matrix cores
    memory_bytes=16368 * MIB,  # assumption: 16 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=1024e9,  # AMD MI50 data sheet 2018
    efficiency=0.7,  # assumption
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI50_32 = _MI50.model_copy(
    update={
        "name": "mi50-32",
        "memory_bytes": 32752 * MIB,  # assumption: 32 GiB less 16 MiB, as MI300X
    }
)
_MI100 = of_datasheet(
    "mi100-32",
    "AMD Instinct MI100 brochure, 2020",
    float64=11.5,  # AMD MI100 brochure 2020
    float32=46.1,  # AMD MI100 brochure 2020, matrix
    bfloat16=92.3,  # AMD MI100 brochure 2020: half of float16
    float16=184.6,  # AMD MI100 brochure 2020
    memory_bytes=32752 * MIB,  # assumption: 32 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=1228.8e9,  # AMD MI100 brochure 2020
    efficiency=0.6,  # assumption: as MI210
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI210 = of_datasheet(
    "mi210-64",
    "AMD Instinct MI210 data sheet, 2022",
    float64=45.3,  # AMD MI210 data sheet 2022, matrix
    float32=45.3,  # AMD MI210 data sheet 2022, matrix
    bfloat16=181,  # AMD MI210 data sheet 2022
    float16=181,  # AMD MI210 data sheet 2022
    memory_bytes=65520 * MIB,  # assumption: 64 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=1638e9,  # AMD MI210 data sheet 2022
    efficiency=0.6,  # assumption
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI250 = of_datasheet(
    "mi250-64",
    "AMD Instinct MI250 data sheet, 2022; one of two dies",
    float64=45.3,  # AMD MI250 data sheet 2022, matrix: 90.5 both
    float32=45.3,  # AMD MI250 data sheet 2022, matrix: 90.5 both
    bfloat16=181,  # AMD MI250 data sheet 2022: 362.1 both
    float16=181,  # AMD MI250 data sheet 2022: 362.1 both
    memory_bytes=65520 * MIB,  # assumption: 64 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=1638e9,  # AMD MI250 data sheet 2022: 3,277 both
    efficiency=0.65,  # assumption
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI250X = _MI250.model_copy(
    update={
        "name": "mi250x-64",
        "processors": PROCESSORS["mi250x"],
        "peak_flops_per_s": {
            "float64": 47.9e12,  # AMD MI250X data sheet 2022, matrix: 95.7 both
            "float32": 47.9e12,  # AMD MI250X data sheet 2022, matrix: 95.7 both
            "bfloat16": 191.5e12,  # AMD MI250X data sheet 2022: 383 both
            "float16": 191.5e12,  # AMD MI250X data sheet 2022: 383 both
        },
        "source": "AMD Instinct MI250X data sheet, 2022; one of two dies",
    }
)
_MI300A = of_datasheet(
    "mi300a-128",
    "AMD Instinct MI300A data sheet, 2023",
    float64=122.6,  # AMD MI300A data sheet 2023, matrix
    float32=122.6,  # AMD MI300A data sheet 2023, matrix
    tensorfloat32=490.3,  # AMD MI300A data sheet 2023
    bfloat16=980.6,  # AMD MI300A data sheet 2023
    float16=980.6,  # AMD MI300A data sheet 2023
    float8_e4m3fn=1961.2,  # AMD MI300A data sheet 2023 (its hardware format is fnuz)
    memory_bytes=131056 * MIB,  # assumption: 128 GiB less 16 MiB; its CPU shares them
    memory_bandwidth_bytes_per_s=5300e9,  # AMD MI300A data sheet 2023
    efficiency=0.5,  # assumption: as MI300X
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI325X = of_datasheet(
    "mi325x-256",
    "AMD Instinct MI325X data sheet, 2024",
    float64=163.4,  # AMD MI325X data sheet 2024, matrix
    float32=163.4,  # AMD MI325X data sheet 2024, matrix
    tensorfloat32=653.7,  # AMD MI325X data sheet 2024
    bfloat16=1307.4,  # AMD MI325X data sheet 2024
    float16=1307.4,  # AMD MI325X data sheet 2024
    float8_e4m3fn=2614.9,  # AMD MI325X data sheet 2024 (its hardware format is fnuz)
    memory_bytes=262128 * MIB,  # assumption: 256 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=6000e9,  # AMD MI325X data sheet 2024
    efficiency=0.5,  # assumption: as MI300X
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI350X = of_datasheet(
    "mi350x-288",
    "AMD Instinct MI350X data sheet, 2025",
    float64=72.1,  # AMD MI350X data sheet 2025, matrix
    float32=144.2,  # AMD MI350X data sheet 2025, vector
    bfloat16=2306.9,  # AMD MI350X data sheet 2025
    float16=2306.9,  # AMD MI350X data sheet 2025
    float8_e4m3fn=4613.7,  # AMD MI350X data sheet 2025
    float4_e2m1fn_x2=9227.5,  # AMD MI350X data sheet 2025
    memory_bytes=294896 * MIB,  # assumption: 288 GiB less 16 MiB, as MI300X
    memory_bandwidth_bytes_per_s=8000e9,  # AMD MI350X data sheet 2025
    efficiency=0.55,  # assumption
    kernel_overhead_s=_LAUNCH_S,
    backend="rccl",
)
_MI355X = _MI350X.model_copy(
    update={
        "name": "mi355x-288",
        "processors": PROCESSORS["mi355x"],
        "peak_flops_per_s": {
            "float64": 78.6e12,  # AMD MI355X data sheet 2025, matrix
            "float32": 157.3e12,  # AMD MI355X data sheet 2025, vector
            "bfloat16": 2516.6e12,  # AMD MI355X data sheet 2025
            "float16": 2516.6e12,  # AMD MI355X data sheet 2025
            "float8_e4m3fn": 5033.2e12,  # AMD MI355X data sheet 2025
            "float4_e2m1fn_x2": 10066.3e12,  # AMD MI355X data sheet 2025
        },
        "source": "AMD Instinct MI355X data sheet, 2025",
    }
)

#: In the order of their generations.
INSTINCT: tuple[DeviceType, ...] = (
    _MI50,
    _MI50_32,
    _MI100,
    _MI210,
    _MI250,
    _MI250X,
    _MI300A,
    _MI325X,
    _MI350X,
    _MI355X,
)
