"""Machines that rows name, or that a source is known to have measured on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.calibration.machines.hosts import HostKind, host_kind

__all__ = ["SYSTEMS", "KnownSystem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSystem:
    """A machine with a name.

    Attributes:
        name: For people.
        pattern: Finds it in the GPU's name or in the notes, in lower case.
        source_pattern: Finds it in the name of the source, in lower case; None if no
            source is known to have used it.
        devices: Device types that it comes with, the most common first.
        host: Its hosts.
    """

    name: str
    pattern: re.Pattern[str]
    source_pattern: re.Pattern[str] | None
    devices: tuple[str, ...]
    host: HostKind


def _system(
    name: str,
    pattern: str,
    devices: str,
    host: HostKind,
    source_pattern: str | None = None,
) -> KnownSystem:
    return KnownSystem(
        name=name,
        pattern=re.compile(pattern),
        source_pattern=re.compile(source_pattern) if source_pattern else None,
        devices=tuple(devices.split()),
        host=host,
    )


_NEVER = r"(?!)"
_A100 = "a100-80 a100-40"
_V100 = "v100-32 v100-16"

_CLOUDS = (
    _system(
        "AWS p3.16xlarge",
        r"\bp3\.16",
        "v100-16",
        host_kind("nvlink2-mesh", 1, 25, "25 GbE", "AWS p3, 2017", rdma=False),
    ),
    _system(
        "AWS p3.8xlarge",
        r"\bp3\.8",
        "v100-16",
        host_kind("nvlink2-mesh", 1, 10, "10 GbE", "AWS p3, 2017", 4, rdma=False),
    ),
    _system(
        "AWS p3dn.24xlarge",
        r"\bp3dn",
        "v100-32",
        host_kind("nvlink2-mesh", 1, 100, "EFA", "AWS p3dn, 2018"),
    ),
    _system(
        "AWS p4de.24xlarge",
        r"\bp4de",
        "a100-80",
        host_kind("nvlink3", 4, 100, "EFA", "AWS p4de, 2022"),
    ),
    _system(
        "AWS p4d.24xlarge",
        r"\bp4d",
        "a100-40",
        host_kind("nvlink3", 4, 100, "EFA", "AWS p4d, 2020"),
    ),
    _system(
        "AWS p5e or p5en",
        r"\bp5en?\b",
        "h200-141",
        host_kind("nvlink4", 8, 400, "EFA", "AWS p5e, 2024"),
    ),
    _system(
        "AWS p5.48xlarge",
        r"\bp5\b",
        "h100-80",
        host_kind("nvlink4", 32, 100, "EFA", "AWS p5, 2023"),
    ),
    _system(
        "AWS p6-b300",
        r"\bp6.?b300",
        "b300-270",
        host_kind("nvlink5", 16, 400, "EFA", "AWS p6-b300, 2025"),
    ),
    _system(
        "AWS p6-b200",
        r"\bp6.?b200",
        "b200-180",
        host_kind("nvlink5", 8, 400, "EFA", "AWS p6-b200, 2025"),
    ),
    _system(
        "AWS g5.12xlarge",
        r"\bg5\.12",
        "a10g-24",
        host_kind("pcie4", 1, 40, "40 GbE", "AWS g5, 2021", 4, rdma=False),
    ),
    _system(
        "AWS g5.48xlarge",
        r"\bg5(\.48|\b)",
        "a10g-24",
        host_kind("pcie4", 1, 100, "EFA", "AWS g5, 2021"),
    ),
    _system(
        "Azure ND A100 v4",
        r"\bnd.?(96)?(am?sr?|a100).*v4|\bndv4|\bndm?\s?a100",
        _A100,
        host_kind("nvlink3", 8, 200, "InfiniBand HDR", "Azure ND A100 v4, 2021"),
    ),
    _system(
        "Azure ND H100 v5",
        r"\bnd.?(96.*|h100.*)?v5",
        "h100-80 h200-141 mi300x-192",
        host_kind("nvlink4", 8, 400, "InfiniBand NDR", "Azure ND H100 v5, 2023"),
    ),
    _system(
        "Azure NDv2",
        r"\bnd(40rs)?.?v2",
        "v100-32",
        host_kind("nvlink2-mesh", 1, 100, "InfiniBand EDR", "Azure NDv2, 2019"),
    ),
    _system(
        "Google a2-megagpu-16g",
        r"\ba2-mega",
        "a100-40",
        host_kind("nvlink3", 1, 100, "100 GbE", "Google a2, 2021", 16, rdma=False),
    ),
    _system(
        "Google a2-ultragpu",
        r"\ba2-ultra",
        "a100-80",
        host_kind("nvlink3", 1, 100, "100 GbE", "Google a2, 2022", rdma=False),
    ),
    _system(
        "Google a2-highgpu",
        r"\ba2-high",
        "a100-40",
        host_kind("nvlink3", 1, 100, "100 GbE", "Google a2, 2021", rdma=False),
    ),
    _system(
        "Google a3-ultragpu",
        r"\ba3-ultra",
        "h200-141",
        host_kind("nvlink4", 8, 400, "RoCE", "Google a3-ultra, 2024"),
    ),
    _system(
        "Google a3-megagpu",
        r"\ba3-mega",
        "h100-80",
        host_kind("nvlink4", 8, 200, "GPUDirect-TCPXO", "Google a3-mega, 2024"),
    ),
    _system(
        "Google a3-highgpu",
        r"\ba3(-high|\b)",
        "h100-80",
        host_kind("nvlink4", 4, 200, "GPUDirect-TCPX", "Google a3-high, 2023"),
    ),
)
_DGX = (
    _system(
        "DGX-2",
        r"dgx.?2(?!\d)",
        "v100-32",
        host_kind("nvlink2", 8, 100, "InfiniBand EDR", "NVIDIA DGX-2, 2018", 16),
        r"deepspeed autotuning",
    ),
    _system(
        "DGX-1 with P100",
        r"dgx.?1.*p100|p100.*dgx.?1",
        "p100-16",
        host_kind("nvlink1", 4, 100, "InfiniBand EDR", "NVIDIA DGX-1, 2016"),
    ),
    _system(
        "DGX-1",
        r"dgx.?1(?!\d)",
        _V100,
        host_kind("nvlink2-mesh", 4, 100, "InfiniBand EDR", "NVIDIA DGX-1, 2017"),
    ),
    _system(
        "Selene",
        r"selene",
        _A100,
        host_kind("nvlink3", 8, 200, "InfiniBand HDR", "Narayanan et al. 2021"),
        r"sc21|korthikanti|megatron-lm readme table",
    ),
    _system(
        "DGX A100",
        r"dgx.?a100",
        _A100,
        host_kind("nvlink3", 8, 200, "InfiniBand HDR", "NVIDIA DGX A100, 2021"),
    ),
    _system(
        "DGX H100",
        r"dgx.?h[12]00|\beos\b",
        "h100-80 h200-141",
        host_kind("nvlink4", 8, 400, "InfiniBand NDR", "NVIDIA DGX H100, 2023"),
    ),
)
_SITES = (
    _system(
        "Grand Teton of Meta",
        r"grand.?teton",
        "h100-96 h100-80",
        host_kind("nvlink4", 8, 400, "RoCE", "torchtitan benchmarks, 2024-12"),
        r"torchtitan",
    ),
    _system(
        "MosaicML's clusters",
        _NEVER,
        "a100-80 a100-40",
        host_kind("nvlink3", 8, 200, "RoCE", "llm-foundry benchmarks, 2023: 1,600"),
        r"mosaicml|llm-foundry",
    ),
    _system(
        "vTrain's cluster",
        _NEVER,
        _A100,
        host_kind(
            "nvlink3", 4, 200, "InfiniBand HDR", "vTrain, config/, 2024: 800 Gbit/s"
        ),
        r"vtrain",
    ),
    _system(
        "Jean Zay",
        r"jean.?zay",
        _A100,
        host_kind("nvlink3", 4, 100, "Omni-Path", "BigScience, BLOOM, 2022"),
        r"bloom|bigscience",
    ),
    _system(
        "Perlmutter",
        r"perlmutter",
        "a100-40 a100-80",
        host_kind("nvlink3", 4, 200, "Slingshot", "NERSC Perlmutter, 2022", 4),
    ),
    _system(
        "JUWELS Booster",
        r"juwels",
        "a100-40",
        host_kind("nvlink3", 4, 200, "InfiniBand HDR", "Juelich, 2021", 4),
    ),
    _system(
        "Leonardo",
        r"leonardo",
        _A100,
        host_kind("nvlink3", 4, 100, "InfiniBand HDR100", "CINECA Leonardo, 2023", 4),
    ),
    _system(
        "Summit",
        r"\bsummit\b",
        "v100-16",
        host_kind("nvlink2", 2, 100, "InfiniBand EDR", "OLCF Summit, 2018", 6),
    ),
    _system(
        "Frontier or LUMI",
        r"\bfrontier\b|\blumi\b",
        "mi250x-64",
        host_kind("xgmi-mi250", 4, 200, "Slingshot", "OLCF Frontier, 2022"),
    ),
)

#: Named machines; the first that fits is taken.
SYSTEMS: tuple[KnownSystem, ...] = (*_CLOUDS, *_DGX, *_SITES)
