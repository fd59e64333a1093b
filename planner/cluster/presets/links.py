"""Links by name, per device and direction, with their numbers from datasheets.

Bandwidth is what the datasheet gives for one direction (its "bidirectional" halved).
What a collective library keeps of it is the cost model's business.

Latencies of one hop are those with which NCCL 2.18 (``src/graph/tuning.cc``, ring with
the LL128 protocol) chooses its algorithms.
"""

from __future__ import annotations

from planner.schema.cluster import Link
from planner.units import gbit_per_s

__all__ = ["LINKS", "ethernet", "infiniband"]

_NVLINK_S = 1.9e-6  # NCCL 2.18 tuning.cc, NVLINK ring LL128
_PCIE_S = 2.5e-6  # NCCL 2.18 tuning.cc, PCI ring LL128
_NETWORK_S = 4.0e-6  # NCCL 2.18 tuning.cc, NET ring LL128
_ETHERNET_S = 25e-6  # TCP through the kernel on one switch: 20 to 50 us one way


def _nvlink(name: str, bandwidth: float, source: str) -> Link:
    return Link(
        name=name, bandwidth_bytes_per_s=bandwidth, latency_s=_NVLINK_S, source=source
    )


def infiniband(name: str, gbits: float, nics: int, devices: int, source: str) -> Link:
    """The share that each device of a host has of its InfiniBand or RoCE NICs.

    Args:
        name: ``"InfiniBand NDR"``.
        gbits: Rate of one NIC, Gbit/s and direction.
        nics: NICs for computation in one host.
        devices: Devices in one host.
        source: Where rate and count are from.
    """
    return Link(
        name=name,
        bandwidth_bytes_per_s=gbit_per_s(gbits) * nics / devices,
        latency_s=_NETWORK_S,
        source=source,
    )


def ethernet(gbits: float, devices: int, source: str) -> Link:
    """The share that each device of a host has of one Ethernet port, over TCP."""
    return Link(
        name=f"{gbits:g} GbE",
        bandwidth_bytes_per_s=gbit_per_s(gbits) / devices,
        latency_s=_ETHERNET_S,
        source=source,
    )


LINKS: dict[str, Link] = {
    "nvlink2": _nvlink(
        "NVLink2", 150e9, "NVIDIA V100 datasheet 2020: 300 GB/s both ways"
    ),
    "nvlink3": _nvlink(
        "NVLink3", 300e9, "NVIDIA A100 datasheet 2021: 600 GB/s both ways"
    ),
    "nvlink4": _nvlink(
        "NVLink4", 450e9, "NVIDIA H100 datasheet 2023: 900 GB/s both ways"
    ),
    "nvlink5": _nvlink(
        "NVLink5", 900e9, "NVIDIA DGX B200 datasheet 2024: 1.8 TB/s both ways"
    ),
    "infinity-fabric": Link(
        name="Infinity Fabric",
        bandwidth_bytes_per_s=64e9,  # AMD MI300X data sheet 2023: 7 x 128 both ways
        latency_s=_NVLINK_S,
        mesh=True,
        source="AMD MI300X data sheet 2023: 128 GB/s both ways to each of 7 peers",
    ),
    "pcie4": Link(
        name="PCIe 4.0 x16",
        bandwidth_bytes_per_s=32e9,  # PCI-SIG 4.0, 2017: 16 GT/s x 16 lanes
        latency_s=_PCIE_S,
        source="PCI-SIG 4.0, 2017: 64 GB/s both ways",
    ),
}
