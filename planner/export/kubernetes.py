"""The plan and objects of Kubernetes: a JobSet, or a TrainJob of Kubeflow Trainer.

Written for ``jobset.x-k8s.io/v1alpha2``, as of JobSet 0.10: one indexed Job with a pod
a host, whose first pod has a name of its own in the JobSet's subdomain; one Job for
each run of hosts with devices of one type, where there are several. And for
Kubeflow Trainer 2.3, ``trainer.kubeflow.org/v1alpha1``: its runtime
``torch-distributed`` sets PET_NNODES and its kin, which torchrun reads by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.errors import ExportError
from planner.export.texts import run_name, yaml_text
from planner.export.torchrun import placed, torchrun_command, variables
from planner.targets.rules import device_resource, is_cpu, node_label

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_jobset", "export_kubeflow"]

#: Images with torch. Source: hub.docker.com/r/pytorch/pytorch, hub.docker.com/r/rocm.
_IMAGE, _AMD_IMAGE = "pytorch/pytorch:latest", "rocm/pytorch:latest"

#: Bytes that a ConfigMap may hold. Source: kubernetes.io/docs/concepts/configuration.
_MOST_BYTES = 1024 * 1024
#: Left for what else is in the object.
_SPARE_BYTES = 16 * 1024

#: First lines of every script: meshwright comes into an image that lacks it.
_INSTALL = """set -euo pipefail
if [ -n "$MESHWRIGHT_INSTALL" ]; then
  python -m pip install --quiet "$MESHWRIGHT_INSTALL"
fi
"""

#: Where the volumes are in a container.
_MOUNTS = [
    {"name": "plan", "mountPath": "/etc/meshwright", "readOnly": True},
    {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108  # Linux has it there
]

_HEADER = """Trains by the plan in the ConfigMap at the end: {label}.

    kubectl apply --server-side -f {file}

Yours to set:
  image               any with torch 2.11 or newer; better a release than latest
  MESHWRIGHT_INSTALL  what pip installs first; "" where the image has meshwright
  args                go on to meshwright run: --steps, --data, --checkpoint-dir
and, where your cluster wants them: namespace, tolerations, CPU and memory, a volume for
data and checkpoints."""

_LABELS = """
Nodes of each type are chosen by labels that GPU feature discovery or AMD's labeller
writes; kubectl get nodes --show-labels shows yours:
  {labels}"""

_TRAIN_JOB_SCRIPT = _INSTALL + 'exec torchrun --no-python meshwright run "$PLAN" "$@"\n'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pods:
    """One pod a host, for a run of hosts with devices of one type.

    Attributes:
        name: Name of all objects.
        job: Name of the Job that these pods are of.
        before: Number of pods of the jobs before it.
        count: Number of pods.
        devices: Ranks in each.
        resource: Kubernetes' name of a device, ``nvidia.com/gpu``.
        selector: Labels of their nodes; empty if any node with the resource will do.
    """

    name: str
    job: str
    before: int
    count: int
    devices: int
    resource: str
    selector: Mapping[str, str]

    @property
    def image(self) -> str:
        """One with a torch for these devices."""
        return _AMD_IMAGE if self.resource.startswith("amd.com") else _IMAGE

    @property
    def resources(self) -> dict[str, Any]:
        """Resources of a container; cores are a request, devices a limit."""
        kind = "requests" if self.resource == "cpu" else "limits"
        return {kind: {self.resource: str(self.devices)}}

    @property
    def rank(self) -> str:
        """Lines that set a pod's number; Kubernetes numbers those of a Job from 0."""
        if not self.before:
            return 'export NODE_RANK="$JOB_COMPLETION_INDEX"\n'
        # Not by $((…)): Kubernetes has a meaning for $(NAME) itself.
        add = f"((NODE_RANK = {self.before} + JOB_COMPLETION_INDEX))"
        return f"{add}\nexport NODE_RANK\n"


def _pods_of(plan: Plan) -> list[_Pods]:
    """The pods of a plan, one entry for each run of hosts with devices of one type.

    Raises:
        ExportError: If ranks are not the same on every host, or nobody knows what the
            devices are called.
    """
    placement = placed(plan)
    several = len(placement.kinds) > 1
    found: list[_Pods] = []
    for index, (count, kind) in enumerate(placement.kinds):
        resource = device_resource(kind)
        if resource is None:
            raise ExportError(
                f"cluster.device_types={', '.join(plan.cluster.device_types)}: pods "
                f"ask for a kind of device that Kubernetes has a name for; plan for "
                f"such a cluster"
            )
        pods = _Pods(
            name=run_name(plan),
            job=f"node-{index}" if several else "node",
            before=sum(pods.count for pods in found),
            count=count,
            devices=len(placement.local),
            resource=resource,
            selector=_selector(plan, kind),
        )
        found.append(pods)
    return found


