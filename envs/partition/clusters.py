"""Draw the clusters of worlds, by kind: uniform, mixed, uneven, sites, occupied.

Hosts are numbered in random order, so that the order of devices is not the best one to
use them in. The split of a cluster depends on a hash of its composition: the number of
hosts of each device type and size.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from envs.partition.machines import Machine
from envs.partition.models import Split, split_of
from envs.partition.sites import sites_document
from planner.cluster import Cluster, device_type
from planner.schema.cluster import ClusterDocument, HostGroup, Level, Link

__all__ = ["CLUSTER_KINDS", "Scale", "cluster_split", "composition", "draw_cluster"]

Rng = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Ranges of sizes of clusters.

    Attributes:
        hosts: Fewest and most hosts.
        devices: Fewest and most devices.
        site_devices: Fewest and most devices of several sites, whose links are given
            pair by pair.
    """

    hosts: tuple[int, int] = (2, 64)
    devices: tuple[int, int] = (2, 512)
    site_devices: tuple[int, int] = (6, 128)


def composition(document: ClusterDocument) -> str:
    """Return the number of hosts of each device type and size, as text."""
    counts: Counter[tuple[str, int]] = Counter()
    for group in document.hosts:
        counts[group.device, group.devices_per_host] += group.count
    return json.dumps(sorted([*key, count] for key, count in counts.items()))


def cluster_split(document: ClusterDocument) -> Split:
    """Return the split that clusters of this composition belong to."""
    return split_of(composition(document))


def _size(rng: Rng, low: int, high: int) -> int:
    """Draw log-uniformly, both ends included: most clusters have 4 to 32 hosts."""
    return int(np.exp(rng.uniform(np.log(low), np.log(high + 1))))


def _speed(machine: Machine) -> float:
    """FLOP/s of one device at the precision of training."""
    peaks = device_type(machine.device).peak_flops_per_s
    return peaks.get("bfloat16", peaks["float16"])


def _choice(rng: Rng, machines: Mapping[str, Machine], count: int) -> list[Machine]:
    """Draw machines of different device types.

    Types of similar speed are drawn together more often, in proportion to the ratio of
    their speeds: neighbouring generations are mixed in practice, and beside a far
    faster type a slow one is best left unused.
    """
    names = rng.permutation(sorted(machines)).tolist()
    left = list({machines[name].device: machines[name] for name in names}.values())
    found = [left.pop(0)]
    while left and len(found) < count:
        ratio = np.array([_speed(machine) / _speed(found[0]) for machine in left])
        weight = np.minimum(ratio, 1 / ratio)
        found.append(left.pop(int(rng.choice(len(left), p=weight / weight.sum()))))
    return found


