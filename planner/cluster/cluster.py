"""The devices at hand and the links between them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.cluster import build
from planner.cluster.counts import whole_number
from planner.cluster.view import ClusterView
from planner.errors import ClusterError
from planner.schema.cluster import ClusterDocument, DeviceType, Link
from planner.schema.probe import ProbeDocument

__all__ = ["Cluster"]


@dataclass(frozen=True, eq=False)
class Cluster(ClusterView):
    """Devices, numbered host by host, and the network that joins them.

    Homogeneous, mixed, many-site and home-PC clusters are all of this class. It holds
    a document and derives everything else on demand; a hierarchical network of n
    devices takes memory in proportion to n.

    Attributes:
        document: What is described; all that is saved.
        ref: What names the cluster on a command line: ``dgx-h100:4`` or a file.
    """

    @classmethod
    def from_preset(cls, name: str, nodes: int = 1) -> Cluster:
        """A cluster of known machines; see :func:`planner.cluster.cluster_names`.

        Args:
            name: ``"dgx-h100"``.
            nodes: How many of its unit (a host, a rack, a PC).

        Raises:
            UnknownNameError: If there is no such preset; suggests the nearest.
            ClusterError: If ``nodes`` is not at least 1, or more than there can be.
        """
        from planner.cluster.presets import preset_document

        document = preset_document(name, nodes)
        return cls(document, ref=name if nodes == 1 else f"{name}:{nodes}")

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read what people type: a preset, a file, or this machine.

        Args:
            text: ``"dgx-h100"``, ``"dgx-h100:2048"``, ``"local"``, ``"local:4"``, or
                a path to a cluster (.json, .yaml, .yml) or a probe (.json).

        Raises:
            UnknownNameError: If it names nothing.
            ClusterError: If the count is not a number of at least 1.
            PlanFileError: If the file cannot be read or is malformed.
        """
        from planner.cluster.read import parse_cluster

        return parse_cluster(text)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster or a probe from JSON, or a cluster from YAML.

        Raises:
            PlanFileError: If the file cannot be read or is malformed.
            TopologyError: If two devices have no link.
        """
        from planner.cluster.read import read_cluster

        return read_cluster(path)

    @classmethod
    def from_document(
        cls, document: ClusterDocument, ref: str | None = None
    ) -> Cluster:
        """Wrap a document.

        Raises:
            TopologyError: If two devices have no link.
        """
        cluster = cls(document, ref=ref)
        if document.topology == "matrix":
            cluster.topology  # noqa: B018 -- builds it, which refuses holes
        return cluster

    @classmethod
    def from_matrices(
        cls,
        bandwidth: npt.ArrayLike,
        latency: npt.ArrayLike,
        device: DeviceType | Sequence[DeviceType],
        hosts: Sequence[int] | None = None,
        *,
        name: str = "matrix",
        source: str = "",
    ) -> Cluster:
        """A cluster whose every link is given.

        Args:
            bandwidth: Bytes/s from i to j; NaN or 0 is a missing link, the diagonal
                is not read. Shape [n, n].
            latency: Seconds, likewise (0 is a latency, NaN is missing). Shape [n, n].
            device: Type of all devices, or one a device.
            hosts: Host of each device, devices of one host side by side; None if each
                device is a host of its own.
            name: For people.
            source: Where the numbers are from.

        Raises:
            TopologyError: If two devices have no link; names both.
            ClusterError: If shapes or numbers contradict each other.
        """
        document = build.matrix_document(
            bandwidth, latency, device, hosts, name=name, source=source
        )
        return cls.from_document(document)

    @classmethod
    def detect(cls, processes: int | None = None) -> Cluster:
        """This machine: its GPUs if it has any, otherwise its CPU cores.

        Args:
            processes: Devices to offer. None for all GPUs, or for one CPU process a
                usable core.

        Raises:
            ClusterError: If ``processes`` is below 1, or more than there are GPUs.
        """
        from planner.cluster.detect import detect_document

        document = detect_document(processes)
        ref = "local" if processes is None else f"local:{processes}"
        return cls(document, ref=ref)

    @classmethod
    def from_probe(cls, probe: ProbeDocument, ref: str | None = None) -> Cluster:
        """The cluster that a probe measured."""
        from planner.cluster.measured import probed_document

        return cls(probed_document(probe), ref=ref)

    @classmethod
    def mixed(cls, *clusters: Cluster, level: Link, name: str = "") -> Cluster:
        """Join clusters, devices numbered in the order given.

        Args:
            clusters: At least two, of any kind.
            level: Link between devices of different clusters, per device.
            name: For people; the names joined by "+" if empty.

        Raises:
            ClusterError: If two clusters give one device type different numbers, or
                the levels of their networks cannot be said in one document.
        """
        return cls.from_document(build.mixed_document(clusters, level, name))

    def with_occupied(self, device_ids: Iterable[int]) -> Cluster:
        """The same cluster with exactly these devices taken, whatever was before.

        Raises:
            ClusterError: If an id is not that of a device.
        """
        given = [whole_number("occupied device", i, least=None) for i in device_ids]
        for wrong in (i for i in given if not 0 <= i < self.num_devices):
            raise ClusterError(
                f"occupied device {wrong} does not exist; {self.name} has devices 0 to "
                f"{self.num_devices - 1}"
            )
        ids = np.unique(np.array(given, dtype=np.int64))
        breaks = np.flatnonzero(np.diff(ids) > 1) + 1
        runs = np.split(ids, breaks) if ids.size else []
        ranges = tuple((int(run[0]), int(run[-1]) + 1) for run in runs)
        document = self.document.model_copy(update={"occupied": ranges})
        cluster = Cluster(document, ref=self.ref)
        # The network does not change with what is taken: build it once.
        cluster.__dict__["topology"] = self.topology
        return cluster
