"""Known devices, links and machines: ``data/devices.csv``, ``data/systems.yaml``.

Rates are dense (a datasheet that gives them with 2:4 sparsity is halved); cards that
accumulate in FP32 at half the rate of their tensor cores (GeForce) have that rate.
Memory is what the driver reports (``memory.total`` of nvidia-smi), the least where
drivers differ: ECC on GDDR6 costs a sixteenth, and "288 GB" of HBM show as 269 GiB or
278 GiB. A CUDA process sees up to 1.5 % less still; nothing is taken off for that, for
its context or for fragmentation: ``memory_fraction`` of a plan does it. Each of the two
dies of an MI250 or MI250X is a device to ROCm and to torch; "-64" is one of them.

``matmul_efficiency``, ``half_efficiency_flops`` and ``kernel_overhead_s`` are not on
datasheets. They are defaults for large bf16 products as cuBLAS and its like reach them,
good to perhaps 15 %; ``meshwright probe`` measures them.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from planner.cluster.documents import matrix_document, whole_number
from planner.cluster.topology import FloatArray
from planner.errors import ClusterError, PlanFileError, UnknownNameError
from planner.schema.cluster import (
    PEAK_DTYPES,
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
)
from planner.units import gbit_per_s

__all__ = [
    "System",
    "cluster_names",
    "device_type",
    "device_type_names",
    "ethernet",
    "known_links",
    "known_systems",
    "known_type",
    "of_datasheet",
    "preset_document",
]

_MIB = 2**20
#: Seconds in which the waves of tiles of a product fill and drain; an assumption.
_FILL_S = 3e-6


def _text(name: str) -> str:
    return Path(__file__).with_name("data").joinpath(name).read_text(encoding="utf-8")


# -- Devices ---------------------------------------------------------------------


def of_datasheet(
    name: str,
    source: str,
    *,
    memory_bytes: float,
    memory_bandwidth_bytes_per_s: float,
    efficiency: float,
    half_efficiency_flops: float | None = None,
    kernel_overhead_s: float = 4e-6,  # assumption
    processors: int | None = None,
    backend: Literal["nccl", "gloo", "rccl"] = "nccl",
    **teraflops: float,
) -> DeviceType:
    """Make the type of an accelerator from its printed numbers.

    Args:
        name: The chip and its memory in GB: ``"h100-80"``.
        source: Where the numbers are from.
        memory_bytes: What the driver reports as total.
        memory_bandwidth_bytes_per_s: Reads plus writes.
        efficiency: Share of the peak that a very large matrix product reaches.
        half_efficiency_flops: FLOPs of a product that reaches half of that; by default
            those of 3 us at the sustained rate.
        kernel_overhead_s: Time that one op costs whatever its size.
        processors: Streaming multiprocessors or compute units that are switched on.
        backend: Communication backend.
        teraflops: dtype to dense peak, 10^12 FLOP/s.
    """
    peaks = {dtype: value * 1e12 for dtype, value in teraflops.items()}
    best = peaks.get("bfloat16") or peaks.get("float16") or max(peaks.values())
    if half_efficiency_flops is None:
        half_efficiency_flops = best * efficiency * _FILL_S
    return DeviceType(
        name=name,
        peak_flops_per_s=peaks,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=memory_bandwidth_bytes_per_s,
        matmul_efficiency=efficiency,
        half_efficiency_flops=half_efficiency_flops,
        kernel_overhead_s=kernel_overhead_s,
        processors=processors,
        backend=backend,
        source=source,
    )


@cache
def _device_rows() -> Mapping[str, Mapping[str, str]]:
    rows = csv.DictReader(_text("devices.csv").splitlines())
    return {row["name"]: row for row in rows}


@cache
def _device(name: str) -> DeviceType:
    row = _device_rows()[name]
    half = row["half_efficiency_mflops"]
    rates = {dtype: row[f"{dtype}_tflops"] for dtype in PEAK_DTYPES}
    return of_datasheet(
        name,
        row["source"],
        memory_bytes=int(row["memory_mib"]) * _MIB,
        # "547.7" and "e9" give the float nearest to 547.7e9; a product may not.
        memory_bandwidth_bytes_per_s=float(row["memory_bandwidth_gb_per_s"] + "e9"),
        efficiency=float(row["matmul_efficiency"]),
        half_efficiency_flops=float(half + "e6") if half else None,
        kernel_overhead_s=float(row["kernel_overhead_us"] + "e-6"),
        processors=int(row["processors"]),
        backend=row["backend"],  # type: ignore[arg-type]
        **{dtype: float(rate) for dtype, rate in rates.items() if rate},
    )


def device_type_names() -> tuple[str, ...]:
    """Names that :func:`device_type` knows, sorted."""
    return tuple(sorted(_device_rows()))


def device_type(name: str) -> DeviceType:
    """Return a known accelerator.

    Args:
        name: ``"h100-80"``: the chip and its memory in GB.

    Raises:
        UnknownNameError: If there is no such type; suggests the nearest.
    """
    if name.lower() not in _device_rows():
        raise UnknownNameError("device type", name, _device_rows())
    return _device(name.lower())


def known_type(name: str, memory_bytes: float) -> DeviceType | None:
    """Return the known accelerator that a driver calls ``name``, or None.

    Args:
        name: ``"NVIDIA H100 80GB HBM3"``, ``"AMD Instinct MI300X"``.
        memory_bytes: What the driver reports; tells variants of a chip apart.
    """
    text = name.lower().replace(" ", "")
    chips = {known: known.rpartition("-")[0] for known in device_type_names()}
    # gb200 contains b200: the longer name is the better match.
    longest = max((len(c) for c in chips.values() if c in text), default=0)
    near = min(
        (device_type(k) for k, c in chips.items() if c in text and len(c) == longest),
        key=lambda device: abs(device.memory_bytes - memory_bytes),
        default=None,
    )
    if near is None or abs(near.memory_bytes / memory_bytes - 1) > 0.1:
        return None
    return near


# -- Links and machines ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A unit that is bought and counted: a host, or a rack of hosts.

    Attributes:
        device: Name of the device type.
        devices_per_host: Devices that one operating system sees.
        inside: Link between them.
        outside: Link between units, per device.
        nics: Network interfaces of a host, if fewer than its devices.
        memory_bytes: Of a host's CPUs; None where no document says it.
        hosts: Hosts in one unit; more than one if ``inside`` also joins hosts.
        source: Where counts and NICs are from.
    """

    device: str
    devices_per_host: int
    inside: Link
    outside: Link
    nics: int | None = None
    memory_bytes: float | None = None
    hosts: int = 1
    source: str


