"""What objects of Kubernetes have in common: names, devices, the plan on a volume."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.errors import ExportError
from planner.export.naming import run_name
from planner.export.torchrun import placed
from planner.targets.rules import device_resource

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = [
    "HEADER",
    "INSTALL",
    "MOUNTS",
    "Pods",
    "config_map",
    "environment",
    "pods_of",
    "volumes",
]

#: Images with torch. Source: hub.docker.com/r/pytorch/pytorch, hub.docker.com/r/rocm.
_IMAGE, _AMD_IMAGE = "pytorch/pytorch:latest", "rocm/pytorch:latest"

#: Bytes that a ConfigMap may hold. Source: kubernetes.io/docs/concepts/configuration.
_MOST_BYTES = 1024 * 1024
#: Left for what else is in the object.
_SPARE_BYTES = 16 * 1024

#: First lines of every script: meshwright comes into an image that lacks it.
INSTALL = """set -euo pipefail
if [ -n "$MESHWRIGHT_INSTALL" ]; then
  python -m pip install --quiet "$MESHWRIGHT_INSTALL"
fi
"""

HEADER = """Trains by the plan in the ConfigMap at the end: {label}.

    kubectl apply --server-side -f {file}

Yours to set:
  image               any with torch 2.11 or newer; better a release than latest
  MESHWRIGHT_INSTALL  what pip installs first; "" where the image has meshwright
  args                go on to meshwright run: --steps, --data, --checkpoint-dir
and, where your cluster wants them: namespace, tolerations, CPU and memory, a volume for
data and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """One pod a host.

    Attributes:
        name: Of all objects.
        count: How many.
        devices: Ranks in each.
        resource: What a device is called, ``nvidia.com/gpu``.
    """

    name: str
    count: int
    devices: int
    resource: str

    @property
    def image(self) -> str:
        """One with a torch for these devices."""
        return _AMD_IMAGE if self.resource.startswith("amd.com") else _IMAGE

    @property
    def resources(self) -> dict[str, Any]:
        """As a container asks for them; cores are a request, devices a limit."""
        kind = "requests" if self.resource == "cpu" else "limits"
        return {kind: {self.resource: str(self.devices)}}


def pods_of(plan: Plan) -> Pods:
    """The pods of a plan.

    Raises:
        ExportError: If ranks are not the same on every host, or nobody knows what the
            devices are called.
    """
    placement = placed(plan)
    kinds = tuple(plan.cluster.device_types)
    resource = device_resource(kinds[0]) if len(kinds) == 1 else None
    if resource is None:
        raise ExportError(
            f"cluster.device_types={', '.join(kinds)}: pods ask for one kind of device "
            f"that Kubernetes has a name for; plan for such a cluster"
        )
    return Pods(
        name=run_name(plan),
        count=len(placement.hosts),
        devices=len(placement.local),
        resource=resource,
    )


def config_map(plan: Plan, name: str) -> dict[str, Any]:
    """The plan as an object that pods can mount.

    Raises:
        ExportError: If it is larger than the object may be.
    """
    text = plan.to_json()
    size, most = len(text.encode()), _MOST_BYTES - _SPARE_BYTES
    if size > most:
        raise ExportError(
            f"the plan has {size:,} bytes, a ConfigMap of Kubernetes holds {most:,}; "
            f"put plan.json (target json) into the image or on a volume, and export a "
            f"plan for fewer stages to see the objects"
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        "data": {"plan.json": text},
    }


def environment() -> list[dict[str, str]]:
    """Variables of every container."""
    from planner import __version__

    return [
        {"name": "MESHWRIGHT_INSTALL", "value": f"meshwright[hf]=={__version__}"},
        {"name": "PLAN", "value": "/etc/meshwright/plan.json"},
    ]


def volumes(name: str) -> list[dict[str, Any]]:
    """The plan, and shared memory: NCCL wants more than the 64 MB that pods have."""
    return [
        {"name": "plan", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


#: Where the volumes are in a container.
MOUNTS = [
    {"name": "plan", "mountPath": "/etc/meshwright", "readOnly": True},
    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # Linux has it there
]
