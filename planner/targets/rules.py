"""Rules that several targets share: placement of ranks, kinds of devices, experts."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from planner.targets.base import Case, Violation

__all__ = [
    "SKYPILOT_NAMES",
    "Placement",
    "accelerators_alone",
    "device_resource",
    "experts_of_own_tokens",
    "is_cpu",
    "known_host_types",
    "known_products",
    "known_resource",
    "no_float8",
    "node_label",
    "offloads_parameters",
    "on_cpu",
    "on_skypilot",
    "one_kind_of_core",
    "one_kind_of_device",
    "one_recompute",
    "only_kind",
    "placement_of",
    "ranks_in_order",
    "same_on_every_host",
    "stops_on_failure",
    "used_kinds",
    "whole_hosts",
]

#: Devices of one machine with one operating system, where a cluster counts more as one
#: host because NVLink joins them. Source: NVIDIA, GB200 and GB300 NVL72: a rack has 18
#: compute trays of four GPUs.
_DEVICES_PER_MACHINE = {"gb200-186": 4, "gb300-279": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of the ranks, at the same places of every host.

    Attributes:
        hosts: Indices of the hosts that are used, ascending.
        local: Devices of each of these hosts, by their number inside the host.
        whole: Whether every host that is used is used with all of its devices.
        kinds: Runs of hosts that are used whose devices are of one type, in order:
            (number of hosts, name of the type; empty if it is not known).
    """

    hosts: tuple[int, ...]
    local: tuple[int, ...]
    whole: bool
    kinds: tuple[tuple[int, str], ...] = ()


def placement_of(case: Case) -> Placement | Violation:
    """Return the placement of the processes, or why it is not the same on every host.

    Launchers number processes in the order of devices. Meshwright's executors give
    each the rank that the plan has for its device; see :func:`ranks_in_order`.
    """
    ids = sorted(case.strategy.device_ids())
    value = str([list(run) for run in case.strategy.device_ranges] or "in order")
    machines = _machines(case)
    if not machines:
        return Violation(
            field="cluster.hosts",
            value="()",
            why="it is not known which ranks share a host",
            remedy="plan again with this version of Meshwright",
        )
    place = [(h, i) for h, (size, _) in enumerate(machines) for i in range(size)]
    local: dict[int, list[int]] = {}
    for device in ids:
        host, index = place[device]
        local.setdefault(host, []).append(index)
    counts = sorted({len(devices) for devices in local.values()})
    if len(counts) > 1:
        return Violation(
            field="device_ranges",
            value=value,
            why=f"hosts hold {counts[0]} to {counts[-1]} of the {len(ids)} ranks, and "
            f"the launcher wants the same number on each",
            remedy="plan for equal hosts, or write one command a host yourself",
        )
    first, *others = local.values()
    if any(devices != first for devices in others):
        return Violation(
            field="device_ranges",
            value=value,
            why="hosts use different devices (some are occupied), and one script "
            "cannot name them for all",
            remedy="plan with the same devices free on each",
        )
    return Placement(
        hosts=tuple(local),
        local=tuple(first),
        whole=all(len(first) == machines[host][0] for host in local),
        kinds=tuple(
            (len(list(run)), kind)
            for kind, run in itertools.groupby(machines[host][1] for host in local)
        ),
    )


