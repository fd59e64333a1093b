"""Accelerators by name, with their numbers from datasheets.

Here are those that machines among the presets have; in :mod:`.cards` the variants,
cards and older chips of servers that measurements are published for, in
:mod:`.desktop` those of desktops and workstations, in :mod:`.instinct` AMD's.

Rates are dense (a datasheet that gives them with 2:4 sparsity is halved). Memory is
what the driver reports (``memory.total`` of nvidia-smi), the least where drivers
differ: ECC on GDDR6 costs a sixteenth, and "288 GB" of HBM show as 269 GiB or 278 GiB.
A CUDA process sees up to 1.5 % less still; nothing is taken off for that, for its
context or for fragmentation: ``memory_fraction`` of a plan does it.

``matmul_efficiency`` and what follows are not on datasheets. They are defaults for
large bf16 products as cuBLAS and its like reach them, good to perhaps 15 %;
``meshwright probe`` measures them. ``half_efficiency_flops`` is what a chip computes in
about 3 us at its sustained rate, the time in which the waves of tiles of a product fill
and drain.
"""

from __future__ import annotations

from planner.cluster.presets.cards import CARDS
from planner.cluster.presets.datasheet import MIB, of_datasheet
from planner.cluster.presets.desktop import DESKTOP
from planner.cluster.presets.instinct import INSTINCT
from planner.errors import UnknownNameError
from planner.schema.cluster import DeviceType

__all__ = ["device_type", "device_type_names"]

