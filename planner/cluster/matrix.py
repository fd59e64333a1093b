"""Networks in which every pair of devices has a link of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.cluster.topology import FloatArray, IntArray, host_of_device
from planner.errors import TopologyError
from planner.schema.cluster import ClusterDocument

__all__ = ["MatrixTopology", "refuse_holes"]

#: Entries of one block of pairwise links; bounds the memory of an enumeration.
_PAIRS_AT_ONCE = 1 << 21


class MatrixTopology:
    """Every pair of devices has its own link; hosts are recognised as level 0."""

    def __init__(self, document: ClusterDocument) -> None:
        matrices = document.matrices
        if matrices is None:
            raise TopologyError(
                f"cluster {document.name!r} has topology 'matrix' but no matrices"
            )
        self._bandwidth = np.array(matrices.bandwidth_bytes_per_s, dtype=float)
        self._latency = np.array(matrices.latency_s, dtype=float)
        refuse_holes(self._bandwidth, self._latency)
        np.fill_diagonal(self._bandwidth, np.inf)
        np.fill_diagonal(self._latency, 0.0)
        hosts = host_of_device(document)
        self._domains: tuple[IntArray, ...] = (hosts, np.zeros_like(hosts))
        for array in (self._bandwidth, self._latency, *self._domains):
            array.setflags(write=False)

    @property
    def num_devices(self) -> int:
        """Devices in the network."""
        return len(self._bandwidth)

    @property
    def matrices(self) -> tuple[FloatArray, FloatArray]:
        """Bandwidth (bytes/s) and latency (s) of every pair. Shapes [n, n]."""
        return self._bandwidth, self._latency

    @property
    def level_names(self) -> tuple[str, ...]:
        """Inside one host, and between hosts."""
        return ("host", "network")

    @property
    def domains(self) -> tuple[IntArray, ...]:
        """Host of each device, and one network over all."""
        return self._domains

    @property
    def level_sizes(self) -> tuple[int, ...] | None:
        """None: a matrix is always enumerated."""
        return None

    @property
    def has_equal_links(self) -> bool:
        """True if every pair has the same link."""
        off = ~np.eye(self.num_devices, dtype=bool)
        if not off.any():
            return True
        bandwidth, latency = self._bandwidth[off], self._latency[off]
        return bool(np.ptp(bandwidth) == 0 and np.ptp(latency) == 0)

    def links(self, a: IntArray, b: IntArray) -> tuple[FloatArray, FloatArray]:
        """Entries [a][b] of the matrices."""
        return self._bandwidth[a, b], self._latency[a, b]

    def slowest_by_level(
        self, groups: IntArray, in_host: int
    ) -> tuple[FloatArray, FloatArray]:
        """Over all ordered pairs of each group, in blocks that bound the memory."""
        hosts = self._domains[0]
        bandwidth, latency = np.full(2, np.inf), np.zeros(2)
        for a, b in _pairs(groups):
            band, wait = self.links(a, b)
            inside = hosts[a] == hosts[b]
            for level, chosen in enumerate((inside & (a != b), ~inside)):
                if chosen.any():
                    bandwidth[level] = min(bandwidth[level], band[chosen].min())
                    latency[level] = max(latency[level], wait[chosen].max())
        return bandwidth, latency


def _pairs(groups: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    count, degree = groups.shape
    rows = max(1, _PAIRS_AT_ONCE // (degree * degree))
    columns = max(1, min(degree, _PAIRS_AT_ONCE // degree))
    for start in range(0, count, rows):
        block = groups[start : start + rows]
        for left in range(0, degree, columns):
            a = block[:, left : left + columns, None]
            shape = (len(block), a.shape[1], degree)
            yield (
                np.broadcast_to(a, shape),
                np.broadcast_to(block[:, None, :], shape),
            )


def refuse_holes(bandwidth: FloatArray, latency: FloatArray) -> None:
    """Check that every ordered pair of devices has a link.

    Args:
        bandwidth: Bytes/s; NaN is a missing link, the diagonal is not read.
            Shape [n, n].
        latency: Seconds, likewise.

    Raises:
        TopologyError: Naming the first pair without one.
    """
    holes = np.isnan(bandwidth) | np.isnan(latency)
    np.fill_diagonal(holes, False)
    if holes.any():
        first, second = (int(i) for i in np.argwhere(holes)[0])
        more = int(holes.sum()) - 1
        raise TopologyError(
            f"missing link from device {first} to device {second}"
            f"{f' (and {more} more)' if more else ''}: give its "
            f"bandwidth_bytes_per_s and latency_s"
        )
