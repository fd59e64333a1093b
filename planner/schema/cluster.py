"""The cluster document: devices, hosts, links, what is occupied."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from planner.schema.base import MOST_DEVICES, Count, Document

__all__ = [
    "PEAK_DTYPES",
    "ClusterDocument",
    "CollectiveKind",
    "DeviceType",
    "HostGroup",
    "Level",
    "Link",
    "Matrices",
    "MeasuredCollective",
]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, allow_inf_nan=False)]

#: Names under which a peak is given, widest first. ``float32`` is true float32
#: arithmetic; ``tensorfloat32`` is float32 data on matrix units that round it.
PEAK_DTYPES = (
    "float64",
    "float32",
    "tensorfloat32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float4_e2m1fn_x2",
)

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


class DeviceType(Document):
    """One kind of accelerator, or a CPU process that acts as one.

    Attributes:
        peak_flops_per_s: dtype (torch name) to dense peak, without sparsity. A dtype
            that is missing runs at the rate of the next wider one that is there.
        memory_bytes: What a process can allocate.
        memory_bandwidth_bytes_per_s: Reads plus writes.
        matmul_efficiency: Share of the peak that a very large matrix product reaches.
        half_efficiency_flops: FLOPs of a single product that reaches half of that.
        kernel_overhead_s: Time that one op costs whatever its size, forward.
        processors: Streaming multiprocessors or compute units, which make one tile of
            a product each at a time; None if not known.
        backend: Communication backend.
        measured: Whether the numbers were measured on these very devices; no fitted
            constants of that type go before them then.
        source: Where the numbers are from.
    """

    name: str
    peak_flops_per_s: dict[str, Positive]
    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    matmul_efficiency: Annotated[float, Field(gt=0, le=1)] = 0.75
    half_efficiency_flops: Annotated[float, Field(ge=0)] = 2e9
    kernel_overhead_s: Annotated[float, Field(ge=0)] = 4e-6
    processors: Annotated[int, Field(ge=1)] | None = None
    backend: Literal["nccl", "gloo", "rccl"] = "nccl"
    measured: bool = False
    source: str

    @model_validator(mode="after")
    def _some_peak(self) -> DeviceType:
        if not self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s is empty; give at least one dtype")
        unknown = sorted(set(self.peak_flops_per_s) - set(PEAK_DTYPES))
        if unknown:
            raise ValueError(
                f"peak_flops_per_s has {unknown[0]!r}; use {', '.join(PEAK_DTYPES)}"
            )
        return self


class Link(Document):
    """Bandwidth and latency of one device while all its neighbours send too.

    Attributes:
        bandwidth_bytes_per_s: Per device and direction; where devices share a NIC,
            each one's share.
        latency_s: Of one message.
        name: What people call it: ``NVLink4``, ``InfiniBand NDR``.
        mesh: True inside a host whose devices have a cable to each peer instead of a
            switch: the bandwidth is then that of one cable, and a group of m devices
            uses m - 1 of them at a time.
    """

    bandwidth_bytes_per_s: Positive
    latency_s: Latency
    name: str = ""
    mesh: bool = False
    source: str = ""


class HostGroup(Document):
    """Equal hosts.

    Attributes:
        count: How many.
        devices_per_host: Devices in each.
        device: Name of their type.
        link: Between the devices of one host.
        compute_slots: Devices of one host that can compute at full rate at the same
            time; None for all. CPU processes that share cores have fewer.
        nic: What one device of these hosts can send to other hosts, where that is
            less than the level they meet at allows; None for no such limit. It is
            what keeps hosts of different generations apart on one network.
        nics: Network interfaces that the devices of one host share; None for one a
            device. A device that sends while its neighbours do not has a whole
            interface, not only its share of it.
        memory_bytes: Memory of a host's CPUs, which checkpoints on their way to files
            and offloaded states take; None where it is not known.
    """

    name: str
    count: Count
    devices_per_host: Count
    device: str
    link: Link
    compute_slots: Annotated[float, Field(gt=0)] | None = None
    nic: Link | None = None
    nics: Count | None = None
    memory_bytes: Positive | None = None


class Level(Document):
    """One level of a network above the hosts, innermost first.

    Attributes:
        hosts: Consecutive hosts that one switch (rack, site) of this level joins; a
            list where they differ, one count a switch; None for all.
        link: Per device, between hosts that meet at this level.
        aggregates: Whether its switches add up what hosts send, and hand out the sum.
            Sums are then priced so; to run them so is left to the library.
    """

    name: str
    hosts: Count | tuple[Count, ...] | None = None
    link: Link
    aggregates: bool = False

    def switch_of_host(self, num_hosts: int) -> list[int]:
        """Switch of this level that each host hangs on. Length ``num_hosts``."""
        if self.hosts is None:
            return [0] * num_hosts
        if isinstance(self.hosts, int):
            return [host // self.hosts for host in range(num_hosts)]
        return [i for i, count in enumerate(self.hosts) for _ in range(count)]


class Matrices(Document):
    """Links given one by one, between devices. Entry [i][j] is from i to j.

    ``None`` off the diagonal is a missing link, which a cluster refuses when it is
    built; the diagonal is not read.
    """

    bandwidth_bytes_per_s: tuple[tuple[Positive | None, ...], ...]
    latency_s: tuple[tuple[Latency | None, ...], ...]


class MeasuredCollective(Document):
    """Time of one collective as a probe measured it: alpha + size / bandwidth.

    Attributes:
        kind: Which collective.
        group_size: Ranks that took part.
        alpha_s: Time of an empty one.
        bandwidth_bytes_per_s: Algorithm bandwidth: bytes of the full tensor (what one
            rank holds before all_reduce, reduce_scatter and all_to_all, and after
            all_gather) over the time.
    """

    kind: CollectiveKind
    group_size: Annotated[int, Field(ge=2)]
    alpha_s: Latency
    bandwidth_bytes_per_s: Positive


class ClusterDocument(Document):
    """Devices numbered host by host in the order of ``hosts``.

    Exactly one of ``levels`` (empty for a single host) and ``matrices`` says how hosts
    are joined; matrices also replace the links inside hosts.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "cluster"

    schema_version: Literal[1] = 1
    name: str
    device_types: tuple[DeviceType, ...]
    hosts: tuple[HostGroup, ...]
    topology: Literal["hierarchical", "matrix", "ramp"] = "hierarchical"
    levels: tuple[Level, ...] = ()
    matrices: Matrices | None = None
    #: Half-open ranges of device ids that are taken.
    occupied: tuple[tuple[int, int], ...] = ()
    #: Times of collectives, where a probe measured them; they go before the links.
    collectives: tuple[MeasuredCollective, ...] = ()
    #: Name of the probe that measured these numbers; "datasheet" if none did.
    calibration: str = "datasheet"
    source: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of all hosts, occupied ones too."""
        return sum(group.count * group.devices_per_host for group in self.hosts)

    @model_validator(mode="after")
    def _consistent(self) -> ClusterDocument:
        names = [device.name for device in self.device_types]
        if len(set(names)) != len(names):
            raise ValueError("device_types has two entries of the same name")
        for group in self.hosts:
            if group.device not in names:
                raise ValueError(
                    f"host group {group.name!r} has device {group.device!r}, which is "
                    f"not in device_types ({', '.join(names)})"
                )
        count = self.num_devices
        if not count:
            raise ValueError("hosts is empty; give at least one group of hosts")
        if count > MOST_DEVICES:
            raise ValueError(
                f"hosts hold {count:,} devices; at most {MOST_DEVICES:,} are "
                f"planned for"
            )
        for start, stop in self.occupied:
            if not 0 <= start < stop <= count:
                raise ValueError(
                    f"occupied range [{start}, {stop}) is not inside [0, {count})"
                )
        self._check_links(count)
        return self

    def _check_links(self, count: int) -> None:
        num_hosts = sum(group.count for group in self.hosts)
        if self.topology == "matrix":
            if self.matrices is None:
                raise ValueError("topology is matrix, but matrices is missing")
            for field in ("bandwidth_bytes_per_s", "latency_s"):
                rows = getattr(self.matrices, field)
                if len(rows) != count or any(len(row) != count for row in rows):
                    raise ValueError(
                        f"matrices.{field} must be {count} x {count}, one row a device"
                    )
            return
        if self.matrices is not None:
            raise ValueError(f"matrices given, but topology is {self.topology}")
        if num_hosts > 1 and not self.levels:
            raise ValueError(
                f"{num_hosts} hosts but no levels: add the link between hosts"
            )
        self._check_levels(num_hosts)

    def _check_levels(self, num_hosts: int) -> None:
        inner = list(range(num_hosts))
        for level in self.levels:
            if isinstance(level.hosts, tuple) and sum(level.hosts) != num_hosts:
                raise ValueError(
                    f"level {level.name!r} joins {sum(level.hosts)} hosts, the cluster "
                    f"has {num_hosts}: a link is missing"
                )
            outer = level.switch_of_host(num_hosts)
            where: dict[int, int] = {}
            for host, (small, big) in enumerate(zip(inner, outer, strict=True)):
                if where.setdefault(small, big) != big:
                    raise ValueError(
                        f"level {level.name!r} cuts through the level below it at host "
                        f"{host}; each level must join whole ones of the level below"
                    )
            inner = outer
        if self.levels and len(set(inner)) > 1:
            reach = math.ceil(num_hosts / len(set(inner)))
            raise ValueError(
                f"the outermost level {self.levels[-1].name!r} joins {reach} hosts, "
                f"the cluster has {num_hosts}: a link is missing"
            )
