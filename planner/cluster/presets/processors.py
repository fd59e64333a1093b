"""How many processors a chip has: streaming multiprocessors, or compute units.

Those that are switched on, as the makers' architecture papers count them and
``torch.cuda.get_device_properties`` says; of Grace superchips with Blackwell and of
AMD's chips of two dies, what one torch device has. The variants of one chip (memory,
board) have as many unless they are named.
"""

from __future__ import annotations

__all__ = ["PROCESSORS"]

PROCESSORS: dict[str, int] = {
    # NVIDIA's architecture whitepapers: Kepler 2014, Pascal 2016, Volta 2017, Turing
    # 2018.
    "k80": 13,
    "p40": 30,
    "p100": 56,
    "gtx1080ti": 28,
    "titanxp": 30,
    "v100": 80,
    "v100pcie": 80,
    "titanv": 80,
    "t4": 40,
    "rtx2080": 46,
    "rtx2080ti": 68,
    "titanrtx": 72,
    "quadrortx6000": 72,
    "quadrortx8000": 72,
    # Ampere GA100 2020 and GA102 2021, and datasheets of the cards.
    "a100": 108,
    "a100pcie": 108,
    "a800": 108,
    "a30": 56,
    "a10": 72,
    "a10g": 80,
    "a40": 84,
    "a6000": 84,
    "a5500": 80,
    "a5000": 64,
    "a4000": 48,
    "rtx3080": 68,
    "rtx3090ti": 84,
    "rtx3090": 82,
    # Ada 2023, and datasheets of the cards.
    "rtx4080": 76,
    "rtx4090": 128,
    "rtx5000ada": 100,
    "rtx6000ada": 142,
    "l4": 58,
    "l20": 92,
    "l40": 142,
    "l40s": 142,
    # Hopper 2022; H20 as resellers print it.
    "h100": 132,
    "h100pcie": 114,
    "h100nvl": 132,
    "h200": 132,
    "h800": 132,
    "h20": 78,
    "gh200": 132,
    # Blackwell: what torch says of them, 2025; the RTX whitepaper 2025 of the cards.
    "b100": 148,
    "b200": 148,
    "gb200": 152,
    "b300": 148,
    "gb300": 152,
    "rtx5090": 170,
    "rtxpro6000": 188,
    # AMD data sheets 2018 to 2025, of one die where a device is one.
    "mi50": 60,
    "mi100": 120,
    "mi210": 104,
    "mi250": 104,
    "mi250x": 110,
    "mi300a": 228,
    "mi300x": 304,
    "mi325x": 304,
    "mi350x": 256,
    "mi355x": 256,
}