def _selector(plan: Plan, kind: str) -> dict[str, str]:
    """Labels of nodes with a device type, where the cluster has others, too.

    Raises:
        ExportError: If they are not known.
    """
    if len(plan.cluster.device_types) == 1 or is_cpu(kind):
        return {}
    label = node_label(kind)
    if label is None:
        raise ExportError(
            f"device type {kind}: it is not known how nodes of Kubernetes with it are "
            f"labelled; plan for hosts of one type"
        )
    return dict((label,))


def _config_map(plan: Plan, name: str) -> dict[str, Any]:
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


def _environment(plan: Plan) -> list[dict[str, str]]:
    """Variables of every container."""
    from planner import __version__

    return [
        {"name": "MESHWRIGHT_INSTALL", "value": f"meshwright[hf]=={__version__}"},
        {"name": "PLAN", "value": "/etc/meshwright/plan.json"},
        *({"name": name, "value": value} for name, value in variables(plan).items()),
    ]


def _volumes(name: str) -> list[dict[str, Any]]:
    """The plan, and shared memory: NCCL wants more than the 64 MB that pods have."""
    return [
        {"name": "plan", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def export_jobset(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``jobset.yaml``, a JobSet and its ConfigMap.

    Raises:
        ExportError: If ranks are not the same on every host, nobody knows what the
            devices are called, or the plan is larger than a ConfigMap may be.
    """
    runs = _pods_of(plan)
    name = run_name(plan)
    first = f"{name}-{runs[0].job}-0-0.{name}"
    command = f'exec {torchrun_command(plan)} "$PLAN" "$@"\n'
    jobs = []
    for pods in runs:
        job = _job(plan, pods, _INSTALL + pods.rank + command, first)
        jobs.append({"name": pods.job, "replicas": 1, "template": {"spec": job}})
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": jobs,
    }
    note = "\nWith --checkpoint-dir and --resume, maxRestarts may be above 0."
    labels = {f"{key}={value}" for pods in runs for key, value in pods.selector.items()}
    if labels:
        note += _LABELS.format(labels="\n  ".join(sorted(labels)))
    kind = ("jobset.x-k8s.io/v1alpha2", "JobSet")
    return _files(plan, kind, spec, "jobset.yaml", note)


def _files(
    plan: Plan,
    kind: tuple[str, str],
    spec: dict[str, Any],
    file: str,
    note: str = "",
) -> dict[str, str]:
    """The plan, and a file of an object and the ConfigMap that it mounts."""
    version, word = kind
    name = run_name(plan)
    text = yaml_text(
        {
            "apiVersion": version,
            "kind": word,
            "metadata": {"name": name},
            "spec": spec,
        },
        _config_map(plan, name),
        header=_HEADER.format(label=plan.strategy.label(), file=file) + note,
    )
    return {"plan.json": plan.to_json(), file: text}


def _job(plan: Plan, pods: _Pods, script: str, first: str) -> dict[str, Any]:
    chosen = {"nodeSelector": dict(pods.selector)} if pods.selector else {}
    container = {
        "name": "node",
        "image": pods.image,
        "command": ["bash", "-c", script, "meshwright"],
        "args": ["--steps", "1000"],
        "env": [
            *_environment(plan),
            {"name": "MASTER_ADDR", "value": first},
            {"name": "MASTER_PORT", "value": "29500"},
        ],
        "resources": pods.resources,
        "volumeMounts": _MOUNTS,
    }
    return {
        "completionMode": "Indexed",
        "parallelism": pods.count,
        "completions": pods.count,
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                **chosen,
                "containers": [container],
                "volumes": _volumes(pods.name),
            }
        },
    }


def export_kubeflow(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``trainjob.yaml``, a TrainJob and its ConfigMap.

    Raises:
        ExportError: As :func:`export_jobset`.
    """
    (pods,) = _pods_of(plan)
    kind = ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    return _files(plan, kind, _spec(plan, pods), "trainjob.yaml")


def _spec(plan: Plan, pods: _Pods) -> dict[str, Any]:
    node = {
        "volumes": _volumes(pods.name),
        "containers": [{"name": "node", "volumeMounts": _MOUNTS}],
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": node}}}}
    return {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": "torch-distributed",
        },
        "trainer": {
            "image": pods.image,
            "command": ["bash", "-c", _TRAIN_JOB_SCRIPT, "meshwright"],
            "args": ["--steps", "1000"],
            "env": _environment(plan),
            "numNodes": pods.count,
            "numProcPerNode": pods.devices,
            "resourcesPerNode": pods.resources,
        },
        "runtimePatches": [
            {
                "manager": "meshwright.io/export",
                "trainingRuntimeSpec": {
                    "template": {"spec": {"replicatedJobs": [job]}}
                },
            }
        ],
    }
