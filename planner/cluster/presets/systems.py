"""Machines by name: which devices, how many in a host, and which links."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster.presets.devices import device_type
from planner.cluster.presets.links import LINKS, ethernet, infiniband
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link
from planner.units import gbit_per_s

__all__ = ["ALIASES", "SYSTEMS", "System", "internet_pcs", "ramp", "system_document"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A unit that is bought and counted: a host, or a rack of hosts.

    Attributes:
        device: Name of the device type.
        devices_per_host: Devices that one operating system sees.
        inside: Link between them.
        outside: Link between units, per device.
        hosts: Hosts in one unit; more than one if ``inside`` also joins hosts.
        source: Where counts and NICs are from.
    """

    device: str
    devices_per_host: int
    inside: Link
    outside: Link
    hosts: int = 1
    source: str


def _dgx(
    device: str,
    inside: str,
    outside: Link,
    source: str,
    count: int = 8,  # NVIDIA DGX datasheets 2017 to 2025: 8 GPUs, but for DGX-2
) -> System:
    return System(
        device=device,
        devices_per_host=count,
        inside=LINKS[inside],
        outside=outside,
        source=source,
    )


def _pc(device: str, gbits: float, inside: str = "pcie4") -> System:
    return System(
        device=device,
        devices_per_host=1,
        inside=LINKS[inside],
        outside=ethernet(gbits, 1, f"one {gbits:g} GbE port: an assumption"),
        source="one GPU a PC: an assumption",
    )


def _rack(device: str, outside: Link, source: str) -> System:
    return System(
        device=device,
        devices_per_host=4,  # NVIDIA DGX GB200 user guide 2025: 18 trays of 4 GPUs
        hosts=18,  # NVIDIA DGX GB200 user guide 2025
        inside=LINKS["nvlink5"],
        outside=outside,
        source=source,
    )


_DGX1 = "NVIDIA DGX-1 with V100 whitepaper 2017: 4 EDR NICs for 8 GPUs"
_DGX2 = "NVIDIA DGX-2 datasheet 2018: 8 EDR NICs for 16 GPUs"
_DGX_A100 = "NVIDIA DGX A100 datasheet 2021: 8 ConnectX-6 200 Gb/s for 8 GPUs"
_DGX_H100 = "NVIDIA DGX H100 datasheet 2023: 8 ConnectX-7 400 Gb/s for 8 GPUs"
_DGX_H200 = "NVIDIA DGX H200 datasheet 2024: 8 ConnectX-7 400 Gb/s for 8 GPUs"
_DGX_B200 = "NVIDIA DGX B200 user guide 2025: 8 ConnectX-7 400 Gb/s for 8 GPUs"
_DGX_B300 = "NVIDIA DGX B300 page 2026: 8 ConnectX-8 800 Gb/s for 8 GPUs"
_GB200 = "NVIDIA DGX GB200 user guide 2025: 4 ConnectX-7 400 Gb/s for 4 GPUs"
_GB300 = "NVIDIA GB300 NVL72 reference 2025: 4 ConnectX-8 800 Gb/s for 4 GPUs"
_MI300X = "Azure ND MI300X v5, 2024: 8 NICs of 400 Gb/s for 8 GPUs"
_PCIE_BOX = "a usual server of 8 PCIe cards with two 100 Gb/s NICs; an assumption"

SYSTEMS: dict[str, System] = {
    "dgx-v100": _dgx(
        "v100-32", "nvlink2-mesh", infiniband("InfiniBand EDR", 100, 4, 8, _DGX1), _DGX1
    ),
    "dgx2-v100": _dgx(
        "v100-32", "nvlink2", infiniband("InfiniBand EDR", 100, 8, 16, _DGX2), _DGX2, 16
    ),
    "dgx-a100-40": _dgx(
        "a100-40",
        "nvlink3",
        infiniband("InfiniBand HDR", 200, 8, 8, _DGX_A100),
        _DGX_A100,
    ),
    "dgx-a100": _dgx(
        "a100-80",
        "nvlink3",
        infiniband("InfiniBand HDR", 200, 8, 8, _DGX_A100),
        _DGX_A100,
    ),
    "dgx-h100": _dgx(
        "h100-80",
        "nvlink4",
        infiniband("InfiniBand NDR", 400, 8, 8, _DGX_H100),
        _DGX_H100,
    ),
    "dgx-h200": _dgx(
        "h200-141",
        "nvlink4",
        infiniband("InfiniBand NDR", 400, 8, 8, _DGX_H200),
        _DGX_H200,
    ),
    "dgx-b200": _dgx(
        "b200-180",
        "nvlink5",
        infiniband("InfiniBand NDR", 400, 8, 8, _DGX_B200),
        _DGX_B200,
    ),
    "dgx-b300": _dgx(
        "b300-270",
        "nvlink5",
        infiniband("InfiniBand XDR", 800, 8, 8, _DGX_B300),
        _DGX_B300,
    ),
    "gb200-nvl72": _rack(
        "gb200-186", infiniband("InfiniBand NDR", 400, 4, 4, _GB200), _GB200
    ),
    "gb300-nvl72": _rack(
        "gb300-279", infiniband("InfiniBand XDR", 800, 4, 4, _GB300), _GB300
    ),
    "mi300x": _dgx(
        "mi300x-192",
        "infinity-fabric",
        infiniband("400 Gb/s RDMA", 400, 8, 8, _MI300X),
        _MI300X,
    ),
    "a40-pcie": _dgx(
        "a40-48", "pcie4", infiniband("100 Gb/s RDMA", 100, 2, 8, _PCIE_BOX), _PCIE_BOX
    ),
    "l40s-pcie": _dgx(
        "l40s-48", "pcie4", infiniband("100 Gb/s RDMA", 100, 2, 8, _PCIE_BOX), _PCIE_BOX
    ),
    "rtx3090-pc": _pc("rtx3090-24", 10),  # assumption
    "rtx4090-pc": _pc("rtx4090-24", 10),  # assumption
    "rtx5090-pc": _pc("rtx5090-32", 10, "pcie5"),  # assumption
    "rtx3090-pc-1gbe": _pc("rtx3090-24", 1),  # assumption
    "rtx4090-pc-1gbe": _pc("rtx4090-24", 1),  # assumption
    "rtx5090-pc-1gbe": _pc("rtx5090-32", 1, "pcie5"),  # assumption
}

