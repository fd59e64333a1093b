"""Kinds of devices as launchers name them, and rules about kinds."""

from __future__ import annotations

import re

from planner.targets.base import Case, Refusal

__all__ = [
    "SKYPILOT_NAMES",
    "device_resource",
    "is_cpu",
    "known_resource",
    "on_skypilot",
    "one_kind_of_device",
    "only_kind",
]

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
    """Whether devices of this type are processes on CPU cores."""
    return kind == "cpu" or kind.startswith("cpu-")


def device_resource(kind: str) -> str | None:
    """What Kubernetes calls one device of a type; None if that is not known."""
    if is_cpu(kind):
        return "cpu"
    found = (resource for names, resource in _VENDORS if names.match(kind.lower()))
    return next(found, None)


def only_kind(case: Case) -> str | None:
    """The type of all devices; None if there are several or it is not known."""
    return case.device_types[0] if len(case.device_types) == 1 else None


def one_kind_of_device(case: Case) -> Refusal | None:
    """A rule: the launcher asks for one kind of machine."""
    if len(case.device_types) < 2:
        return None
    return Refusal(
        field="cluster.device_types",
        value=", ".join(case.device_types),
        why="the launcher hands out equal machines in an order of its own, and this "
        "plan has a place for each type",
        remedy="plan for the devices of one type, or start run.sh of the target "
        "torchrun on each host",
    )


def known_resource(case: Case) -> Refusal | None:
    """A rule: Kubernetes has a name for the devices."""
    kind = only_kind(case)
    if kind is None or device_resource(kind) is not None:
        return None
    return Refusal(
        field="cluster.device_types",
        value=kind,
        why="it is not known what a device plugin of Kubernetes calls it",
        remedy="give the device in the cluster file the name of a type that is "
        "shipped, such as h100-80 or mi300x-192",
    )


def on_skypilot(case: Case) -> Refusal | None:
    """A rule: SkyPilot has a name for the devices."""
    kind = only_kind(case)
    if kind is None or is_cpu(kind) or kind in SKYPILOT_NAMES:
        return None
    return Refusal(
        field="cluster.device_types",
        value=kind,
        why="SkyPilot has no accelerator of which it is known to be this type",
        remedy=f"plan for one of {', '.join(SKYPILOT_NAMES)}",
    )
