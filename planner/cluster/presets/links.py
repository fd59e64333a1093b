"""Links by name, per device and direction, with their numbers from datasheets.

Bandwidth is what the datasheet gives for one direction (its "bidirectional" halved).
What a collective library keeps of it is the cost model's business.

Latencies of one hop are those with which NCCL (``src/graph/tuning.cc``, ring with the
LL128 protocol; unchanged from 2020 to 2.28) chooses its algorithms; Ethernet's are
measured between two programs.

The V100s of a DGX-1 have no switch: 24 cables join 16 of 28 pairs, once or twice, and
the rest over a neighbour. It is taken as an even mesh that gives each GPU the total it
has; a pair with two cables then gets less than it has, one without gets more.
"""

from __future__ import annotations

from planner.schema.cluster import Link
from planner.units import gbit_per_s

__all__ = ["LINKS", "ethernet", "infiniband"]

_CUBE_MESH = 150e9 / 7  # NVIDIA DGX-1 whitepaper 2017: 6 x 25 GB/s for 7 peers
_NVLINK_S = 1.9e-6  # NCCL 2.18 tuning.cc, 2023: NVLINK ring LL128
_PCIE_S = 2.5e-6  # NCCL 2.18 tuning.cc, 2023: PCI ring LL128
_NETWORK_S = 4.0e-6  # NCCL 2.18 tuning.cc, 2023: NET ring LL128
_ETHERNET_S = 20e-6  # Hurwitz and Feng 2003: TCP over 10 GbE, between applications
_GIGABIT_S = 55e-6  # Server Fault 791539, 2016: TCP over 1 GbE, 110 us round trip


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
    """The share that each device of a host has of one Ethernet port, over TCP.

    Args:
        gbits: Rate of the port, Gbit/s and direction; below 10 its latency is that of
            Gigabit Ethernet.
        devices: Devices in one host.
        source: Where the port is from.
    """
    return Link(
        name=f"{gbits:g} GbE",
        bandwidth_bytes_per_s=gbit_per_s(gbits) / devices,
        latency_s=_ETHERNET_S if gbits >= 10 else _GIGABIT_S,
        source=source,
    )


LINKS: dict[str, Link] = {
    "nvlink1": _nvlink(
        "NVLink1", 80e9, "NVIDIA P100 datasheet 2016: 160 GB/s both ways"
    ),
    "nvlink2": _nvlink(
        "NVLink2", 150e9, "NVIDIA V100 datasheet 2020: 300 GB/s both ways"
    ),
    "nvlink2-mesh": Link(
        name="NVLink2 hybrid cube mesh",
        bandwidth_bytes_per_s=_CUBE_MESH,
        latency_s=_NVLINK_S,
        mesh=True,
        source="NVIDIA DGX-1 whitepaper 2017: 6 cables of 25 GB/s a GPU, no switch",
    ),
    "nvlink3": _nvlink(
        "NVLink3", 300e9, "NVIDIA A100 datasheet 2021: 600 GB/s both ways"
    ),
    "nvlink-400": _nvlink(
        "NVLink of A800 and H800", 200e9, "NVIDIA H800 datasheet 2023: 400 GB/s"
    ),
    "nvlink4": _nvlink(
        "NVLink4", 450e9, "NVIDIA H100 datasheet 2023: 900 GB/s both ways"
    ),
    "nvlink5": _nvlink(
        "NVLink5", 900e9, "NVIDIA HGX B200 page 2025: 1.8 TB/s both ways"
    ),
    "infinity-fabric": Link(
        name="Infinity Fabric",
        bandwidth_bytes_per_s=64e9,  # AMD MI300X data sheet 2023: 7 x 128 both ways
        latency_s=_NVLINK_S,  # assumption: as NVLink
        mesh=True,
        source="AMD MI300X data sheet 2023: 128 GB/s both ways to each of 7 peers",
    ),
    "pcie3": Link(
        name="PCIe 3.0 x16",
        bandwidth_bytes_per_s=15.75e9,  # PCI-SIG 3.0, 2010: 8 GT/s x 16 x 128/130
        latency_s=_PCIE_S,
        source="PCI-SIG 3.0, 2010: 8 GT/s x 16 lanes, 128 of 130 bits are data",
    ),
    "pcie4": Link(
        name="PCIe 4.0 x16",
        bandwidth_bytes_per_s=31.5e9,  # PCI-SIG 4.0, 2017: 16 GT/s x 16 x 128/130
        latency_s=_PCIE_S,
        source="PCI-SIG 4.0, 2017: 16 GT/s x 16 lanes, 128 of 130 bits are data",
    ),
    "pcie5": Link(
        name="PCIe 5.0 x16",
        bandwidth_bytes_per_s=63e9,  # PCI-SIG 5.0, 2019: 32 GT/s x 16 x 128/130
        latency_s=_PCIE_S,
        source="PCI-SIG 5.0, 2019: 32 GT/s x 16 lanes, 128 of 130 bits are data",
    ),
}