#: Other names for the same machines: HGX boards are what DGX systems are built on.
ALIASES: dict[str, str] = {
    "dgx-a100-80": "dgx-a100",
    "dgx1-v100": "dgx-v100",
    "hgx-a100": "dgx-a100",
    "hgx-a100-40": "dgx-a100-40",
    "hgx-a100-80": "dgx-a100",
    "hgx-b200": "dgx-b200",
    "hgx-b300": "dgx-b300",
    "hgx-h100": "dgx-h100",
    "hgx-h200": "dgx-h200",
}


def system_document(name: str, nodes: int) -> ClusterDocument:
    """``nodes`` units of a known system on one non-blocking network.

    Args:
        name: A key of :data:`SYSTEMS`.
        nodes: How many units.
    """
    system = SYSTEMS[name]
    levels = []
    if system.hosts > 1:
        levels.append(
            Level(name="NVLink domain", hosts=system.hosts, link=system.inside)
        )
    if nodes > 1:
        levels.append(Level(name=system.outside.name, link=system.outside))
    return ClusterDocument(
        name=name if nodes == 1 else f"{name} x {nodes}",
        device_types=(device_type(system.device),),
        hosts=(
            HostGroup(
                name=name,
                count=nodes * system.hosts,
                devices_per_host=system.devices_per_host,
                device=system.device,
                link=system.inside,
            ),
        ),
        levels=tuple(levels),
        source=system.source,
    )


def internet_pcs(nodes: int) -> ClusterDocument:
    """Home PCs over the internet: one in two an RTX 3090, the rest RTX 4090.

    Args:
        nodes: How many PCs.
    """
    link = Link(
        name="internet",
        bandwidth_bytes_per_s=gbit_per_s(0.1),  # Borzunov et al. 2023, Petals
        latency_s=50e-3,  # Borzunov et al. 2023, Petals: 100 ms round trip
        source="Borzunov et al. 2023, Petals: 100 Mbit/s, 100 ms round trip",
    )
    older = (nodes + 1) // 2  # assumption
    counts = {"rtx3090-24": older, "rtx4090-24": nodes - older}
    used = {device: count for device, count in counts.items() if count}
    return ClusterDocument(
        name="internet-pcs" if nodes == 1 else f"internet-pcs x {nodes}",
        device_types=tuple(device_type(device) for device in used),
        hosts=tuple(
            HostGroup(
                name=f"{device.rpartition('-')[0]} PC",
                count=count,
                devices_per_host=1,
                device=device,
                link=LINKS["pcie4"],
            )
            for device, count in used.items()
        ),
        levels=(Level(name="internet", link=link),) if nodes > 1 else (),
        source="one GPU a PC; the mix is an assumption",
    )


def ramp() -> ClusterDocument:
    """The optical RAMP cluster of PAC-ML: 4 groups x 4 racks x 2 servers of one A100.

    Every pair of servers has a channel of its own, so all levels have the same link;
    they are there to say which servers share a rack and a communication group.

    Source: Parsonson et al. 2023, arXiv 2301.13799; Ottino et al. 2022, RAMP.
    """
    channel = Link(
        name="optical channel",
        bandwidth_bytes_per_s=1.6e12 / 4,  # Parsonson et al. 2023: 1.6 TB/s a node
        latency_s=50e-9 + 2 * 100e-9,  # Parsonson et al. 2023: propagation, twice I/O
        source="Parsonson et al. 2023, arXiv 2301.13799",
    )
    worker = device_type("a100-80").model_copy(
        update={
            "name": "a100-ramp",
            "memory_bytes": 80e9,  # Parsonson et al. 2023
            "source": "NVIDIA A100 datasheet, 2021; memory: Parsonson et al. 2023",
        }
    )
    return ClusterDocument(
        name="ramp",
        device_types=(worker,),
        hosts=(
            HostGroup(
                name="server",
                count=32,  # Parsonson et al. 2023: 4 x 4 x 2
                devices_per_host=1,
                device=worker.name,
                link=channel,
            ),
        ),
        topology="ramp",
        levels=(
            Level(name="rack", hosts=2, link=channel),  # Parsonson et al. 2023
            Level(
                name="communication group",
                hosts=8,  # Parsonson et al. 2023: 4 racks of 2 servers
                link=channel,
            ),
            Level(name="RAMP", link=channel),
        ),
        source="Parsonson et al. 2023, arXiv 2301.13799",
    )
