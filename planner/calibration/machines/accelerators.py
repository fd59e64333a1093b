"""Accelerators that measurements are published for and that Meshwright cannot drive.

They are no presets, because a plan for them could not be run. ``backend`` says nccl: a
library of collectives that runs on the device, as theirs do. Memory is what the maker
prints; what a driver reports is not known.
"""

from __future__ import annotations

from planner.cluster.presets import of_datasheet
from planner.schema.cluster import DeviceType
from planner.units import GIB

__all__ = ["ACCELERATORS"]

_TPU_V2 = of_datasheet(
    "tpuv2-16",
    "Jouppi et al. 2020, table 3; a device is a chip of two cores",
    bfloat16=46,  # Jouppi et al. 2020
    memory_bytes=16 * GIB,  # Jouppi et al. 2020
    memory_bandwidth_bytes_per_s=700e9,  # Jouppi et al. 2020
    efficiency=0.7,  # assumption
)
_TPU_V3 = of_datasheet(
    "tpuv3-32",
    "Jouppi et al. 2020, table 3; a device is a chip of two cores",
    bfloat16=123,  # Jouppi et al. 2020
    memory_bytes=32 * GIB,  # Jouppi et al. 2020
    memory_bandwidth_bytes_per_s=900e9,  # Jouppi et al. 2020
    efficiency=0.7,  # assumption
)
_TPU_V4 = of_datasheet(
    "tpuv4-32",
    "Google Cloud, TPU v4 page, 2026; a device is a chip",
    bfloat16=275,  # Google Cloud TPU v4 page 2026
    memory_bytes=32 * GIB,  # Google Cloud TPU v4 page 2026
    memory_bandwidth_bytes_per_s=1228e9,  # Google Cloud TPU v4 page 2026
    efficiency=0.8,  # assumption
)
_TPU_V5E = of_datasheet(
    "tpuv5e-16",
    "Google Cloud, TPU v5e page, 2026; a device is a chip",
    bfloat16=197,  # Google Cloud TPU v5e page 2026
    memory_bytes=16e9,  # Google Cloud TPU v5e page 2026
    memory_bandwidth_bytes_per_s=819e9,  # Google Cloud TPU v5e page 2026
    efficiency=0.8,  # assumption
)
_TPU_V5P = of_datasheet(
    "tpuv5p-95",
    "Google Cloud, TPU v5p page, 2026; a device is a chip",
    bfloat16=459,  # Google Cloud TPU v5p page 2026
    memory_bytes=95e9,  # Google Cloud TPU v5p page 2026
    memory_bandwidth_bytes_per_s=2765e9,  # Google Cloud TPU v5p page 2026
    efficiency=0.8,  # assumption
)
_TPU_V6E = of_datasheet(
    "tpuv6e-32",
    "Google Cloud, TPU v6e page, 2026; a device is a chip",
    bfloat16=918,  # Google Cloud TPU v6e page 2026
    memory_bytes=32e9,  # Google Cloud TPU v6e page 2026
    memory_bandwidth_bytes_per_s=1638e9,  # Google Cloud TPU v6e page 2026
    efficiency=0.75,  # assumption
)
_TPU_V7 = of_datasheet(
    "tpuv7-192",
    "Google Cloud, Ironwood page, 2025; a device is a chip",
    bfloat16=2307,  # Google Cloud Ironwood page 2025: half of FP8
    float8_e4m3fn=4614,  # Google Cloud Ironwood page 2025
    memory_bytes=192e9,  # Google Cloud Ironwood page 2025
    memory_bandwidth_bytes_per_s=7370e9,  # Google Cloud Ironwood page 2025
    efficiency=0.75,  # assumption
)
_GAUDI2 = of_datasheet(
    "gaudi2-96",
    "Intel Gaudi 2 as compared with its successor, 2024",
    bfloat16=432,  # Intel Gaudi 3 white paper 2024
    float8_e4m3fn=865,  # Intel Gaudi 3 white paper 2024
    memory_bytes=96e9,  # Intel Gaudi 2 white paper 2022
    memory_bandwidth_bytes_per_s=2450e9,  # Intel Gaudi 2 white paper 2022
    efficiency=0.8,  # assumption
)
_GAUDI3 = of_datasheet(
    "gaudi3-128",
    "Intel Gaudi 3 white paper, 2024",
    bfloat16=1835,  # Intel Gaudi 3 white paper 2024
    float8_e4m3fn=1835,  # Intel Gaudi 3 white paper 2024
    memory_bytes=128e9,  # Intel Gaudi 3 white paper 2024
    memory_bandwidth_bytes_per_s=3670e9,  # Intel Gaudi 3 white paper 2024
    efficiency=0.6,  # assumption
)
_MAX1550 = of_datasheet(
    "max1550-128",
    "Intel Max series, 128 Xe cores, 2023; a device is a card of two stacks",
    float32=52.4,  # 128 cores x 256 FLOPs x 1.6 GHz, Intel technical overview 2024
    bfloat16=838.9,  # 128 cores x 4096 FLOPs x 1.6 GHz, Intel technical overview 2024
    float16=838.9,  # likewise, Intel technical overview 2024
    memory_bytes=128e9,  # Intel technical overview 2024
    memory_bandwidth_bytes_per_s=3276.8e9,  # Intel ARK 2023
    efficiency=0.64,  # ALCF, Aurora 2024: 263 to 273 TFLOP/s a stack
)
_MAX1100 = of_datasheet(
    "max1100-48",
    "Intel Max series, 56 Xe cores, 2023",
    float32=22.2,  # 56 cores x 256 FLOPs x 1.55 GHz, Intel technical overview 2024
    bfloat16=355.5,  # 56 cores x 4096 FLOPs x 1.55 GHz, Intel technical overview 2024
    float16=355.5,  # likewise, Intel technical overview 2024
    memory_bytes=48e9,  # Intel technical overview 2024
    memory_bandwidth_bytes_per_s=1228.8e9,  # Intel ARK 2023
    efficiency=0.64,  # assumption: as its larger sibling
)
_ASCEND_910 = of_datasheet(
    "ascend910-32",
    "Huawei Ascend 910 at Hot Chips, 2019",
    float16=256,  # Huawei at Hot Chips 2019
    memory_bytes=32 * GIB,  # Huawei at Hot Chips 2019
    memory_bandwidth_bytes_per_s=1200e9,  # Huawei at Hot Chips 2019
    efficiency=0.65,  # assumption
)
_ASCEND_910B = of_datasheet(
    "ascend910b-64",
    "Ascend 910B as published by others, 2024; its variants have 280 to 376 TFLOP/s",
    bfloat16=320,  # boardor.com, "Huawei Ascend 910B", 2024
    float16=320,  # boardor.com, "Huawei Ascend 910B", 2024
    memory_bytes=64 * GIB,  # boardor.com, "Huawei Ascend 910B", 2024
    memory_bandwidth_bytes_per_s=1600e9,  # assumption: sources differ, 0.4 to 1.6 TB/s
    efficiency=0.65,  # assumption
)
_TRAINIUM1 = of_datasheet(
    "trainium1-32",
    "AWS Neuron documentation, 2023; a device is a chip of two cores",
    float32=47.5,  # AWS Neuron documentation 2023
    bfloat16=190,  # AWS Neuron documentation 2023
    float16=190,  # AWS Neuron documentation 2023
    memory_bytes=32 * GIB,  # AWS Neuron documentation 2023
    memory_bandwidth_bytes_per_s=820e9,  # AWS Neuron documentation 2023
    efficiency=0.7,  # assumption
)
_TRAINIUM2 = of_datasheet(
    "trainium2-96",
    "AWS Neuron documentation, 2025; a device is a chip of eight cores",
    float32=181,  # AWS Neuron documentation 2025
    bfloat16=667,  # AWS Neuron documentation 2025
    float16=667,  # AWS Neuron documentation 2025
    float8_e4m3fn=1299,  # AWS Neuron documentation 2025
    memory_bytes=96 * GIB,  # AWS Neuron documentation 2025
    memory_bandwidth_bytes_per_s=2900e9,  # AWS Neuron documentation 2025
    efficiency=0.7,  # assumption
)
_TRAINIUM3 = of_datasheet(
    "trainium3-144",
    "AWS Neuron documentation, 2025; a device is a chip of eight cores",
    float32=183,  # AWS Neuron documentation 2025
    bfloat16=671,  # AWS Neuron documentation 2025
    float16=671,  # AWS Neuron documentation 2025
    float8_e4m3fn=2517,  # AWS Neuron documentation 2025
    memory_bytes=144 * GIB,  # AWS Neuron documentation 2025
    memory_bandwidth_bytes_per_s=4900e9,  # AWS Neuron documentation 2025
    efficiency=0.7,  # assumption
)

#: By name.
ACCELERATORS: dict[str, DeviceType] = {
    device.name: device
    for device in (
        _TPU_V2,
        _TPU_V3,
        _TPU_V4,
        _TPU_V5E,
        _TPU_V5P,
        _TPU_V6E,
        _TPU_V7,
        _GAUDI2,
        _GAUDI3,
        _MAX1550,
        _MAX1100,
        _ASCEND_910,
        _ASCEND_910B,
        _TRAINIUM1,
        _TRAINIUM2,
        _TRAINIUM3,
    )
}
