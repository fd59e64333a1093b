"""NVIDIA's cards for desktops and workstations but for the RTX 3090, 4090 and 5090.

The same rules as in :mod:`.devices` hold for rates, memory and efficiency. GeForce
cards accumulate in FP32 at half the rate of their tensor cores, the others do not.
"""

from __future__ import annotations

from planner.cluster.presets.datasheet import MIB, of_datasheet
from planner.schema.cluster import DeviceType

__all__ = ["DESKTOP"]

_DESKTOP_S = 5e-6  # assumption: launched by a desktop CPU

_GTX1080TI = of_datasheet(
    "gtx1080ti-11",
    "NVIDIA GTX 1080 Ti page, 2017",
    float32=11.3,  # NVIDIA GTX 1080 Ti page 2017: 28 x 128 cores at 1.582 GHz
    float16=11.3,  # assumption: as float32, in which cuBLAS multiplies
    memory_bytes=11172 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=484e9,  # NVIDIA GTX 1080 Ti page 2017
    efficiency=0.85,  # assumption: no tensor cores to starve
    kernel_overhead_s=_DESKTOP_S,
)
_TITANXP = of_datasheet(
    "titanxp-12",
    "NVIDIA Titan Xp page, 2017",
    float32=12.1,  # NVIDIA Titan Xp page 2017: 30 x 128 cores at 1.582 GHz
    float16=12.1,  # assumption: as float32, in which cuBLAS multiplies
    memory_bytes=12194 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=547.7e9,  # NVIDIA Titan Xp page 2017
    efficiency=0.85,  # assumption: no tensor cores to starve
    kernel_overhead_s=_DESKTOP_S,
)
_TITANV = of_datasheet(
    "titanv-12",
    "NVIDIA Titan V page, 2017",
    float32=13.8,  # NVIDIA Titan V page 2017: 80 x 64 cores at 1.345 GHz
    float16=110,  # NVIDIA Titan V page 2017
    memory_bytes=12066 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=652.8e9,  # NVIDIA Titan V page 2017
    efficiency=0.7,  # assumption: 250 W, as V100 PCIe
    kernel_overhead_s=_DESKTOP_S,
)
_RTX2080 = of_datasheet(
    "rtx2080-8",
    "NVIDIA Turing whitepaper, 2018, reference card; FP32 accumulation",
    float32=10.1,  # NVIDIA Turing whitepaper 2018
    float16=40.3,  # NVIDIA Turing whitepaper 2018, FP32 accumulation
    memory_bytes=7982 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=448e9,  # NVIDIA Turing whitepaper 2018
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=_DESKTOP_S,
)
_RTX2080TI = of_datasheet(
    "rtx2080ti-11",
    "NVIDIA Turing whitepaper, 2018, reference card; FP32 accumulation",
    float32=13.4,  # NVIDIA Turing whitepaper 2018
    float16=53.8,  # NVIDIA Turing whitepaper 2018, FP32 accumulation
    memory_bytes=11019 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=616e9,  # NVIDIA Turing whitepaper 2018
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=_DESKTOP_S,
)
_TITANRTX = of_datasheet(
    "titanrtx-24",
    "NVIDIA Titan RTX page, 2018; FP32 accumulation at full rate",
    float32=16.3,  # NVIDIA Titan RTX page 2018
    float16=130.5,  # NVIDIA Titan RTX page 2018
    memory_bytes=24220 * MIB,  # assumption: 24 GiB less what drivers of 2018 reserve
    memory_bandwidth_bytes_per_s=672e9,  # NVIDIA Titan RTX page 2018
    efficiency=0.6,  # assumption: 280 W hold the clock below boost
    kernel_overhead_s=_DESKTOP_S,
)
_QUADRO6000 = of_datasheet(
    "quadrortx6000-24",
    "NVIDIA Quadro RTX 6000 datasheet, 2018",
    float32=16.3,  # NVIDIA Quadro RTX 6000 datasheet 2018
    float16=130.5,  # NVIDIA Quadro RTX 6000 datasheet 2018
    memory_bytes=22698 * MIB,  # nvidia-smi, seen 2026: "24 GB" less ECC
    memory_bandwidth_bytes_per_s=672e9,  # NVIDIA Quadro RTX 6000 datasheet 2018
    efficiency=0.6,  # assumption: as Titan RTX
)
_QUADRO8000 = of_datasheet(
    "quadrortx8000-48",
    "NVIDIA Quadro RTX 8000 datasheet, 2018",
    float32=16.3,  # NVIDIA Quadro RTX 8000 datasheet 2018
    float16=130.5,  # NVIDIA Quadro RTX 8000 datasheet 2018
    memory_bytes=45556 * MIB,  # nvidia-smi, seen 2026: "48 GB" less ECC
    memory_bandwidth_bytes_per_s=672e9,  # NVIDIA Quadro RTX 8000 datasheet 2018
    efficiency=0.6,  # assumption: as Titan RTX
)
_RTX3080 = of_datasheet(
    "rtx3080-10",
    "NVIDIA Ampere GA102 whitepaper, 2021; FP32 accumulation",
    float32=29.8,  # NVIDIA GA102 whitepaper 2021
    tensorfloat32=29.8,  # NVIDIA GA102 whitepaper 2021
    bfloat16=59.5,  # NVIDIA GA102 whitepaper 2021
    float16=59.5,  # NVIDIA GA102 whitepaper 2021, FP32 accumulation
    memory_bytes=10018 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=760e9,  # NVIDIA GA102 whitepaper 2021
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=_DESKTOP_S,
)
_RTX3090TI = of_datasheet(
    "rtx3090ti-24",
    "NVIDIA RTX 3090 Ti page, 2022; FP32 accumulation",
    float32=40,  # NVIDIA RTX 3090 Ti page 2022
    tensorfloat32=40,  # NVIDIA RTX 3090 Ti page 2022: as float32 on this chip
    bfloat16=80,  # NVIDIA RTX 3090 Ti page 2022: a quarter of 320 sparse
    float16=80,  # NVIDIA RTX 3090 Ti page 2022, FP32 accumulation
    memory_bytes=24247 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=1008e9,  # NVIDIA RTX 3090 Ti page 2022
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=_DESKTOP_S,
)
_A4000 = of_datasheet(
    "a4000-16",
    "NVIDIA RTX A4000 datasheet, 2021",
    float32=19.2,  # NVIDIA RTX A4000 datasheet 2021
    tensorfloat32=38.3,  # NVIDIA RTX A4000 datasheet 2021: an eighth of 153.4, twice
    bfloat16=76.7,  # NVIDIA RTX A4000 datasheet 2021: 153.4 sparse
    float16=76.7,  # NVIDIA RTX A4000 datasheet 2021: 153.4 sparse
    memory_bytes=15352 * MIB,  # assumption: "16 GB" less ECC, as T4
    memory_bandwidth_bytes_per_s=448e9,  # NVIDIA RTX A4000 datasheet 2021
    efficiency=0.6,  # assumption: 140 W hold the clock below boost
)
_A5000 = of_datasheet(
    "a5000-24",
    "NVIDIA RTX A5000 datasheet, 2021",
    float32=27.8,  # NVIDIA RTX A5000 datasheet 2021
    tensorfloat32=55.5,  # NVIDIA RTX A5000 datasheet 2021: an eighth of 222.2, twice
    bfloat16=111.1,  # NVIDIA RTX A5000 datasheet 2021: 222.2 sparse
    float16=111.1,  # NVIDIA RTX A5000 datasheet 2021: 222.2 sparse
    memory_bytes=23028 * MIB,  # assumption: "24 GB" less ECC, as A10
    memory_bandwidth_bytes_per_s=768e9,  # NVIDIA RTX A5000 datasheet 2021
    efficiency=0.7,  # assumption: as A40
)
_A5500 = of_datasheet(
    "a5500-24",
    "NVIDIA RTX A5500 datasheet, 2022",
    float32=34.1,  # NVIDIA RTX A5500 datasheet 2022
    tensorfloat32=68.2,  # NVIDIA RTX A5500 datasheet 2022: half of 136.4
    bfloat16=136.4,  # NVIDIA RTX A5500 datasheet 2022: 272.8 sparse
    float16=136.4,  # NVIDIA RTX A5500 datasheet 2022: 272.8 sparse
    memory_bytes=23028 * MIB,  # assumption: "24 GB" less ECC, as A10
    memory_bandwidth_bytes_per_s=768e9,  # NVIDIA RTX A5500 datasheet 2022
    efficiency=0.7,  # assumption: as A40
)
_A6000 = of_datasheet(
    "a6000-48",
    "NVIDIA RTX A6000 datasheet, 2021",
    float32=38.7,  # NVIDIA RTX A6000 datasheet 2021
    tensorfloat32=77.4,  # NVIDIA RTX A6000 datasheet 2021: half of 154.8
    bfloat16=154.8,  # NVIDIA RTX A6000 datasheet 2021: 309.7 sparse
    float16=154.8,  # NVIDIA RTX A6000 datasheet 2021: 309.7 sparse
    memory_bytes=46068 * MIB,  # assumption: "48 GB" less ECC, as A40
    memory_bandwidth_bytes_per_s=768e9,  # NVIDIA RTX A6000 datasheet 2021
    efficiency=0.7,  # assumption: as A40
)
_RTX4080 = of_datasheet(
    "rtx4080-16",
    "NVIDIA Ada whitepaper, 2023; FP32 accumulation",
    float32=48.7,  # NVIDIA Ada whitepaper 2023
    tensorfloat32=48.7,  # NVIDIA Ada whitepaper 2023
    bfloat16=97.5,  # NVIDIA Ada whitepaper 2023
    float16=97.5,  # NVIDIA Ada whitepaper 2023, FP32 accumulation
    float8_e4m3fn=195,  # NVIDIA Ada whitepaper 2023, FP32 accumulation
    memory_bytes=16376 * MIB,  # nvidia-smi, seen 2026
    memory_bandwidth_bytes_per_s=716.8e9,  # NVIDIA Ada whitepaper 2023
    efficiency=0.9,  # assumption: as RTX 3090
    kernel_overhead_s=_DESKTOP_S,
)
_RTX5000ADA = of_datasheet(
    "rtx5000ada-32",
    "NVIDIA RTX 5000 Ada datasheet, 2023",
    float32=65.3,  # NVIDIA RTX 5000 Ada datasheet 2023
    tensorfloat32=130.6,  # NVIDIA RTX 5000 Ada datasheet 2023: an eighth of 1,044
    bfloat16=261.1,  # NVIDIA RTX 5000 Ada datasheet 2023: a quarter of 1,044
    float16=261.1,  # NVIDIA RTX 5000 Ada datasheet 2023: a quarter of 1,044
    float8_e4m3fn=522.2,  # NVIDIA RTX 5000 Ada datasheet 2023: half of 1,044
    memory_bytes=30712 * MIB,  # assumption: "32 GB" less ECC
    memory_bandwidth_bytes_per_s=576e9,  # NVIDIA RTX 5000 Ada datasheet 2023
    efficiency=0.6,  # assumption: as L40S
)
_RTX6000ADA = of_datasheet(
    "rtx6000ada-48",
    "NVIDIA RTX 6000 Ada datasheet, 2023",
    float32=91.1,  # NVIDIA RTX 6000 Ada datasheet 2023
    tensorfloat32=182.1,  # NVIDIA RTX 6000 Ada datasheet 2023: an eighth of 1,457
    bfloat16=364.2,  # NVIDIA RTX 6000 Ada datasheet 2023: a quarter of 1,457
    float16=364.2,  # NVIDIA RTX 6000 Ada datasheet 2023: a quarter of 1,457
    float8_e4m3fn=728.5,  # NVIDIA RTX 6000 Ada datasheet 2023: 1,457 sparse
    memory_bytes=46068 * MIB,  # assumption: "48 GB" less ECC, as L40S
    memory_bandwidth_bytes_per_s=960e9,  # NVIDIA RTX 6000 Ada datasheet 2023
    efficiency=0.6,  # assumption: as L40S
)
_RTXPRO6000 = of_datasheet(
    "rtxpro6000-96",
    "NVIDIA RTX Blackwell PRO whitepaper, 2025",
    float32=126,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    tensorfloat32=251.9,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    bfloat16=503.8,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    float16=503.8,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    float8_e4m3fn=1007.6,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    float4_e2m1fn_x2=2015.2,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    memory_bytes=97250 * MIB,  # assumption: 96 GiB less ECC and a reserve
    memory_bandwidth_bytes_per_s=1792e9,  # NVIDIA RTX Blackwell PRO whitepaper 2025
    efficiency=0.6,  # assumption: as L40S
)

#: In the order of their generations.
DESKTOP: tuple[DeviceType, ...] = (
    _GTX1080TI,
    _TITANXP,
    _TITANV,
    _RTX2080,
    _RTX2080TI,
    _TITANRTX,
    _QUADRO6000,
    _QUADRO8000,
    _RTX3080,
    _RTX3090TI,
    _A4000,
    _A5000,
    _A5500,
    _A6000,
    _RTX4080,
    _RTX5000ADA,
    _RTX6000ADA,
    _RTXPRO6000,
)
