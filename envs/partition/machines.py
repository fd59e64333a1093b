"""Machines that hosts of drawn clusters are: presets, rented instances, servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cluster.presets import ethernet, known_links, known_systems
from planner.schema.cluster import HostGroup, Link

__all__ = ["KNOWN", "UNSEEN", "Machine"]

#: Numbers of devices that a host may have.
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A host with up to eight devices of one type.

    Attributes:
        name: Name of the preset or the instance family.
        device: Name of the device type.
        inside: Link between its devices.
        outside: Link to other hosts, per device of a full host.
        shared: True if a host with fewer devices has the same network port, shared by
            fewer devices; otherwise the port shrinks with the host.
    """

    name: str
    device: str
    inside: Link
    outside: Link
    shared: bool = False

    @property
    def full(self) -> int:
        """Devices of the largest host."""
        return max(_SIZES)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a host may have."""
        return _SIZES

    def nic(self, devices: int) -> Link:
        """Return the link of one device to other hosts, for a host of some size."""
        if not self.shared:
            return self.outside
        rate = self.outside.bandwidth_bytes_per_s * self.full / devices
        return self.outside.model_copy(update={"bandwidth_bytes_per_s": rate})

    def host(self, devices: int, count: int = 1) -> HostGroup:
        """Return equal hosts, with their NIC set because other hosts may differ."""
        return HostGroup(
            name=f"{self.name} x {devices}",
            count=count,
            devices_per_host=devices,
            device=self.device,
            link=self.inside,
            nic=self.nic(devices),
        )


def _preset(name: str, *, shared: bool = False) -> Machine:
    system = known_systems()[name]
    return Machine(
        name=name,
        device=system.device,
        inside=system.inside,
        outside=system.outside,
        shared=shared,
    )


def _rented(name: str, device: str, inside: str, gbits: float) -> Machine:
    """Make a family of instances whose largest has eight devices and one port."""
    source = f"Amazon EC2 accelerated instance types, 2025: {gbits:g} Gbit/s for 8"
    return Machine(
        name=name,
        device=device,
        inside=known_links()[inside],
        outside=ethernet(gbits, 8, source),
    )


def _server(device: str, gbits: float, inside: str = "pcie4") -> Machine:
    """Make a server of cards with one port, as laboratories build them."""
    return Machine(
        name=f"{device.rpartition('-')[0]}-server",
        device=device,
        inside=known_links()[inside],
        outside=ethernet(gbits, 8, f"one {gbits:g} GbE port: an assumption"),
        shared=True,
    )


def _by_name(*machines: Machine) -> Mapping[str, Machine]:
    return {machine.name: machine for machine in machines}


#: Machines of all kinds of worlds but ``transfer``.
KNOWN: Mapping[str, Machine] = _by_name(
    _preset("dgx-v100"),
    _preset("dgx-a100-40"),
    _preset("dgx-a100"),
    _preset("dgx-h100"),
    _preset("a40-pcie", shared=True),
    _preset("l40s-pcie", shared=True),
    _rented("p3", "v100-16", "nvlink2-mesh", 25),  # Amazon EC2, 2025: p3.16xlarge
    _rented("p4d", "a100-40", "nvlink3", 400),  # Amazon EC2, 2025: p4d.24xlarge
    _rented("g4dn", "t4-16", "pcie3", 100),  # Amazon EC2, 2025: g4dn.metal
    _rented("g5", "a10g-24", "pcie4", 100),  # Amazon EC2, 2025: g5.48xlarge
    _server("rtx3090-24", 10),  # assumption
    _server("a6000-48", 25),  # assumption
)

#: Machines with device types that no other kind of world has.
UNSEEN: Mapping[str, Machine] = _by_name(
    _preset("dgx-h200"),
    _preset("dgx-b200"),
    _preset("mi300x"),
    _rented("g6", "l4-24", "pcie4", 100),  # Amazon EC2, 2025: g6.48xlarge
    _server("rtx4090-24", 10),  # assumption
    _server("rtx6000ada-48", 25),  # assumption
    _server("a30-24", 25),  # assumption
)
