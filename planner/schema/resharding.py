"""Resharding of one tensor between two meshes: tiles, unit tasks, and their order.

A tensor lies in tiles on a source mesh and is to lie in other tiles on a destination
mesh, whose devices are others. A *unit task* brings what a tile of the source and a
tile of the destination have in common to every device that holds the latter. Which
device sends each, and in which order, is for :mod:`planner.simulate.resharding` to
choose; :mod:`executors.communication.resharding` runs it.

Source: Zhuang et al. 2023, On Optimizing the Communication of Model Parallelism,
arXiv 2211.05322, section 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import StrategyError

__all__ = [
    "Box",
    "Hop",
    "MeshLayout",
    "Resharding",
    "Transfer",
    "UnitTask",
    "hops_of",
    "unit_tasks",
]

#: First and last index of each dimension, half-open.
Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """Tiles of a tensor on hosts of equally many devices.

    Device i of the mesh is device i % devices_per_host of host i // devices_per_host.

    Attributes:
        hosts: Hosts of the mesh.
        devices_per_host: Devices of each.
        split: For each dimension of the tensor the axes of the mesh that split it:
            ``""`` none, ``"h"`` hosts, ``"d"`` devices of a host, ``"hd"`` both, hosts
            outermost. An axis that splits no dimension holds replicas.

    Raises:
        StrategyError: If a degree is not positive, or an axis is unknown or splits two
            dimensions.
    """

    hosts: int
    devices_per_host: int
    split: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise StrategyError(
                f"a mesh of {self.hosts} hosts x {self.devices_per_host} devices; use "
                f"1 or more of both"
            )
        for axes in self.split:
            if axes not in ("", "h", "d", "hd"):
                raise StrategyError(
                    f"split={self.split} has {axes!r}; use '', 'h', 'd' or 'hd'"
                )
        used = "".join(self.split)
        for axis in "hd":
            if used.count(axis) > 1:
                raise StrategyError(
                    f"split={self.split} has {axis!r} twice; an axis of a mesh splits "
                    f"one dimension, use it once"
                )

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.hosts * self.devices_per_host

    def host_of(self, device: int) -> int:
        """Host that a device is on."""
        return device // self.devices_per_host

    def tile(self, device: int, shape: Sequence[int]) -> Box:
        """Return what a device holds of a tensor.

        Args:
            device: Device of the mesh, from 0.
            shape: The whole tensor's, one size for each dimension of ``split``.
        Raises:
            StrategyError: If the numbers of dimensions differ or a size does not
                divide.
        """
        if len(shape) != len(self.split):
            raise StrategyError(
                f"shape={tuple(shape)} has {len(shape)} dimensions, split={self.split} "
                f"tells of {len(self.split)}; give one entry for each"
            )
        host, within = divmod(device, self.devices_per_host)
        box = []
        for size, axes in zip(shape, self.split, strict=True):
            ways, index = 1, 0
            for axis in axes:
                degree = self.hosts if axis == "h" else self.devices_per_host
                ways *= degree
                index = index * degree + (host if axis == "h" else within)
            if size % ways:
                raise StrategyError(
                    f"shape={tuple(shape)}: {ways} tiles do not divide {size} along "
                    f"{axes!r}; use a multiple of {ways}"
                )
            step = size // ways
            box.append((index * step, index * step + step))
        return tuple(box)

    def tiles(self, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
        """Return the devices that hold each tile, by their first device."""
        found: dict[Box, list[int]] = {}
        for device in range(self.num_devices):
            found.setdefault(self.tile(device, shape), []).append(device)
        return {box: tuple(devices) for box, devices in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTask:
    """Part of a tensor that goes to all replicas of one tile at once.

    Attributes:
        box: Part of the whole tensor.
        senders: Devices of the source mesh that hold it, one of which sends.
        receivers: Devices of the destination mesh that get it.
    """

    box: Box
    senders: tuple[int, ...]
    receivers: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Elements of the part."""
        return math.prod(stop - start for start, stop in self.box)


def unit_tasks(
    shape: Sequence[int], source: MeshLayout, destination: MeshLayout
) -> tuple[UnitTask, ...]:
    """Return all unit tasks: by tile of the destination, then of the source.

    Args:
        shape: The whole tensor's.
        source: Where it lies.
        destination: Where it is to lie, on other devices.
    Raises:
        StrategyError: As :meth:`MeshLayout.tile`.
    """
    found = []
    have = source.tiles(shape)
    for wanted, receivers in destination.tiles(shape).items():
        for held, senders in have.items():
            box = tuple(
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(wanted, held, strict=True)
            )
            if all(start < stop for start, stop in box):
                found.append(UnitTask(box=box, senders=senders, receivers=receivers))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A unit task and the device that sends it."""

    task: UnitTask
    sender: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """Transfers that bring one tensor from a mesh to another, in order.

    Attributes:
        shape: The whole tensor's.
        source: Where it lies.
        destination: Where it is to lie.
        transfers: In the order in which every device takes part in them.
    """

    shape: tuple[int, ...]
    source: MeshLayout
    destination: MeshLayout
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One message of a transfer: devices pass a part on along a chain.

    Attributes:
        sender: Device that sends; of the source mesh in the first hop, else of the
            destination mesh.
        receiver: Device of the destination mesh.
        first: Whether the sender is of the source mesh.
        crosses: Whether the two are on different hosts.
    """

    sender: int
    receiver: int
    first: bool
    crosses: bool


def hops_of(transfer: Transfer, destination: MeshLayout) -> tuple[Hop, ...]:
    """Return the chain of a transfer, which enters every host once.

    From the sender to the receivers, host by host: with pieces that follow each other
    it takes about as long as one message, as a pipelined broadcast does.
    """
    order = sorted(transfer.task.receivers)
    found = [Hop(sender=transfer.sender, receiver=order[0], first=True, crosses=True)]
    for one, next_one in itertools.pairwise(order):
        crosses = destination.host_of(one) != destination.host_of(next_one)
        found.append(Hop(sender=one, receiver=next_one, first=False, crosses=crosses))
    return tuple(found)
