"""NVIDIA's other accelerators for servers: variants of the big ones, older chips.

The same rules as in :mod:`.devices` hold for rates, memory and efficiency.
"""

from __future__ import annotations

from planner.cluster.presets.datasheet import MIB, of_datasheet
from planner.schema.cluster import DeviceType

__all__ = ["CARDS"]

_K80 = of_datasheet(
    "k80-12",
    "NVIDIA K80 datasheet, 2015; one of a card's two chips, at boost",
    float64=1.46,  # NVIDIA K80 datasheet 2015: 2.91 both
    float32=4.37,  # NVIDIA K80 datasheet 2015: 8.73 both
    float16=4.37,  # assumption: as float32, in which cuBLAS multiplies
    memory_bytes=11441 * MIB,  # nvidia-smi, seen 2026: "12 GB" less ECC
    memory_bandwidth_bytes_per_s=240e9,  # NVIDIA K80 datasheet 2015
    efficiency=0.7,  # assumption: 150 W a chip hold the clock below boost
)
_P40 = of_datasheet(
    "p40-24",
    "NVIDIA P40 datasheet, 2016",
    float32=11.8,  # 30 x 128 cores at 1.531 GHz; NVIDIA P40 datasheet 2016 rounds to 12
    float16=11.8,  # assumption: as float32, in which cuBLAS multiplies
    memory_bytes=22912 * MIB,  # nvidia-smi, seen 2026: "24 GB" less ECC
    memory_bandwidth_bytes_per_s=346e9,  # NVIDIA P40 datasheet 2016
    efficiency=0.85,  # assumption: no tensor cores to starve
)
_P100 = of_datasheet(
    "p100-16",
    "NVIDIA P100 datasheet, 2016, SXM2",
    float64=5.3,  # NVIDIA P100 datasheet 2016
    float32=10.6,  # NVIDIA P100 datasheet 2016
    float16=21.2,  # NVIDIA P100 datasheet 2016; no tensor cores
    memory_bytes=16280 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=732e9,  # NVIDIA P100 datasheet 2016
    efficiency=0.85,  # assumption: no tensor cores to starve
)
_T4 = of_datasheet(
    "t4-16",
    "NVIDIA T4 datasheet, 2019",
    float32=8.1,  # NVIDIA T4 datasheet 2019
    float16=65,  # NVIDIA T4 datasheet 2019
    memory_bytes=15360 * MIB,  # nvidia-smi, seen 2026: "16 GB" less ECC
    memory_bandwidth_bytes_per_s=320e9,  # NVIDIA T4 datasheet 2019
    efficiency=0.5,  # assumption: 70 W hold the clock far below boost
)
_V100PCIE_16 = of_datasheet(
    "v100pcie-16",
    "NVIDIA V100 datasheet, 2020, PCIe",
    float64=7,  # NVIDIA V100 datasheet 2020, PCIe
    float32=14,  # NVIDIA V100 datasheet 2020, PCIe
    float16=112,  # NVIDIA V100 datasheet 2020, PCIe
    memory_bytes=16160 * MIB,  # assumption: as SXM
    memory_bandwidth_bytes_per_s=900e9,  # NVIDIA V100 datasheet 2020
    efficiency=0.7,  # assumption: 250 W
)
_V100PCIE_32 = _V100PCIE_16.model_copy(
    update={
        "name": "v100pcie-32",
        "memory_bytes": 32510 * MIB,  # assumption: as SXM
    }
)
_A100PCIE_40 = of_datasheet(
    "a100pcie-40",
    "NVIDIA A100 datasheet, 2021, PCIe",
    float64=19.5,  # NVIDIA A100 datasheet 2021, tensor cores
    float32=19.5,  # NVIDIA A100 datasheet 2021
    tensorfloat32=156,  # NVIDIA A100 datasheet 2021
    bfloat16=312,  # NVIDIA A100 datasheet 2021
    float16=312,  # NVIDIA A100 datasheet 2021
    memory_bytes=40536 * MIB,  # assumption: as SXM
    memory_bandwidth_bytes_per_s=1555e9,  # NVIDIA A100 datasheet 2021
    efficiency=0.7,  # assumption: 250 to 300 W hold the clock below boost
)
_A100PCIE_80 = _A100PCIE_40.model_copy(
    update={
        "name": "a100pcie-80",
        "memory_bytes": 81251 * MIB,  # assumption: as SXM
        "memory_bandwidth_bytes_per_s": 1935e9,  # NVIDIA A100 datasheet 2021, PCIe
    }
)
_A800_80 = of_datasheet(
    "a800-80",
    "NVIDIA A800, 2022: A100 with 400 GB/s of NVLink",
    float64=9.7,  # Lenovo A800 product guide 2023
    float32=19.5,  # Lenovo A800 product guide 2023
    tensorfloat32=156,  # Lenovo A800 product guide 2023
    bfloat16=312,  # Lenovo A800 product guide 2023
    float16=312,  # Lenovo A800 product guide 2023
    memory_bytes=81251 * MIB,  # assumption: as A100
    memory_bandwidth_bytes_per_s=2039e9,  # NVIDIA A100 datasheet 2021, SXM
    efficiency=0.82,  # assumption: as A100
)
_A30 = of_datasheet(
    "a30-24",
    "NVIDIA A30 datasheet, 2022",
    float64=10.3,  # NVIDIA A30 datasheet 2022, tensor cores
    float32=10.3,  # NVIDIA A30 datasheet 2022
    tensorfloat32=82.5,  # NVIDIA A30 datasheet 2022: half of 165
    bfloat16=165,  # NVIDIA A30 datasheet 2022
    float16=165,  # NVIDIA A30 datasheet 2022
    memory_bytes=24060 * MIB,  # CUDA's total, seen 2026
    memory_bandwidth_bytes_per_s=933e9,  # NVIDIA A30 datasheet 2022
    efficiency=0.7,  # assumption: 165 W
)
_A10 = of_datasheet(
    "a10-24",
    "NVIDIA A10 datasheet, 2021",
    float32=31.2,  # NVIDIA A10 datasheet 2021
    tensorfloat32=62.5,  # NVIDIA A10 datasheet 2021
    bfloat16=125,  # NVIDIA A10 datasheet 2021
    float16=125,  # NVIDIA A10 datasheet 2021
    memory_bytes=23028 * MIB,  # nvidia-smi, seen 2026: "24 GB" less ECC
    memory_bandwidth_bytes_per_s=600e9,  # NVIDIA A10 datasheet 2021
    efficiency=0.6,  # assumption: 150 W hold the clock below boost
)
_A10G = of_datasheet(
    "a10g-24",
    "NVIDIA A10G datasheet for AWS, 2021; FP32 accumulation",
    float32=35,  # NVIDIA A10G datasheet 2021
    tensorfloat32=35,  # NVIDIA A10G datasheet 2021
    bfloat16=70,  # NVIDIA A10G datasheet 2021
    float16=70,  # NVIDIA A10G datasheet 2021
    memory_bytes=23028 * MIB,  # nvidia-smi, seen 2026: "24 GB" less ECC
    memory_bandwidth_bytes_per_s=600e9,  # NVIDIA A10G datasheet 2021
    efficiency=0.8,  # assumption: 300 W and a halved rate
)
_L4 = of_datasheet(
    "l4-24",
    "NVIDIA L4 datasheet, 2023",
    float32=30.3,  # NVIDIA L4 datasheet 2023
    tensorfloat32=60.5,  # NVIDIA L4 datasheet 2023: 120 sparse, rounded
    bfloat16=121,  # NVIDIA L4 datasheet 2023: 242 sparse
    float16=121,  # NVIDIA L4 datasheet 2023: 242 sparse
    float8_e4m3fn=242,  # NVIDIA L4 datasheet 2023: 485 sparse
    memory_bytes=23034 * MIB,  # nvidia-smi, seen 2026: "24 GB" less ECC
    memory_bandwidth_bytes_per_s=300e9,  # NVIDIA L4 datasheet 2023
    efficiency=0.5,  # assumption: 72 W hold the clock far below boost
)
_L20 = of_datasheet(
    "l20-48",
    "NVIDIA L20 listing in Tom's Hardware, 2024",
    float32=59.8,  # Tom's Hardware 2024
    tensorfloat32=59.8,  # Tom's Hardware 2024
    bfloat16=119.5,  # Tom's Hardware 2024
    float16=119.5,  # Tom's Hardware 2024
    float8_e4m3fn=239,  # Tom's Hardware 2024
    memory_bytes=46068 * MIB,  # assumption: as L40S
    memory_bandwidth_bytes_per_s=864e9,  # Tom's Hardware 2024
    efficiency=0.8,  # assumption: 275 W and a lowered rate
)
_L40 = of_datasheet(
    "l40-48",
    "NVIDIA L40 datasheet, 2023",
    float32=90.5,  # NVIDIA L40 datasheet 2023
    tensorfloat32=90.5,  # NVIDIA L40 datasheet 2023
    bfloat16=181,  # NVIDIA L40 datasheet 2023
    float16=181,  # NVIDIA L40 datasheet 2023
    float8_e4m3fn=362,  # NVIDIA L40 datasheet 2023
    memory_bytes=46068 * MIB,  # assumption: as L40S
    memory_bandwidth_bytes_per_s=864e9,  # NVIDIA L40 datasheet 2023
    efficiency=0.75,  # assumption: 300 W and a halved rate
)
_H100PCIE = of_datasheet(
    "h100pcie-80",
    "NVIDIA H100 whitepaper, 2023, PCIe: dense rates",
    float64=51.2,  # NVIDIA H100 whitepaper 2023, PCIe
    float32=51.2,  # NVIDIA H100 whitepaper 2023, PCIe
    tensorfloat32=378,  # NVIDIA H100 whitepaper 2023, PCIe: 756 sparse
    bfloat16=756,  # NVIDIA H100 whitepaper 2023, PCIe: 1,513 sparse
    float16=756,  # NVIDIA H100 whitepaper 2023, PCIe: 1,513 sparse
    float8_e4m3fn=1512,  # NVIDIA H100 whitepaper 2023, PCIe: 3,026 sparse
    memory_bytes=81559 * MIB,  # assumption: as SXM
    memory_bandwidth_bytes_per_s=2000e9,  # NVIDIA H100 whitepaper 2023, PCIe
    efficiency=0.6,  # assumption: 350 W hold the clock below boost
)
_H100NVL = of_datasheet(
    "h100nvl-94",
    "NVIDIA H100 datasheet, 2024, NVL: dense rates",
    float64=60,  # NVIDIA H100 datasheet 2024, NVL
    float32=60,  # NVIDIA H100 datasheet 2024, NVL
    tensorfloat32=417.5,  # NVIDIA H100 datasheet 2024, NVL: 835 sparse
    bfloat16=835.5,  # NVIDIA H100 datasheet 2024, NVL: 1,671 sparse
    float16=835.5,  # NVIDIA H100 datasheet 2024, NVL: 1,671 sparse
    float8_e4m3fn=1670.5,  # NVIDIA H100 datasheet 2024, NVL: 3,341 sparse
    memory_bytes=95830 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=3900e9,  # NVIDIA H100 datasheet 2024, NVL
    efficiency=0.6,  # assumption: 400 W hold the clock below boost
)
_H100_96 = of_datasheet(
    "h100-96",
    "torchtitan benchmarks, 2024-12: 96 GB of HBM2e, 500 W; rates of the H100 SXM5",
    float64=66.9,  # NVIDIA H100 whitepaper 2023, SXM5
    float32=66.9,  # NVIDIA H100 whitepaper 2023, SXM5
    tensorfloat32=494.7,  # NVIDIA H100 whitepaper 2023, SXM5
    # "Between SXM and NVL", say its users, who divide by the SXM's: so it is that.
    bfloat16=989.4,  # NVIDIA H100 whitepaper 2023, SXM5
    float16=989.4,  # NVIDIA H100 whitepaper 2023, SXM5
    float8_e4m3fn=1978.9,  # NVIDIA H100 whitepaper 2023, SXM5
    memory_bytes=97871 * MIB,  # assumption: as other Hopper chips of 96 GB
    memory_bandwidth_bytes_per_s=2400e9,  # torchtitan benchmarks 2024-12
    efficiency=0.65,  # assumption: 500 W instead of 700 W lower the clock
)
_H800 = of_datasheet(
    "h800-80",
    "NVIDIA H800 datasheet, 2023, SXM5: H100 with 400 GB/s of NVLink",
    float64=1,  # NVIDIA H800 datasheet 2023
    float32=66.9,  # NVIDIA H800 datasheet 2023: as H100
    tensorfloat32=494.7,  # NVIDIA H800 datasheet 2023: as H100
    bfloat16=989.4,  # NVIDIA H800 datasheet 2023: as H100
    float16=989.4,  # NVIDIA H800 datasheet 2023: as H100
    float8_e4m3fn=1978.9,  # NVIDIA H800 datasheet 2023: as H100
    memory_bytes=81559 * MIB,  # assumption: as H100
    memory_bandwidth_bytes_per_s=3350e9,  # NVIDIA H800 datasheet 2023
    efficiency=0.75,  # assumption: as H100
)
_H20 = of_datasheet(
    "h20-96",
    "NVIDIA HGX H20 listing in Tom's Hardware, 2024",
    float64=1,  # Tom's Hardware 2024
    float32=44,  # Tom's Hardware 2024
    tensorfloat32=74,  # Tom's Hardware 2024
    bfloat16=148,  # Tom's Hardware 2024
    float16=148,  # Tom's Hardware 2024
    float8_e4m3fn=296,  # Tom's Hardware 2024
    memory_bytes=97871 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=4000e9,  # Tom's Hardware 2024
    efficiency=0.9,  # assumption: few units on a chip that feeds many
)
_GH200 = of_datasheet(
    "gh200-96",
    "NVIDIA GH200 datasheet, 2023, HBM3; rates as H100",
    float64=66.9,  # NVIDIA H100 whitepaper 2023
    float32=66.9,  # NVIDIA H100 whitepaper 2023
    tensorfloat32=494.7,  # NVIDIA H100 whitepaper 2023
    bfloat16=989.4,  # NVIDIA H100 whitepaper 2023
    float16=989.4,  # NVIDIA H100 whitepaper 2023
    float8_e4m3fn=1978.9,  # NVIDIA H100 whitepaper 2023
    memory_bytes=97871 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=4000e9,  # NVIDIA GH200 datasheet 2023
    efficiency=0.7,  # assumption: CPU and GPU share the power
)
_GH200_144 = _GH200.model_copy(
    update={
        "name": "gh200-144",
        "memory_bytes": 143771 * MIB,  # assumption: as H200
        "memory_bandwidth_bytes_per_s": 4900e9,  # NVIDIA GH200 datasheet 2023, HBM3e
        "source": "NVIDIA GH200 datasheet, 2023, HBM3e; rates as H100",
    }
)
_B100 = of_datasheet(
    "b100-180",
    "NVIDIA HGX B100 page, 2024; a GPU is 1/8 board; rates with sparsity halved",
    float64=30,  # NVIDIA HGX B100 page 2024: 240 a board
    float32=60,  # NVIDIA HGX B100 page 2024: 480 a board
    tensorfloat32=875,  # NVIDIA HGX B100 page 2024: 14,000 a board, sparse
    bfloat16=1750,  # NVIDIA HGX B100 page 2024: 28,000 a board, sparse
    float16=1750,  # NVIDIA HGX B100 page 2024: 28,000 a board, sparse
    float8_e4m3fn=3500,  # NVIDIA HGX B100 page 2024: 56,000 a board, sparse
    float4_e2m1fn_x2=7000,  # NVIDIA HGX B100 page 2024: 112,000 a board, sparse
    memory_bytes=183359 * MIB,  # assumption: as B200
    memory_bandwidth_bytes_per_s=7700e9,  # assumption: as B200
    efficiency=0.75,  # assumption: as B200
)

#: In the order of their generations.
CARDS: tuple[DeviceType, ...] = (
    _K80,
    _P40,
    _P100,
    _V100PCIE_16,
    _V100PCIE_32,
    _T4,
    _A100PCIE_40,
    _A100PCIE_80,
    _A800_80,
    _A30,
    _A10,
    _A10G,
    _L4,
    _L20,
    _L40,
    _H100PCIE,
    _H100NVL,
    _H100_96,
    _H800,
    _H20,
    _GH200,
    _GH200_144,
    _B100,
)
