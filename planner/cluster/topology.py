"""Who is joined to whom, and how fast: what all networks have in common.

Two shapes of network. In a *hierarchical* one devices sit in hosts, hosts on switches,
switches on switches: two devices meet at the innermost level they share and nothing of
size n x n is stored. In a *matrix* one every pair has its own link.

Both number their levels from the inside: level 0 is the host, the last level joins
everything.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from planner.schema.cluster import ClusterDocument

__all__ = ["FloatArray", "IntArray", "Topology", "host_of_device"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Topology(Protocol):
    """What :mod:`planner.cluster.levels` needs to know of a network."""

    @property
    def num_devices(self) -> int:
        """Devices in the network."""

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, innermost first."""

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """Per level, which switch each device hangs on. Each of shape [n]."""

    @property
    def level_sizes(self) -> tuple[int, ...] | None:
        """Devices under one switch of each level; None if they differ anywhere."""

    @property
    def has_equal_links(self) -> bool:
        """True if at each level all links are alike."""

    def links(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """Bandwidth (bytes/s) and latency (s) from devices a to devices b.

        Args:
            a: Device ids. Shape [...].
            b: Device ids, of the same shape.
        """

    def slowest_by_level(
        self, groups: IntArray, in_host: int
    ) -> tuple[FloatArray, FloatArray]:
        """Slowest link between two members of one group, at each level.

        Args:
            groups: Device ids, one group a row. Shape [g, d].
            in_host: Members that join inside a host: where its devices are meshed,
                that decides how many cables each uses at a time.

        Returns:
            Bandwidth and latency, shape [levels]; infinite bandwidth and zero latency
            where no two members meet.
        """


def host_of_device(document: ClusterDocument) -> IntArray:
    """Host index of every device. Shape [n]."""
    counts = [group.count for group in document.hosts]
    sizes = np.repeat([group.devices_per_host for group in document.hosts], counts)
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