_V100 = of_datasheet(
    "v100-32",
    "NVIDIA V100 datasheet, 2020",
    float64=7.8,  # NVIDIA V100 datasheet 2020
    float32=15.7,  # NVIDIA V100 datasheet 2020
    float16=125,  # NVIDIA V100 datasheet 2020, tensor cores; it has no bfloat16
    memory_bytes=32510 * MIB,  # nvidia-smi, seen 2026; 32768 with reserved
    memory_bandwidth_bytes_per_s=900e9,  # NVIDIA V100 datasheet 2020
    efficiency=0.75,  # assumption: 90 to 100 TFLOP/s before power limits
)
_A100_40 = of_datasheet(
    "a100-40",
    "NVIDIA A100 datasheet, 2021",
    float64=19.5,  # NVIDIA A100 datasheet 2021, tensor cores
    float32=19.5,  # NVIDIA A100 datasheet 2021
    tensorfloat32=156,  # NVIDIA A100 datasheet 2021
    bfloat16=312,  # NVIDIA A100 datasheet 2021
    float16=312,  # NVIDIA A100 datasheet 2021
    memory_bytes=40536 * MIB,  # nvidia-smi, seen 2026; 40960 with reserved
    memory_bandwidth_bytes_per_s=1555e9,  # NVIDIA A100 datasheet 2021
    efficiency=0.82,  # assumption: about 255 TFLOP/s on large products
)
_A100_80 = _A100_40.model_copy(
    update={
        "name": "a100-80",
        "memory_bytes": 81251 * MIB,  # nvidia-smi, seen 2026; 81920 with reserved
        "memory_bandwidth_bytes_per_s": 2039e9,  # NVIDIA A100 datasheet 2021, SXM
    }
)
_H100 = of_datasheet(
    "h100-80",
    "NVIDIA H100 whitepaper, 2023, SXM5: dense rates",
    float64=66.9,  # NVIDIA H100 whitepaper 2023, tensor cores
    float32=66.9,  # NVIDIA H100 whitepaper 2023
    tensorfloat32=494.7,  # NVIDIA H100 whitepaper 2023: 989.4 sparse
    bfloat16=989.4,  # NVIDIA H100 whitepaper 2023: 1,978.9 sparse
    float16=989.4,  # NVIDIA H100 whitepaper 2023: 1,978.9 sparse
    float8_e4m3fn=1978.9,  # NVIDIA H100 whitepaper 2023: 3,957.8 sparse
    memory_bytes=81559 * MIB,  # nvidia-smi, seen 2026: "80 GB"
    memory_bandwidth_bytes_per_s=3350e9,  # NVIDIA H100 datasheet 2023, SXM
    efficiency=0.75,  # assumption: 740 TFLOP/s before power lowers the clock
)
_H200 = _H100.model_copy(
    update={
        "name": "h200-141",
        "memory_bytes": 143771 * MIB,  # nvidia-smi, seen 2026: "141 GB"
        "memory_bandwidth_bytes_per_s": 4800e9,  # NVIDIA H200 datasheet 2024, SXM
        "source": "NVIDIA H200 datasheet, 2024; rates: NVIDIA H100 whitepaper, 2023",
    }
)
_B200 = of_datasheet(
    "b200-180",
    "NVIDIA HGX B200 page, 2025; a GPU is 1/8 board; rates with sparsity halved",
    float64=37,  # NVIDIA HGX B200 page 2025: 296 a board
    float32=75,  # NVIDIA HGX B200 page 2025: 600 a board
    tensorfloat32=1125,  # NVIDIA HGX B200 page 2025: 18,000 a board, sparse
    bfloat16=2250,  # NVIDIA HGX B200 page 2025: 36,000 a board, sparse
    float16=2250,  # NVIDIA HGX B200 page 2025: 36,000 a board, sparse
    float8_e4m3fn=4500,  # NVIDIA HGX B200 page 2025: 72,000 a board, sparse
    float4_e2m1fn_x2=9000,  # NVIDIA HGX B200 page 2025: 144,000 a board, sparse
    memory_bytes=183359 * MIB,  # nvidia-smi, seen 2026: "180 GB"
    memory_bandwidth_bytes_per_s=7700e9,  # NVIDIA Blackwell brief V2.1 2025, table 3
    efficiency=0.75,  # assumption: as H100, about 1,700 TFLOP/s
)
_GB200 = of_datasheet(
    "gb200-186",
    "NVIDIA GB200 NVL72 page, 2025; a GPU is 1/72; rates with sparsity halved",
    float64=40,  # NVIDIA GB200 NVL72 page 2025: 2,880 a rack
    float32=80,  # NVIDIA GB200 NVL72 page 2025: 5,760 a rack
    tensorfloat32=1250,  # NVIDIA GB200 NVL72 page 2025: 180,000 a rack, sparse
    bfloat16=2500,  # NVIDIA GB200 NVL72 page 2025: 360,000 a rack, sparse
    float16=2500,  # NVIDIA GB200 NVL72 page 2025: 360,000 a rack, sparse
    float8_e4m3fn=5000,  # NVIDIA GB200 NVL72 page 2025: 720,000 a rack, sparse
    float4_e2m1fn_x2=10000,  # NVIDIA GB200 NVL72 page 2025: 720,000 a rack, dense
    memory_bytes=189471 * MIB,  # nvidia-smi, seen 2026: "186 GB"
    memory_bandwidth_bytes_per_s=8000e9,  # NVIDIA GB200 NVL72 page 2025: 576 TB/s
    efficiency=0.75,  # assumption: as B200
)
_B300 = of_datasheet(
    "b300-270",
    "NVIDIA HGX B300 page, 2025; a GPU is 1/8; rates with sparsity halved",
    float64=1.25,  # NVIDIA HGX B300 page 2025: 10 a board
    float32=75,  # NVIDIA HGX B300 page 2025: 600 a board
    tensorfloat32=1125,  # NVIDIA HGX B300 page 2025: 18,000 a board, sparse
    bfloat16=2250,  # NVIDIA HGX B300 page 2025: 36,000 a board, sparse
    float16=2250,  # NVIDIA HGX B300 page 2025: 36,000 a board, sparse
    float8_e4m3fn=4500,  # NVIDIA HGX B300 page 2025: 72,000 a board, sparse
    float4_e2m1fn_x2=13500,  # NVIDIA HGX B300 page 2025: 108,000 a board, dense
    memory_bytes=275040 * MIB,  # nvidia-smi, seen 2026: "270 GB", of 288 GB of HBM
    memory_bandwidth_bytes_per_s=7700e9,  # NVIDIA Blackwell brief V2.1 2025, table 3
    efficiency=0.75,  # assumption: as B200
)
_GB300 = of_datasheet(
    "gb300-279",
    "NVIDIA GB300 NVL72 page, 2025; a GPU is 1/72; rates with sparsity halved",
    float64=1.39,  # NVIDIA GB300 NVL72 page 2025: 100 a rack, rounded
    float32=80,  # Verda, "GB300 NVL72: GPU Architecture & Performance", 2025
    tensorfloat32=1250,  # NVIDIA GB300 NVL72 page 2025: 180,000 a rack, sparse
    bfloat16=2500,  # NVIDIA GB300 NVL72 page 2025: 360,000 a rack, sparse
    float16=2500,  # NVIDIA GB300 NVL72 page 2025: 360,000 a rack, sparse
    float8_e4m3fn=5000,  # NVIDIA GB300 NVL72 page 2025: 720,000 a rack, sparse
    float4_e2m1fn_x2=15000,  # NVIDIA GB300 NVL72 page 2025: 1,080,000 a rack, dense
    memory_bytes=284208 * MIB,  # nvidia-smi, seen 2026: "279 GB", of 288 GB of HBM
    memory_bandwidth_bytes_per_s=8000e9,  # NVIDIA GB300 NVL72 page 2025: 576 TB/s
    efficiency=0.75,  # assumption: as B200
)
_MI300X = of_datasheet(
    "mi300x-192",
    "AMD Instinct MI300X data sheet, 2023",
    float64=163.4,  # AMD MI300X data sheet 2023, matrix
    float32=163.4,  # AMD MI300X data sheet 2023, matrix
    tensorfloat32=653.7,  # AMD MI300X data sheet 2023
    bfloat16=1307.4,  # AMD MI300X data sheet 2023
    float16=1307.4,  # AMD MI300X data sheet 2023
    float8_e4m3fn=2614.9,  # AMD MI300X data sheet 2023 (its hardware format is fnuz)
    memory_bytes=196592 * MIB,  # rocm-smi, seen 2026: "192 GB"
    memory_bandwidth_bytes_per_s=5300e9,  # AMD MI300X data sheet 2023
    efficiency=0.5,  # assumption: 600 to 700 TFLOP/s, the clock falls under load
    kernel_overhead_s=6e-6,  # assumption: HIP launches cost more than CUDA's
    backend="rccl",
)
_A40 = of_datasheet(
    "a40-48",
    "NVIDIA A40 datasheet, 2021",
    float32=37.4,  # NVIDIA A40 datasheet 2021
    tensorfloat32=74.8,  # NVIDIA A40 datasheet 2021
    bfloat16=149.7,  # NVIDIA A40 datasheet 2021
    float16=149.7,  # NVIDIA A40 datasheet 2021
    memory_bytes=46068 * MIB,  # nvidia-smi, seen 2026: "48 GB" less ECC
    memory_bandwidth_bytes_per_s=696e9,  # NVIDIA A40 datasheet 2021
    efficiency=0.7,  # assumption: 300 W hold the clock below boost
)
_L40S = of_datasheet(
    "l40s-48",
    "NVIDIA L40S datasheet, 2023",
    float32=91.6,  # NVIDIA L40S datasheet 2023
    tensorfloat32=183,  # NVIDIA L40S datasheet 2023: 366 sparse
    # The sheet prints 362.05 as the dense 16-bit rate, which fits neither its sparse
    # rate nor its FP8 rate nor 142 SMs x 1024 FLOPs x 2.52 GHz.
    bfloat16=366.5,  # NVIDIA L40S datasheet 2023: 733 sparse
    float16=366.5,  # NVIDIA L40S datasheet 2023: 733 sparse
    float8_e4m3fn=733,  # NVIDIA L40S datasheet 2023: 1,466 sparse
    memory_bytes=46068 * MIB,  # nvidia-smi, seen 2026: "48 GB" less ECC
    memory_bandwidth_bytes_per_s=864e9,  # NVIDIA L40S datasheet 2023
    efficiency=0.6,  # assumption: 350 W and 864 GB/s hold large products back
)
_RTX3090 = of_datasheet(
    "rtx3090-24",
    "NVIDIA Ampere GA102 whitepaper, 2021; FP32 accumulation",
    float32=35.6,  # NVIDIA GA102 whitepaper 2021
    tensorfloat32=35.6,  # NVIDIA GA102 whitepaper 2021
    bfloat16=71,  # NVIDIA GA102 whitepaper 2021
    float16=71,  # NVIDIA GA102 whitepaper 2021, FP32 accumulation
    memory_bytes=24268 * MIB,  # nvidia-smi, seen 2026; 24576 with reserved
    memory_bandwidth_bytes_per_s=936e9,  # NVIDIA GA102 whitepaper 2021
    efficiency=0.9,  # assumption: the halved rate of GeForce is easily fed
    kernel_overhead_s=5e-6,  # assumption: launched by a desktop CPU
)
_RTX4090 = of_datasheet(
    "rtx4090-24",
    "NVIDIA Ada whitepaper, 2023; FP32 accumulation",
    float32=82.6,  # NVIDIA Ada whitepaper 2023
    tensorfloat32=82.6,  # NVIDIA Ada whitepaper 2023
    bfloat16=165.2,  # NVIDIA Ada whitepaper 2023
    float16=165.2,  # NVIDIA Ada whitepaper 2023, FP32 accumulation
    float8_e4m3fn=330.3,  # NVIDIA Ada whitepaper 2023, FP32 accumulation
    memory_bytes=24564 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=1008e9,  # NVIDIA Ada whitepaper 2023
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=5e-6,  # assumption: launched by a desktop CPU
)
_RTX5090 = of_datasheet(
    "rtx5090-32",
    "NVIDIA RTX Blackwell whitepaper, 2025; FP32 accumulation",
    float32=104.8,  # NVIDIA RTX Blackwell whitepaper 2025
    tensorfloat32=104.8,  # NVIDIA RTX Blackwell whitepaper 2025
    bfloat16=209.5,  # NVIDIA RTX Blackwell whitepaper 2025
    float16=209.5,  # NVIDIA RTX Blackwell whitepaper 2025, FP32 accumulation
    float8_e4m3fn=419,  # NVIDIA RTX Blackwell whitepaper 2025, FP32 accumulation
    memory_bytes=32607 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=1792e9,  # NVIDIA RTX Blackwell whitepaper 2025
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=5e-6,  # assumption: launched by a desktop CPU
)
_V100_16 = _V100.model_copy(
    update={
        "name": "v100-16",
        "memory_bytes": 16160 * MIB,  # nvidia-smi, seen 2026; 16384 with reserved
    }
)

_TYPES: dict[str, DeviceType] = {
    device.name: device
    for device in (
        _V100_16,
        _V100,
        _A100_40,
        _A100_80,
        _H100,
        _H200,
        _B200,
        _GB200,
        _B300,
        _GB300,
        _MI300X,
        _A40,
        _L40S,
        _RTX3090,
        _RTX4090,
        _RTX5090,
        *CARDS,
        *DESKTOP,
        *INSTINCT,
    )
}


def device_type_names() -> tuple[str, ...]:
    """Names that :func:`device_type` knows, sorted."""
    return tuple(sorted(_TYPES))


def device_type(name: str) -> DeviceType:
    """A known accelerator.

    Args:
        name: ``"h100-80"``: the chip and its memory in GB.

    Raises:
        UnknownNameError: If there is no such type; suggests the nearest.
    """
    try:
        return _TYPES[name.lower()]
    except KeyError:
        raise UnknownNameError("device type", name, _TYPES) from None