def _machines(case: Case) -> list[tuple[int, str]]:
    """Return devices and type of each host with its own operating system."""
    sizes = [size for count, size in case.hosts for _ in range(count)]
    kinds = [kind for count, kind in case.host_types for _ in range(count)]
    kinds = kinds or [only_kind(case) or ""] * len(sizes)
    machines = []
    for size, kind in zip(sizes, kinds, strict=True):
        each = _DEVICES_PER_MACHINE.get(kind, size)
        each = size if size % each else each
        machines += [(each, kind)] * (size // each)
    return machines


def same_on_every_host(case: Case) -> Violation | None:
    """Require processes that are numbered host by host, the same devices on each."""
    if not case.placed:
        return None
    found = placement_of(case)
    return found if isinstance(found, Violation) else None


def ranks_in_order(case: Case) -> Violation | None:
    """Require :func:`same_on_every_host`, and ranks in the order of devices."""
    ids = case.strategy.device_ids()
    if not case.placed or list(ids) == sorted(ids):
        return same_on_every_host(case)
    return Violation(
        field="device_ranges",
        value=str([list(run) for run in case.strategy.device_ranges]),
        why="ranks are out of the order of devices, and the framework takes ranks as "
        "the launcher numbers them, host by host",
        remedy="plan again with devices in order, or export for a launcher of "
        "meshwright run",
    )


def offloads_parameters(case: Case) -> Violation | None:
    """Require that FSDP offloads, which moves states, gradients and weights at once."""
    if case.strategy.offload.states != "optimizer":
        return None
    return Violation(
        field="offload.states",
        value="optimizer",
        why="FSDP's CPUOffloadPolicy moves weights and gradients along",
        remedy="use parameters or none",
    )


def whole_hosts(case: Case) -> Violation | None:
    """Require all devices of every host, or one host alone.

    Some launchers fill a host before they go on to the next.
    """
    if not case.placed:
        return None
    found = placement_of(case)
    if isinstance(found, Violation) or found.whole or len(found.hosts) == 1:
        return None
    return Violation(
        field="device_ranges",
        value=str([list(run) for run in case.strategy.device_ranges]),
        why=f"the plan has {len(found.local)} ranks on each of {len(found.hosts)} "
        f"hosts with more devices, and the launcher would put all ranks on as few "
        f"hosts as hold them",
        remedy="plan for whole hosts",
    )


# -- Kinds of devices ----------------------------------------------------------

#: Device type to accelerator of SkyPilot 0.14, where that name means this very type.
#: Source: sky/catalog and "sky gpus list" of the documentation.
SKYPILOT_NAMES = {
    "a10-24": "A10",
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "a10g-24": "A10G",
    "a40-48": "A40",
    "a6000-48": "A6000",
    "b200-180": "B200",
    "b300-270": "B300",
    "gb200-186": "GB200",
    "gb300-279": "GB300",
    "gh200-96": "GH200",
    "h100-80": "H100",
    "h100nvl-94": "H100-NVL",
    "h200-141": "H200",
    "l4-24": "L4",
    "l40-48": "L40",
    "l40s-48": "L40S",
    "mi300x-192": "MI300X",
    "p100-16": "P100",
    "rtx3090-24": "RTX3090",
    "rtx4090-24": "RTX4090",
    "rtx5090-32": "RTX5090",
    "rtx6000ada-48": "RTX6000-Ada",
    "rtxpro6000-96": "RTXPRO6000",
    "t4-16": "T4",
    "v100-16": "V100",
    "v100-32": "V100-32GB",
}

#: Resources of the vendors' device plugins for Kubernetes.
#: Source: github.com/NVIDIA/k8s-device-plugin, github.com/ROCm/k8s-device-plugin.
_VENDORS = (
    (re.compile(r"mi\d|instinct|radeon"), "amd.com/gpu"),
    (
        re.compile(r"[abhklptv]\d|g[bh]\d|rtx|gtx|titan|tesla|geforce|quadro"),
        "nvidia.com/gpu",
    ),
)


def is_cpu(kind: str) -> bool:
    """Return True if devices of this type are processes on CPU cores."""
    return kind == "cpu" or kind.startswith("cpu-")


def device_resource(kind: str) -> str | None:
    """Return the name of a device type in Kubernetes; None if it is not known."""
    if is_cpu(kind):
        return "cpu"
    found = (resource for names, resource in _VENDORS if names.match(kind.lower()))
    return next(found, None)


def only_kind(case: Case) -> str | None:
    """Return the type of all devices; None if there are several or it is unknown."""
    return case.device_types[0] if len(case.device_types) == 1 else None


def one_kind_of_device(case: Case) -> Violation | None:
    """Require devices of one type, for launchers that ask for one kind of machine."""
    if len(case.device_types) < 2:
        return None
    return Violation(
        field="cluster.device_types",
        value=", ".join(case.device_types),
        why="the launcher hands out equal machines in an order of its own, and this "
        "plan has a place for each type",
        remedy="plan for the devices of one type, use the target slurm or jobset, or "
        "start run.sh of the target torchrun on each host",
    )


def used_kinds(case: Case) -> tuple[str, ...]:
    """Return the types of the devices that are used, in the order of hosts.

    They are all types of the cluster where devices are not placed yet.
    """
    if not case.placed or not case.host_types:
        return case.device_types
    found = placement_of(case)
    if isinstance(found, Violation):
        return case.device_types
    return tuple(dict.fromkeys(kind for _, kind in found.kinds))


def known_host_types(case: Case) -> Violation | None:
    """Require the type of each host, for launchers that ask for hosts by it."""
    if len(case.device_types) < 2 or case.host_types:
        return None
    return Violation(
        field="cluster.device_types",
        value=", ".join(case.device_types),
        why="the plan does not name the type of each host (cluster.host_types)",
        remedy="plan again with this version of Meshwright",
    )


def one_kind_of_core(case: Case) -> Violation | None:
    """Require hosts of one type among those that compute on CPU cores."""
    cores = [kind for kind in case.device_types if is_cpu(kind)]
    if len(cores) < 2 or not any(map(is_cpu, used_kinds(case))):
        return None
    return Violation(
        field="cluster.device_types",
        value=", ".join(cores),
        why="jobs ask for CPU cores of any type",
        remedy="plan for CPU cores of one type, or start run.sh of the target torchrun "
        "on each host",
    )


def known_resource(case: Case) -> Violation | None:
    """Require devices that Kubernetes has a name for."""
    unknown = (kind for kind in used_kinds(case) if device_resource(kind) is None)
    kind = next(unknown, None)
    if kind is None:
        return None
    return Violation(
        field="cluster.device_types",
        value=kind,
        why="it is not known what a device plugin of Kubernetes calls it",
        remedy="give the device in the cluster file the name of a type that is "
        "shipped, such as h100-80 or mi300x-192",
    )


@cache
def _node_labels() -> Mapping[str, tuple[str, str]]:
    """Label of nodes and its value, by device type.

    GPU feature discovery of NVIDIA and the node labeller of AMD write them.
    Source: docs/gpu-feature-discovery of github.com/NVIDIA/k8s-device-plugin, which
    makes the value of the product's name with dashes for spaces;
    github.com/ROCm/k8s-device-plugin.
    """
    text = files("planner.targets").joinpath("node_labels.csv")
    rows = csv.DictReader(text.read_text(encoding="utf-8").splitlines())
    return {row["device_type"]: (row["label"], row["value"]) for row in rows}


def node_label(kind: str) -> tuple[str, str] | None:
    """Return the label, and its value, of nodes of Kubernetes with a device type.

    None if it is not known; CPU cores have none.
    """
    return _node_labels().get(kind)


def known_products(case: Case) -> Violation | None:
    """Require types that labels of nodes tell apart, where there are several."""
    if len(case.device_types) < 2 or not case.placed:
        return None
    kinds = [kind for kind in used_kinds(case) if not is_cpu(kind)]
    unknown = [kind for kind in kinds if node_label(kind) is None]
    if not unknown:
        return None
    return Violation(
        field="cluster.device_types",
        value=unknown[0],
        why="it is not known how nodes of Kubernetes with it are labelled "
        "(nvidia.com/gpu.product), and the cluster has other types, too",
        remedy=f"plan for one of {', '.join(_node_labels())}, or for hosts of one type",
    )


def on_skypilot(case: Case) -> Violation | None:
    """Require devices that SkyPilot has a name for."""
    kind = only_kind(case)
    if kind is None or is_cpu(kind) or kind in SKYPILOT_NAMES:
        return None
    return Violation(
        field="cluster.device_types",
        value=kind,
        why="SkyPilot has no accelerator of which it is known to be this type",
        remedy=f"plan for one of {', '.join(SKYPILOT_NAMES)}",
    )


def on_cpu(case: Case) -> bool:
    """Return True if ranks are processes on CPU cores."""
    kinds = case.device_types
    return case.backend == "gloo" or (bool(kinds) and all(map(is_cpu, kinds)))


def accelerators_alone(case: Case) -> Violation | None:
    """Require ranks that are not processes on CPU cores."""
    if not on_cpu(case):
        return None
    return Violation(
        field="cluster.device_types",
        value=", ".join(case.device_types) or case.backend,
        why="it trains on accelerators alone",
        remedy="plan for those, or use torchrun, by which Meshwright trains on CPUs",
    )


# -- Recomputation, experts, dtypes --------------------------------------------


def one_recompute(case: Case) -> Violation | None:
    """Require the same recomputation in every stage."""
    kinds = [stage.recompute for stage in case.strategy.stages]
    if len(set(kinds)) <= 1:
        return None
    return Violation(
        field="stages.recompute",
        value="[" + ", ".join(kinds) + "]",
        why="activation checkpointing is set once for the whole model",
        remedy="recompute the same in all stages (pin recompute)",
    )


def experts_of_own_tokens(case: Case) -> Violation | None:
    """Require sequence parallelism beside ep and tp.

    Experts of a plan are dealt out over tp ranks whole, as in frameworks whose experts
    have a tensor parallel degree of 1; there each tp rank routes tokens of its own.
    """
    mesh = case.strategy.mesh
    if mesh.ep == 1 or mesh.tp == 1 or case.strategy.sharding.sequence_parallel:
        return None
    return Violation(
        field="mesh.ep",
        value=str(mesh.ep),
        why=f"with tp={mesh.tp} each tp rank sends tokens of its own to the experts, "
        f"and the plan's have all tokens",
        remedy="use sequence_parallel=true, ep=1 or tp=1",
    )


def no_float8(case: Case) -> Violation | None:
    """Require products in another dtype than float8."""
    if case.strategy.precision.compute != "float8":
        return None
    return Violation(
        field="precision.compute",
        value="float8",
        why="it has several float8 recipes, and a plan does not say which",
        remedy="use bfloat16, and switch float8 on in the framework yourself",
    )


def stops_on_failure(case: Case) -> Violation | None:
    """Violation of a plan that goes on without ranks that fail."""
    if not case.strategy.synchronisation.fewest_copies:
        return None
    return Violation(
        field="on_failure",
        value="continue",
        why="the launcher ends all ranks when one fails",
        remedy="use on_failure=stop, or start the plan by meshwright run",
    )
