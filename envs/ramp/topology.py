"""The RAMP cluster: communication groups of racks of servers, and blocks of them.

Source: Ottino et al. 2022, "RAMP: a flat nanosecond optical network and MPI operations
for distributed deep learning systems" (arXiv 2211.15226).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.errors import ClusterError

__all__ = ["RampTopology"]

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=True)
class RampTopology:
    """Servers of one device each, numbered group by group, rack by rack.

    Attributes:
        groups: Communication groups.
        racks: Racks in each group.
        servers: Servers in each rack.
        most_splits: Largest degree of a job.
        memory_bytes: Memory of each server.
        bandwidth_bytes_per_s: Bandwidth of all links of a server together.
        propagation_s: Propagation delay of a message.
        input_output_s: Delay of a message leaving or entering a server.
    """

    groups: int = 4
    racks: int = 4
    servers: int = 2
    most_splits: int = 16
    memory_bytes: float = 80e9
    bandwidth_bytes_per_s: float = 1.6e12
    propagation_s: float = 50e-9
    input_output_s: float = 100e-9

    def __post_init__(self) -> None:
        for name in ("groups", "racks", "servers", "most_splits"):
            if getattr(self, name) < 1:
                raise ClusterError(
                    f"{name}={getattr(self, name)}; a RAMP cluster has at least 1"
                )

    @property
    def num_servers(self) -> int:
        """Number of servers in the cluster."""
        return self.groups * self.racks * self.servers

    def shapes(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield blocks of a size as groups x racks x servers, in the order of trial.

        Squares over groups and racks first, then rows and columns; blocks larger than
        the cluster are left out.
        """
        found: dict[tuple[int, int, int], None] = {}
        for outer in range(1, size + 1):
            if size % outer:
                continue
            rest, side = size // outer, math.isqrt(size // outer)
            # Bounds as in the benchmark, which names groups and servers alone.
            if side * side == rest and side <= self.groups and outer <= self.servers:
                found[side, side, outer] = None
            if rest <= self.groups and outer <= self.servers:
                found[rest, 1, outer] = found[rest, outer, 1] = None
        found[size, 1, 1] = None
        for shape in found:
            limits = (self.groups, self.racks, self.servers)
            if all(have <= most for have, most in zip(shape, limits, strict=True)):
                yield shape

    def blocks(self, size: int) -> Index:
        """Return the servers of every block of a size, in the order of trial.

        Shape [blocks, size]; no rows if the cluster has no such block.
        """
        found = []
        for groups, racks, servers in self.shapes(size):
            for corner in np.ndindex(
                self.groups - groups + 1,
                self.racks - racks + 1,
                self.servers - servers + 1,
            ):
                cells = np.ndindex(groups, racks, servers)
                found.append(
                    [
                        self._number(
                            *(c + d for c, d in zip(corner, cell, strict=True))
                        )
                        for cell in cells
                    ]
                )
        return np.array(found, dtype=np.int64).reshape(-1, size)

    def _number(self, group: int, rack: int, server: int) -> int:
        return (group * self.racks + rack) * self.servers + server

    @cached_property
    def degrees(self) -> Index:
        """Degrees of a job: 1, and even ones that have a block. Shape [d]."""
        even = range(2, min(self.num_servers, self.most_splits) + 1, 2)
        return np.array([1, *(k for k in even if any(self.shapes(k)))], dtype=np.int64)
