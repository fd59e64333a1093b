"""What stands around an accelerator: devices of a host, links, network interfaces."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster.presets import known_links
from planner.schema.cluster import Link

__all__ = ["HOSTS_OF_DEVICES", "HostKind", "host_kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKind:
    """A host and its place in a network.

    Attributes:
        devices: That one host has when it is full.
        inside: Link between devices of a host, and of a domain.
        nics: Network interfaces of a host for computation.
        gbits: Rate of one of them, Gbit/s and direction.
        network: What people call them.
        rdma: False for TCP.
        domain: Devices of all hosts that ``inside`` joins; None for one host, 0 for
            all that there are.
        source: Where counts and rates are from.
    """

    devices: int
    inside: Link
    nics: int
    gbits: float
    network: str
    rdma: bool = True
    domain: int | None = None
    source: str


def host_kind(
    inside: str,
    nics: int,
    gbits: float,
    network: str,
    source: str,
    devices: int = 8,  # NVIDIA DGX datasheets 2017 to 2025
    *,
    rdma: bool = True,
    domain: int | None = None,
) -> HostKind:
    """A :class:`HostKind`, its link by name."""
    return HostKind(
        devices=devices,
        inside=_LINKS[inside],
        nics=nics,
        gbits=gbits,
        network=network,
        rdma=rdma,
        domain=domain,
        source=source,
    )


def _link(name: str, bandwidth: float, source: str, *, mesh: bool = False) -> Link:
    return Link(
        name=name,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=_HOP_S,
        mesh=mesh,
        source=source,
    )


_HOP_S = 2e-6  # assumption: as NVLink and PCIe
_LINKS: dict[str, Link] = {
    **known_links(),
    "xgmi-mi250": _link(
        "Infinity Fabric", 50e9, "ROCm, MI250 page, 2026: 50 GB/s a link", mesh=True
    ),
    "xgmi-mi300a": _link(
        "Infinity Fabric", 128e9, "AMD MI300A data sheet 2023: 2 x 64 a pair", mesh=True
    ),
    "xgmi-mi355x": _link(
        "Infinity Fabric", 76.8e9, "AMD MI355X data sheet 2025: 153.6 both", mesh=True
    ),
    "gaudi2": _link(
        "RoCE", 37.5e9, "Intel Gaudi 2 white paper 2022: 3 x 100 Gb/s a pair", mesh=True
    ),
    "gaudi3": _link(
        "RoCE", 75e9, "Intel Gaudi 3 white paper 2024: 3 x 200 Gb/s a pair", mesh=True
    ),
    "xe": _link(
        "Xe Link", 26.5e9, "assumption: a link of 53 GB/s both ways a pair", mesh=True
    ),
    "hccs": _link("HCCS", 28e9, "assumption: 392 GB/s both ways, 7 peers", mesh=True),
    "neuronlink2": _link("NeuronLink-v2", 192e9, "assumption: 384 GB/s both ways"),
    "neuronlink3": _link("NeuronLink-v3", 512e9, "assumption: 1 TB/s both ways"),
    "neuronlink4": _link("NeuronLink-v4", 1280e9, "AWS Neuron 2025: 2.56 TB/s, halved"),
    "ici2": _link("ICI", 248e9, "Jouppi et al. 2020: 4 links of 496 Gbit/s"),
    "ici3": _link("ICI", 328e9, "Jouppi et al. 2020: 4 links of 656 Gbit/s"),
    "ici4": _link("ICI", 300e9, "Google Cloud TPU v4 page 2026: 2,400 Gbit/s"),
    "ici5e": _link("ICI", 200e9, "Google Cloud TPU v5e page 2026: 400 GB/s both ways"),
    "ici5p": _link("ICI", 600e9, "Google Cloud TPU v5p page 2026: 4,800 Gbit/s"),
    "ici7": _link("ICI", 600e9, "Google Cloud Ironwood page 2025: 1.2 TB/s both ways"),
    "ici6e": _link("ICI", 400e9, "Google Cloud TPU v6e page 2026: 800 GB/s both ways"),
}

_HDR = host_kind("nvlink3", 8, 200, "InfiniBand HDR", "NVIDIA DGX A100 datasheet 2021")
_NDR = host_kind("nvlink4", 8, 400, "InfiniBand NDR", "NVIDIA DGX H100 datasheet 2023")
_B200 = host_kind(
    "nvlink5", 8, 400, "InfiniBand NDR", "NVIDIA DGX B200 user guide 2025"
)
_B300 = host_kind("nvlink5", 8, 800, "InfiniBand XDR", "NVIDIA DGX B300 page 2026")
_DGX1 = host_kind(
    "nvlink2-mesh", 4, 100, "InfiniBand EDR", "NVIDIA DGX-1 whitepaper 2017"
)
_DGX2 = host_kind(
    "nvlink2", 8, 100, "InfiniBand EDR", "NVIDIA DGX-2 datasheet 2018", 16
)
_PCIE_SOURCE = "a usual server of 8 PCIe cards and two 100 Gb/s NICs: an assumption"
_PCIE3 = host_kind("pcie3", 2, 100, "100 Gb/s RDMA", _PCIE_SOURCE)  # assumption
_PCIE4 = host_kind("pcie4", 2, 100, "100 Gb/s RDMA", _PCIE_SOURCE)  # assumption
_PCIE5 = host_kind("pcie5", 2, 200, "200 Gb/s RDMA", _PCIE_SOURCE)  # assumption
_DESK = "a workstation with one port of 10 Gb/s: an assumption"
_DESK3 = host_kind("pcie3", 1, 10, "10 GbE", _DESK, rdma=False)  # assumption
_DESK4 = host_kind("pcie4", 1, 10, "10 GbE", _DESK, rdma=False)  # assumption
_DESK5 = host_kind("pcie5", 1, 10, "10 GbE", _DESK, rdma=False)  # assumption
_OAM = host_kind("infinity-fabric", 8, 400, "400 Gb/s RDMA", "Azure ND MI300X v5, 2024")
_CRAY = "HPE Cray EX, Frontier and LUMI, 2022: 4 Slingshot NICs of 200 Gb/s"
_MI250 = host_kind("xgmi-mi250", 4, 200, "Slingshot", _CRAY)  # HPE Cray EX 2022
_GRACE = "Alps, 2024: 4 GH200 and 4 Slingshot NICs of 200 Gb/s"


def _nvl72(gbits: float, source: str) -> HostKind:
    return host_kind(
        "nvlink5",
        4,  # NVIDIA DGX GB200 user guide 2025
        gbits,
        "InfiniBand",
        source,
        4,  # NVIDIA DGX GB200 user guide 2025: 18 trays of 4
        domain=72,  # NVIDIA DGX GB200 user guide 2025
    )


def _tpu(link: str, devices: int) -> HostKind:
    source = "Google Cloud TPU pages 2026: a slice is one torus"
    return host_kind(
        link, 2, 100, "data centre", source, devices, domain=0
    )  # v5e page 2026


#: What a device stands in when its row does not say, by name of the device type.
HOSTS_OF_DEVICES: dict[str, HostKind] = {
    "k80-12": _PCIE3,
    "p40-24": _PCIE3,
    "gtx1080ti-11": _DESK3,
    "titanxp-12": _DESK3,
    "titanv-12": _DESK3,
    "p100-16": host_kind("nvlink1", 4, 100, "InfiniBand EDR", "NVIDIA DGX-1, 2016"),
    "v100-16": _DGX1,
    "v100-32": _DGX1,
    "v100pcie-16": _PCIE3,
    "v100pcie-32": _PCIE3,
    "t4-16": _PCIE3,
    "rtx2080-8": _DESK3,
    "rtx2080ti-11": _DESK3,
    "titanrtx-24": _PCIE3,
    "quadrortx6000-24": _PCIE3,
    "quadrortx8000-48": _PCIE3,
    "a100-40": _HDR,
    "a100-80": _HDR,
    "a100pcie-40": _PCIE4,
    "a100pcie-80": _PCIE4,
    "a800-80": host_kind(
        "nvlink-400", 8, 200, "InfiniBand HDR", "NVIDIA HGX A800 as DGX A100, 2022"
    ),
    "a30-24": _PCIE4,
    "a10-24": _PCIE4,
    "a10g-24": host_kind("pcie4", 1, 100, "EFA", "AWS g5.48xlarge, 2021"),
    "a40-48": _PCIE4,
    "a4000-16": _PCIE4,
    "a5000-24": _PCIE4,
    "a5500-24": _PCIE4,
    "a6000-48": _PCIE4,
    "rtx5000ada-32": _PCIE4,
    "rtx6000ada-48": _PCIE4,
    "l4-24": _PCIE4,
    "l20-48": _PCIE4,
    "l40-48": _PCIE4,
    "l40s-48": _PCIE4,
    "rtx3080-10": _DESK4,
    "rtx3090-24": _DESK4,
    "rtx3090ti-24": _DESK4,
    "rtx4080-16": _DESK4,
    "rtx4090-24": _DESK4,
    "rtx5090-32": _DESK5,
    "rtxpro6000-96": _PCIE5,
    "h100-80": _NDR,
    "h100-96": _NDR,
    "h100pcie-80": _PCIE5,
    "h100nvl-94": _PCIE5,
    "h800-80": host_kind(
        "nvlink-400", 8, 400, "InfiniBand NDR", "DeepSeek-V3 report, 2024: 8 NICs"
    ),
    "h20-96": _NDR,
    "h200-141": host_kind(
        "nvlink4", 8, 400, "InfiniBand NDR", "NVIDIA DGX H200 datasheet 2024"
    ),
    "gh200-96": host_kind("nvlink4", 4, 200, "Slingshot", _GRACE, 4),  # Alps 2024
    "gh200-144": host_kind("nvlink4", 4, 200, "Slingshot", _GRACE, 4),  # Alps 2024
    "b100-180": _B200,
    "b200-180": _B200,
    "gb200-186": _nvl72(400, "NVIDIA DGX GB200 user guide 2025"),
    "b300-270": _B300,
    "gb300-279": _nvl72(800, "NVIDIA GB300 NVL72 reference 2025"),
    "mi50-16": _PCIE3,
    "mi50-32": _PCIE3,
    "mi100-32": _PCIE4,
    "mi210-64": _PCIE4,
    "mi250-64": _MI250,
    "mi250x-64": _MI250,
    "mi300a-128": host_kind("xgmi-mi300a", 4, 200, "Slingshot", "El Capitan, 2024", 4),
    "mi300x-192": _OAM,
    "mi325x-256": _OAM,
    "mi350x-288": host_kind("xgmi-mi355x", 8, 400, "400 Gb/s RDMA", "OCI MI355X, 2025"),
    "mi355x-288": host_kind("xgmi-mi355x", 8, 400, "400 Gb/s RDMA", "OCI MI355X, 2025"),
    "gaudi2-96": host_kind(
        "gaudi2", 8, 300, "RoCE", "Intel HLS-Gaudi 2, 2022: 24 ports"
    ),
    "gaudi3-128": host_kind(
        "gaudi3", 8, 600, "RoCE", "Intel HLB-325, 2024: 3 ports each"
    ),
    "max1550-128": host_kind(
        "xe", 8, 200, "Slingshot", "ALCF, Aurora 2024: 6 cards and 8 NICs", 6
    ),
    "max1100-48": _PCIE5,
    "ascend910-32": host_kind("hccs", 8, 100, "RoCE", "Huawei Atlas 800, 2019"),
    "ascend910b-64": host_kind("hccs", 8, 200, "RoCE", "Huawei Atlas 800T A2, 2023"),
    "trainium1-32": host_kind(
        "neuronlink2", 8, 100, "EFA", "AWS trn1.32xlarge, 2023", 16
    ),
    "trainium2-96": host_kind(
        "neuronlink3", 16, 200, "EFA", "AWS trn2.48xlarge, 2024", 16
    ),
    "trainium3-144": host_kind(
        "neuronlink4", 16, 200, "EFA", "assumption: network as trn2", 16
    ),
    "tpuv7-192": _tpu("ici7", 4),  # Google Cloud Ironwood page 2025
    "tpuv2-16": _tpu("ici2", 4),  # Jouppi et al. 2020
    "tpuv3-32": _tpu("ici3", 4),  # Jouppi et al. 2020
    "tpuv4-32": _tpu("ici4", 4),  # Google Cloud TPU v4 page 2026
    "tpuv5e-16": _tpu("ici5e", 8),  # Google Cloud TPU v5e page 2026
    "tpuv5p-95": _tpu("ici5p", 4),  # Google Cloud TPU v5p page 2026
    "tpuv6e-32": _tpu("ici6e", 8),  # Google Cloud TPU v6e page 2026
}