def _uniform(
    rng: Rng, machines: Mapping[str, Machine], scale: Scale
) -> ClusterDocument:
    machine = _choice(rng, machines, 1)[0]
    each = machine.full if rng.random() < 0.7 else int(rng.choice(machine.sizes))
    low = max(1, -(-scale.devices[0] // each))
    high = max(low, min(scale.hosts[1], scale.devices[1] // each))
    count = _size(rng, low, high)
    return _document([machine.host(each, count)], None)


def _mixed(rng: Rng, machines: Mapping[str, Machine], scale: Scale) -> ClusterDocument:
    kinds = _choice(rng, machines, int(rng.choice([2, 2, 3])))
    count = max(len(kinds), _size(rng, *scale.hosts))
    sizes = [int(rng.choice([4, 8, 8])) for _ in kinds]
    share = rng.dirichlet([2.0] * len(kinds))
    picks = [*range(len(kinds)), *rng.choice(len(kinds), count - len(kinds), p=share)]
    hosts = [kinds[k].host(sizes[k]) for k in rng.permutation(picks).tolist()]
    return _document(_trimmed(hosts, scale), rng)


def _uneven(rng: Rng, machines: Mapping[str, Machine], scale: Scale) -> ClusterDocument:
    kinds = _choice(rng, machines, int(rng.choice([1, 1, 2])))
    count = max(2, _size(rng, *scale.hosts))
    hosts = [
        kinds[int(rng.integers(len(kinds)))].host(int(rng.choice([1, 2, 4, 8])))
        for _ in range(count)
    ]
    if len({host.devices_per_host for host in hosts}) == 1:
        other = 4 if hosts[0].devices_per_host != 4 else 2
        hosts[0] = kinds[0].host(other)
    return _document(_trimmed(hosts, scale), rng)


def _occupied(
    rng: Rng, machines: Mapping[str, Machine], scale: Scale
) -> ClusterDocument:
    """Draw a uniform, mixed or uneven cluster that is partly occupied.

    Some hosts are occupied completely, others by a few devices.
    """
    base = (_uniform, _mixed, _uneven)[int(rng.integers(3))]
    # At least two devices stay free, and at least two can be occupied.
    roomy = replace(scale, devices=(max(4, scale.devices[0]), scale.devices[1]))
    cluster = Cluster.from_document(base(rng, machines, roomy))
    whole, partly = rng.uniform(0.0, 0.4), rng.uniform(0.1, 0.6)
    taken: list[int] = []
    for host in np.unique(cluster.host_of_device):
        members = np.flatnonzero(cluster.host_of_device == host)
        fate = rng.random()
        if fate < whole:
            taken += members.tolist()
        elif fate < whole + partly and len(members) > 1:
            few = int(rng.integers(1, len(members)))
            taken += rng.choice(members, few, replace=False).tolist()
    # Something is occupied, and a quarter of the devices, at least two, stay free.
    taken = taken or [int(rng.integers(cluster.num_devices))]
    most = cluster.num_devices - max(2, cluster.num_devices // 4)
    return cluster.with_occupied(rng.permutation(taken)[:most].tolist()).document


def _sites(rng: Rng, machines: Mapping[str, Machine], scale: Scale) -> ClusterDocument:
    kinds = _choice(rng, machines, int(rng.choice([1, 2, 3])))
    size = int(rng.choice([1, 1, 2, 4, 8]))
    low, high = scale.site_devices
    count = _size(rng, max(3, -(-low // size)), max(3, high // size))
    return sites_document(rng, kinds, hosts=count, devices_per_host=size)


#: Functions that draw a cluster, by kind.
CLUSTER_KINDS: Mapping[
    str, Callable[[Rng, Mapping[str, Machine], Scale], ClusterDocument]
] = {
    "uniform": _uniform,
    "mixed": _mixed,
    "uneven": _uneven,
    "sites": _sites,
    "occupied": _occupied,
}


def draw_cluster(
    kind: str,
    split: Split,
    rng: Rng,
    machines: Mapping[str, Machine],
    scale: Scale,
) -> ClusterDocument:
    """Draw a cluster of a kind until its composition belongs to a split.

    Args:
        kind: Key of :data:`CLUSTER_KINDS`.
        split: The split.
        rng: Source of randomness.
        machines: Machines that hosts may be.
        scale: Ranges of sizes.
    """
    while True:
        document = CLUSTER_KINDS[kind](rng, machines, scale)
        if cluster_split(document) == split:
            return document


def _trimmed(hosts: Sequence[HostGroup], scale: Scale) -> list[HostGroup]:
    """Return as many of the hosts as the scale's largest number of devices allows.

    One host of each kind always stays.
    """
    first: dict[str, int] = {}
    for index, host in enumerate(hosts):
        first.setdefault(host.name, index)
    needed = set(first.values())
    left = scale.devices[1] - sum(hosts[i].devices_per_host for i in needed)
    kept = []
    for index, host in enumerate(hosts):
        if index in needed:
            kept.append(host)
        elif host.devices_per_host <= left:
            left -= host.devices_per_host
            kept.append(host)
    return kept


def _document(hosts: Sequence[HostGroup], rng: Rng | None) -> ClusterDocument:
    """Join hosts by a network as fast as the fastest NIC, some with slow uplinks."""
    runs = [list(run) for _, run in itertools.groupby(hosts)]
    groups = [
        run[0].model_copy(update={"count": sum(host.count for host in run)})
        for run in runs
    ]
    nics = [group.nic for group in groups if group.nic is not None]
    fast = max(nics, key=lambda nic: nic.bandwidth_bytes_per_s)
    soon = min(nic.latency_s for nic in nics)
    network = fast.model_copy(update={"latency_s": soon})
    if len(set(nics)) == 1:
        groups = [group.model_copy(update={"nic": None}) for group in groups]
    names = dict.fromkeys(group.device for group in groups)
    count = sum(group.count for group in groups)
    levels = _levels(count, network, rng) if count > 1 else ()
    return ClusterDocument(
        name=" + ".join(dict.fromkeys(group.name for group in groups)),
        device_types=tuple(device_type(name) for name in names),
        hosts=tuple(groups),
        levels=levels,
        source="drawn from presets by envs.partition.clusters",
    )


def _levels(count: int, network: Link, rng: Rng | None) -> tuple[Level, ...]:
    """Make one switch over all hosts, or in a third of cases racks below a spine."""
    if rng is None or count < 4 or rng.random() > 1 / 3:
        return (Level(name="network", link=network),)
    racks = int(rng.integers(2, min(8, count // 2) + 1))
    cuts = np.sort(rng.choice(np.arange(1, count), racks - 1, replace=False))
    sizes = np.diff([0, *cuts.tolist(), count]).tolist()
    slow = float(rng.choice([2.0, 3.0, 4.0]))
    rate = network.bandwidth_bytes_per_s / slow
    uplink = network.model_copy(update={"bandwidth_bytes_per_s": rate})
    return (
        Level(name="rack", hosts=tuple(sizes), link=network),
        Level(name="spine", link=uplink),
    )
