"""The devices at hand and the links between them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from planner.cluster import levels
from planner.cluster.detect import detect_document
from planner.cluster.documents import (
    matrix_document,
    mixed_document,
    part_document,
    whole_number,
)
from planner.cluster.levels import AxisLevel
from planner.cluster.presets import preset_document
from planner.cluster.read import parse_cluster, probed_document, read_cluster
from planner.cluster.topology import (
    FloatArray,
    IntArray,
    Topology,
    host_of_device,
    topology_of,
)
from planner.errors import ClusterError
from planner.schema.base import fingerprint_bytes
from planner.schema.cluster import (
    ClusterDocument,
    CollectiveKind,
    DeviceType,
    Link,
    MeasuredCollective,
)
from planner.schema.plan_parts import ClusterReference
from planner.schema.probe import ProbeDocument
from planner.units import format_bytes, format_count, format_seconds

__all__ = ["Cluster"]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Cluster:
    """Devices, numbered host by host, and the network that joins them.

    Homogeneous, mixed, many-site and home-PC clusters are all of this class. It holds
    a document and derives everything else on demand, once; a hierarchical network of n
    devices takes memory in proportion to n.

    Attributes:
        document: The description; all that is saved.
        ref: Name of the cluster on a command line: ``dgx-h100:4`` or a file.
    """

    document: ClusterDocument
    ref: str | None = None
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    # -- Where it comes from ---------------------------------------------------------

    @classmethod
    def from_preset(cls, name: str, nodes: int = 1) -> Cluster:
        """Make a cluster of known machines; see :func:`planner.cluster.cluster_names`.

        Args:
            name: ``"dgx-h100"``.
            nodes: How many of its unit (a host, a rack, a PC).

        Raises:
            UnknownNameError: If there is no such preset; suggests the nearest.
            ClusterError: If ``nodes`` is not at least 1, or more than there can be.
        """
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
        document, ref = parse_cluster(text)
        return cls.from_document(document, ref=ref)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster or a probe from JSON, or a cluster from YAML.

        Raises:
            PlanFileError: If the file cannot be read or is malformed.
            TopologyError: If two devices have no link.
        """
        return cls.from_document(read_cluster(path), ref=os.fspath(path))

    @classmethod
    def from_document(
        cls, document: ClusterDocument, ref: str | None = None
    ) -> Cluster:
        """Make the cluster that a document describes.

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
        """Make a cluster whose every link is given.

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
        document = matrix_document(
            bandwidth, latency, device, hosts, name=name, source=source
        )
        return cls.from_document(document)

    @classmethod
    def detect(cls, processes: int | None = None) -> Cluster:
        """Describe this machine: its GPUs if it has any, otherwise its CPU cores.

        Args:
            processes: Devices to offer. None for all GPUs, or for one CPU process a
                usable core.

        Raises:
            ClusterError: If ``processes`` is below 1, or more than there are GPUs.
        """
        document = detect_document(processes)
        ref = "local" if processes is None else f"local:{processes}"
        return cls(document, ref=ref)

    @classmethod
    def from_probe(cls, probe: ProbeDocument, ref: str | None = None) -> Cluster:
        """Make the cluster that a probe measured."""
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
                the levels of their networks do not fit into one document.
        """
        documents = [cluster.document for cluster in clusters]
        return cls.from_document(mixed_document(documents, level, name))

    def part(self, device_ids: Iterable[int], name: str = "") -> Cluster:
        """Return some devices as a cluster of their own, numbered in the same order.

        Devices of a host that is divided take their share of its cores and memory.

        Args:
            device_ids: Each once.
            name: For people; the cluster's name and the ids if empty.

        Raises:
            ClusterError: If there are none, one is no device, or is given twice.
        """
        ids = sorted(whole_number("device", i, least=None) for i in device_ids)
        if not ids:
            raise ClusterError(
                f"no devices of {self.name} are given; give one at least"
            )
        for wrong in (i for i in ids if not 0 <= i < self.num_devices):
            raise ClusterError(
                f"device {wrong} does not exist; {self.name} has devices 0 to "
                f"{self.num_devices - 1}"
            )
        for one, following in itertools.pairwise(ids):
            if one == following:
                raise ClusterError(f"device {one} is given twice; give it once")
        title = name or f"{self.name}[{','.join(map(str, ids))}]"
        return Cluster.from_document(part_document(self.document, ids, title))

    def with_occupied(self, device_ids: Iterable[int]) -> Cluster:
        """Return the same cluster with exactly these devices taken.

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

    # -- What it is --------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name for people."""
        return self.document.name

    @cached_property
    def num_devices(self) -> int:
        """All devices, taken ones too."""
        return self.document.num_devices

    @property
    def device_types(self) -> tuple[DeviceType, ...]:
        """Kinds of devices."""
        return self.document.device_types

    @cached_property
    def topology(self) -> Topology:
        """The network as arrays.

        Raises:
            TopologyError: If two devices have no link.
        """
        return topology_of(self.document)

    @cached_property
    def type_index(self) -> IntArray:
        """Index into ``device_types`` of each device. Shape [n]."""
        order = {device.name: i for i, device in enumerate(self.device_types)}
        groups = self.document.hosts
        index = np.repeat(
            np.array([order[group.device] for group in groups], dtype=np.int64),
            [group.count * group.devices_per_host for group in groups],
        )
        index.setflags(write=False)
        return index

    @cached_property
    def host_of_device(self) -> IntArray:
        """Host of each device. Shape [n]."""
        hosts = host_of_device(self.document)
        hosts.setflags(write=False)
        return hosts

    @cached_property
    def free(self) -> IntArray:
        """Ids of devices that are not taken, ascending. Shape [free]."""
        mask = np.ones(self.num_devices, dtype=bool)
        for start, stop in self.document.occupied:
            mask[start:stop] = False
        ids = np.flatnonzero(mask).astype(np.int64)
        ids.setflags(write=False)
        return ids

    @property
    def num_free(self) -> int:
        """Devices that are not taken."""
        return len(self.free)

    @cached_property
    def is_uniform(self) -> bool:
        """True if no device, host or switch differs from another and none is taken."""
        used = np.unique(self.type_index)
        regular = self.topology.level_sizes is not None or len(self.free) == 1
        if self.document.topology == "matrix":
            sizes = np.bincount(self.host_of_device)
            regular = bool(sizes.min() == sizes.max())
        return (
            len(used) == 1
            and not self.document.occupied
            and regular
            and self.topology.has_equal_links
        )

    @cached_property
    def slowdown(self) -> FloatArray:
        """Factor by which each device computes slower while its whole host computes.

        Devices of a host over its compute slots, at least 1: four CPU processes on
        two cores each take twice as long. Shape [n].
        """
        groups = self.document.hosts
        factors = [
            max(1.0, group.devices_per_host / (group.compute_slots or np.inf))
            for group in groups
        ]
        return np.repeat(
            np.array(factors, dtype=float),
            [group.count * group.devices_per_host for group in groups],
        )

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of which devices there are and how they lie in hosts.

        Measured or estimated numbers, names and what is taken are left out: probing a
        machine a second time, or a busy evening on it, does not make it another one.
        """
        kinds = {device.name: device.backend for device in self.device_types}
        hosts: list[list[Any]] = []
        for group in self.document.hosts:
            kind = [group.devices_per_host, group.device, kinds[group.device]]
            if hosts and hosts[-1][1:] == kind:
                hosts[-1][0] += group.count
            else:
                hosts.append([group.count, *kind])
        data = {"hosts": hosts, "topology": self.document.topology}
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return fingerprint_bytes(text.encode())

    def reference(self) -> ClusterReference:
        """Reference that a plan keeps of this cluster."""
        counts = np.bincount(self.type_index, minlength=len(self.device_types))
        groups = self.document.hosts
        types = _runs((group.count, group.device) for group in groups)
        return ClusterReference(
            name=self.name,
            ref=self.ref,
            num_devices=self.num_devices,
            device_types={
                device.name: int(count)
                for device, count in zip(self.device_types, counts, strict=True)
                if count
            },
            hosts=_runs((group.count, group.devices_per_host) for group in groups),
            host_types=types if len(types) > 1 else (),
            aggregating=tuple(
                level.name for level in self.document.levels if level.aggregates
            ),
            fingerprint=self.fingerprint,
        )

    def describe(self) -> dict[str, str]:
        """Rows of a table of facts, in the order in which people ask for them."""
        return _describe(self.document, self.reference(), self.num_free)

    def __eq__(self, other: object) -> bool:
        """Equal documents make equal clusters, whatever they are called by."""
        if not isinstance(other, Cluster):
            return NotImplemented
        return self.document == other.document

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.name))

    # -- Links -------------------------------------------------------------------

    def link(self, a: int, b: int) -> tuple[float, float]:
        """Bandwidth (bytes/s) and latency (s) from device ``a`` to device ``b``.

        A device reaches itself with infinite bandwidth at once.

        Raises:
            ClusterError: If there is no such device.
        """
        for device in (a, b):
            if not 0 <= device < self.num_devices:
                raise ClusterError(
                    f"device {device} does not exist; {self.name} has devices 0 to "
                    f"{self.num_devices - 1}"
                )
        bandwidth, latency = self.topology.links(np.array(a), np.array(b))
        return float(bandwidth), float(latency)

    def axis_levels(
        self, degree: int, stride: int, device_ids: Sequence[int] | None = None
    ) -> tuple[AxisLevel, ...]:
        """Network levels that a mesh axis uses; see :func:`levels.axis_levels`.

        On hosts of 8 GPUs, degree 16 with stride 4 gives 2 members over NVLink, then
        8 over the network.

        Args:
            degree: Ranks in one communication group.
            stride: Distance in ranks between its neighbours.
            device_ids: Device of each rank; the free devices in order if None.

        Returns:
            Innermost first; ``members`` multiply to ``degree``.

        Raises:
            ClusterError: If degree x stride is more than the ranks there are.
        """
        ids, key = self._ranks(device_ids)
        place = ("axis", degree, stride, key)
        if place not in self._cache:
            aligned = key is None and self.num_free == self.num_devices
            self._cache[place] = levels.axis_levels(
                self.topology, ids, degree, stride, aligned=aligned
            )
        found: tuple[AxisLevel, ...] = self._cache[place]
        return found

    def boundary_links(
        self,
        pp: int,
        stride: int,
        device_ids: Sequence[int] | None = None,
        *,
        wrap: bool = False,
    ) -> tuple[FloatArray, FloatArray]:
        """Slowest link over each boundary of a pipeline, in either direction.

        Args:
            pp: Stages.
            stride: Ranks of one stage.
            device_ids: Device of each rank; the free devices in order if None.
            wrap: Add the way from the last stage back to the first.

        Returns:
            Bandwidth (bytes/s) and latency (s). Shape [pp - 1], or [pp] with ``wrap``.

        Raises:
            ClusterError: If pp x stride is more than the ranks there are.
        """
        ids, key = self._ranks(device_ids)
        place = ("boundary", pp, stride, wrap, key)
        if place not in self._cache:
            arrays = levels.boundary_links(self.topology, ids, pp, stride, wrap=wrap)
            for array in arrays:
                array.setflags(write=False)
            self._cache[place] = arrays
        found: tuple[FloatArray, FloatArray] = self._cache[place]
        return found

    def p2p_link(
        self, stride: int, device_ids: Sequence[int] | None = None
    ) -> tuple[float, float]:
        """Slowest link between any rank r and rank r + stride, in either direction.

        Returns:
            Bandwidth (bytes/s) and latency (s).

        Raises:
            ClusterError: If there is no rank ``stride``.
        """
        ids, _ = self._ranks(device_ids)
        pp = len(ids) // stride if stride >= 1 else 0
        if pp < 2:
            raise ClusterError(
                f"no rank lies stride={stride} after another among {len(ids)} devices; "
                f"use a stride from 1 to {len(ids) // 2}"
            )
        bandwidth, latency = self.boundary_links(pp, stride, device_ids)
        return float(bandwidth.min()), float(latency.max())

    def measured(
        self, kind: CollectiveKind, group_size: int
    ) -> MeasuredCollective | None:
        """Measurement of a collective by a probe, at this or the next larger size.

        None if no probe did, or only for smaller groups.
        """
        entries = [
            entry
            for entry in self.document.collectives
            if entry.kind == kind and entry.group_size >= group_size
        ]
        return min(entries, key=lambda entry: entry.group_size, default=None)

    def _ranks(self, device_ids: Sequence[int] | None) -> tuple[IntArray, bytes | None]:
        if device_ids is None:
            return self.free, None
        ids = np.asarray(device_ids, dtype=np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.num_devices):
            raise ClusterError(
                f"device_ids reach from {ids.min()} to {ids.max()}; {self.name} has "
                f"devices 0 to {self.num_devices - 1}"
            )
        return ids, ids.tobytes()


def _describe(
    document: ClusterDocument, reference: ClusterReference, num_free: int
) -> dict[str, str]:
    rows = {"name": document.name}
    num_hosts = sum(group.count for group in document.hosts)
    rows["devices"] = f"{reference.num_devices:,} on {num_hosts:,} hosts"
    if num_free < reference.num_devices:
        rows["free"] = f"{num_free:,}"
    for device in document.device_types:
        count = reference.device_types.get(device.name, 0)
        dtype, peak = _headline(device)
        rows[device.name] = (
            f"{count:,} x {format_bytes(device.memory_bytes)}, "
            f"{format_bytes(device.memory_bandwidth_bytes_per_s)}/s, "
            f"{format_count(peak)}FLOP/s {dtype}"
        )
    if document.matrices is None:
        for group in document.hosts:
            if group.devices_per_host > 1:
                rows[f"inside {group.name}"] = _link_text(group.link)
            if group.compute_slots is not None:
                rows[f"cores of {group.name}"] = f"{group.compute_slots:g}"
        for level in document.levels:
            rows[level.name] = _link_text(level.link)
    else:
        rows["links"] = f"{reference.num_devices} x {reference.num_devices} matrices"
    if document.collectives:
        rows["collectives"] = f"{len(document.collectives)} measured"
    rows["numbers from"] = document.calibration
    return rows


def _runs(groups: Iterable[tuple[int, T]]) -> tuple[tuple[int, T], ...]:
    """Join neighbours that are alike: (how many, what they are)."""
    return tuple(
        (sum(count for count, _ in run), kind)
        for kind, run in itertools.groupby(groups, key=lambda group: group[1])
    )


def _headline(device: DeviceType) -> tuple[str, float]:
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype in device.peak_flops_per_s:
            return dtype, device.peak_flops_per_s[dtype]
    return next(iter(device.peak_flops_per_s.items()))


def _link_text(link: Link) -> str:
    text = f"{format_bytes(link.bandwidth_bytes_per_s)}/s, "
    text += format_seconds(link.latency_s)
    return f"{text} ({link.name})" if link.name else text