@cache
def _catalogue() -> Mapping[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # Both loaders are safe ones.
    data: Mapping[str, Any] = yaml.load(_text("systems.yaml"), loader)  # noqa: S506
    return data


def _latency_s(name: str) -> float:
    return float(f"{_catalogue()['latencies_us'][name]}e-6")


@cache
def known_links() -> Mapping[str, Link]:
    """Links by name (``nvlink4``), per device and direction."""
    return {
        name: Link(
            name=entry["name"],
            bandwidth_bytes_per_s=float(f"{entry['bandwidth_gb_per_s']}e9")
            / entry.get("peers", 1),
            latency_s=_latency_s(entry["latency"]),
            mesh=entry.get("mesh", False),
            source=entry["source"],
        )
        for name, entry in _catalogue()["links"].items()
    }


def ethernet(gbits: float, devices: int, source: str) -> Link:
    """The share that each device of a host has of one Ethernet port, over TCP.

    Args:
        gbits: Rate of the port, Gbit/s and direction; below 10 its latency is that of
            Gigabit Ethernet.
        devices: Devices in one host.
        source: Where the port is from.
    """
    return Link(
        name=f"{gbits:g} GbE",
        bandwidth_bytes_per_s=gbit_per_s(gbits) / devices,
        latency_s=_latency_s("ethernet" if gbits >= 10 else "gigabit_ethernet"),
        source=source,
    )


@cache
def known_systems() -> Mapping[str, System]:
    """Machines by name (``dgx-h100``), without aliases."""
    return {name: _system(entry) for name, entry in _catalogue()["systems"].items()}


def _system(entry: Mapping[str, Any]) -> System:
    devices, nics = entry.get("devices_per_host", 1), None
    if "network" in entry:
        network, gbits, nics = entry["network"]
        outside = Link(
            name=network,
            bandwidth_bytes_per_s=gbit_per_s(gbits) * nics / devices,
            latency_s=_latency_s("infiniband"),
            source=entry["source"],
        )
    else:
        gbits = entry["ethernet_gbits"]
        outside = ethernet(gbits, 1, f"one {gbits:g} GbE port: an assumption")
    return System(
        device=entry["device"],
        devices_per_host=devices,
        inside=known_links()[entry["inside"]],
        outside=outside,
        nics=nics if nics is not None and nics < devices else None,
        memory_bytes=entry["host_memory_gb"] * 1e9
        if "host_memory_gb" in entry
        else None,
        hosts=entry.get("hosts", 1),
        source=entry["source"],
    )


# -- Clusters --------------------------------------------------------------------


@cache
def cluster_names() -> tuple[str, ...]:
    """Names that :meth:`planner.cluster.Cluster.from_preset` knows, sorted."""
    rooms = ("systems", "aliases", "mixed", "documents")
    names = [name for room in rooms for name in _catalogue()[room]]
    return tuple(sorted([*names, *_catalogue()["dtfm"]["cases"]]))


def preset_document(name: str, nodes: int) -> ClusterDocument:
    """Return the document of a preset.

    Args:
        name: One of :func:`cluster_names`.
        nodes: How many units, on one non-blocking network.

    Raises:
        UnknownNameError: If there is no such preset; suggests the nearest.
        ClusterError: If ``nodes`` is below 1, or is given for a cluster of fixed size.
    """
    if name not in cluster_names():
        raise UnknownNameError("cluster preset", name, cluster_names())
    nodes = whole_number(f"{name}: nodes", nodes)
    catalogue = _catalogue()
    name = catalogue["aliases"].get(name, name)
    if name in catalogue["mixed"]:
        return _mixed_document(name, nodes)
    if name in catalogue["systems"]:
        return _system_document(name, nodes)
    if nodes != 1:
        raise ClusterError(
            f"{name}:{nodes}: {name} is one cluster of fixed size; write {name}"
        )
    if name in catalogue["documents"]:
        return _written_document(catalogue["documents"][name])
    return _dtfm_document(name)


def _title(name: str, nodes: int) -> str:
    return name if nodes == 1 else f"{name} x {nodes}"


def _system_document(name: str, nodes: int) -> ClusterDocument:
    system = known_systems()[name]
    levels = []
    if system.hosts > 1:
        levels.append(
            Level(name="NVLink domain", hosts=system.hosts, link=system.inside)
        )
    if nodes > 1:
        levels.append(Level(name=system.outside.name, link=system.outside))
    return ClusterDocument(
        name=_title(name, nodes),
        device_types=(device_type(system.device),),
        hosts=(
            HostGroup(
                name=name,
                count=nodes * system.hosts,
                devices_per_host=system.devices_per_host,
                device=system.device,
                link=system.inside,
                nics=system.nics,
                memory_bytes=system.memory_bytes,
            ),
        ),
        levels=tuple(levels),
        source=system.source,
    )


def _mixed_document(name: str, nodes: int) -> ClusterDocument:
    entry = _catalogue()["mixed"][name]
    kinds = entry["devices"]
    counts = {
        device: (nodes + len(kinds) - 1 - place) // len(kinds)
        for place, device in enumerate(kinds)
    }
    used = {device: count for device, count in counts.items() if count}
    outside = known_links()[entry["outside"]]
    return ClusterDocument(
        name=_title(name, nodes),
        device_types=tuple(device_type(device) for device in used),
        hosts=tuple(
            HostGroup(
                name=f"{device.rpartition('-')[0]} PC",
                count=count,
                devices_per_host=1,
                device=device,
                link=known_links()[entry["inside"]],
            )
            for device, count in used.items()
        ),
        levels=(Level(name=outside.name, link=outside),) if nodes > 1 else (),
        source=entry["source"],
    )


def _written_document(entry: Mapping[str, Any]) -> ClusterDocument:
    types = []
    for given in entry["device_types"]:
        fields = dict(given)
        known = device_type(fields.pop("like"))
        types.append({**known.model_dump(), **fields})
    return ClusterDocument.model_validate({**entry, "device_types": types})


# -- The networks of DT-FM -------------------------------------------------------


def _dtfm_document(name: str) -> ClusterDocument:
    """Build one of the five networks of DT-FM from its matrices.

    In cases 1 and 2 devices of one instance share a host; elsewhere each device is a
    host of its own.

    Raises:
        ClusterError: If the environment variable MESHWRIGHT_DATA is unset or its
            folder does not hold the matrices.
        PlanFileError: If a file is malformed.
    Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in
        Heterogeneous Environments", arXiv 2206.01288; matrices of DS3Lab/DT-FM, MIT.
    """
    entry = _catalogue()["dtfm"]
    case = entry["cases"][name]
    folder = _dtfm_folder(name)
    gbits = _matrix(folder / f"{case}_bandwidth_gbps.csv")
    milliseconds = _matrix(folder / f"{case}_delay_ms.csv")
    return matrix_document(
        gbits * 1.25e8,
        milliseconds * 1e-3,
        device_type(entry["device"]),
        _dtfm_hosts(folder / "meta.json", case, len(gbits)),
        name=name,
        source=f"DS3Lab/DT-FM (MIT), {case}; {entry['source']}",
    )


def _dtfm_folder(name: str) -> Path:
    root = os.environ.get("MESHWRIGHT_DATA")
    if not root:
        raise ClusterError(
            f"cluster {name!r} is read from measured matrices: set MESHWRIGHT_DATA to "
            f"the folder that has them in dtfm/"
        )
    folder = Path(root) / "dtfm"
    if not folder.is_dir():
        raise ClusterError(
            f"cluster {name!r}: MESHWRIGHT_DATA={root} has no folder dtfm; set "
            f"MESHWRIGHT_DATA to the folder that has the matrices in dtfm/"
        )
    return folder


def _matrix(path: Path) -> FloatArray:
    try:
        return np.loadtxt(path, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise PlanFileError(f"cannot read the matrix {path}: {error}") from error


def _dtfm_hosts(path: Path, case: str, count: int) -> list[int]:
    try:
        regions = json.loads(path.read_text(encoding="utf-8"))[case]["regions"]
    except (OSError, ValueError, KeyError) as error:
        raise PlanFileError(f"cannot read regions of {case} from {path}") from error
    hosts: list[int] = []
    previous = None
    for region in regions[:count]:
        shared = "instance" in region and region == previous
        hosts.append(hosts[-1] if shared else len(set(hosts)))
        previous = region
    return hosts
