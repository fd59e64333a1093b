"""Kubernetes with Kueue as a queue: JobSets and Workloads by ``kubectl``.

A launch is a JobSet in a LocalQueue, with one job for each host. Names of JobSets are
unique, so that a launch that is created twice exists once. A launch is stopped by its
Workload, whose ``spec.active`` Kueue obeys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from planner.admission.queues.base import (
    ANSWER_S,
    PREFIX,
    Command,
    Entry,
    Launch,
    QueueError,
    Snapshot,
    Status,
    answer,
    as_json,
    field_of,
)
from planner.schema.admission import StateHost

__all__ = ["KueueQueue", "jobset_manifest", "read_kueue", "stop_command"]

_JOBSET = "jobset.sigs.k8s.io/jobset-name"
_HOST = "kubernetes.io/hostname"
_QUEUE = "kueue.x-k8s.io/queue-name"
#: Label of nodes by GPU Feature Discovery.
_PRODUCT = "nvidia.com/gpu.product"
_OVER = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class KueueQueue:
    """Kueue, by kubectl.

    Attributes:
        local_queue: LocalQueue that launches go to.
        image: Image of their containers.
        namespace: Namespace of both.
        resource: Name of the devices as a resource.
        names: Value of the node's label nvidia.com/gpu.product to the name that
            throughputs have.
        answer_s: Time that a command may take.
    """

    local_queue: str
    image: str
    namespace: str = "default"
    resource: str = "nvidia.com/gpu"
    names: Mapping[str, str] = field(default_factory=dict)
    answer_s: float = ANSWER_S

    @property
    def name(self) -> str:
        """Name of the kind of queue."""
        return "kueue"

    def read(self) -> Snapshot:
        """Return nodes with devices, JobSets of ours, and pods of others."""
        return read_kueue(
            self._list("nodes"),
            self._list("pods", "--all-namespaces"),
            self._list("jobsets.jobset.x-k8s.io", f"--namespace={self.namespace}"),
            self._list("workloads.kueue.x-k8s.io", f"--namespace={self.namespace}"),
            resource=self.resource,
            names=self.names,
        )

    def launch(self, launch: Launch) -> str:
        """Create the JobSet of a launch; return its name."""
        manifest = jobset_manifest(
            launch,
            local_queue=self.local_queue,
            image=self.image,
            namespace=self.namespace,
            resource=self.resource,
        )
        words = ("kubectl", "create", "--filename=-", "--output=name")
        try:
            said = answer(
                Command(words=words, stdin=json.dumps(manifest)), self.answer_s
            ).strip()
        except QueueError as error:
            if "AlreadyExists" not in str(error):
                raise
            return launch.name
        if not said.endswith(f"/{launch.name}"):
            raise QueueError(
                f"kubectl create answered {said[:60]!r}, which does not name "
                f"{launch.name}; the next look finds out whether it was created"
            )
        return launch.name

    def stop(self, entry: str) -> None:
        """Let Kueue evict the Workload of a JobSet, and not queue it again."""
        workloads = self._list(
            "workloads.kueue.x-k8s.io", f"--namespace={self.namespace}"
        )
        command = stop_command(workloads, entry, self.namespace)
        if command is not None:
            answer(command, self.answer_s)

    def revoke(self, launch: str) -> None:
        """Do nothing: a command either was answered or did not arrive."""

    def write_note(self, entry: str, text: str) -> None:
        """Do nothing: JobSets of the loop have no note."""

    def extend(self, entry: Entry, until_s: float) -> None:
        """Do nothing: the loop launches without a time limit."""

    def _list(self, kind: str, *more: str) -> Any:
        words = ("kubectl", "get", kind, *more, "--output=json")
        said = answer(Command(words=words), self.answer_s)
        return as_json(said, f"kubectl get {kind}")


def read_kueue(
    nodes: Any,
    pods: Any,
    jobsets: Any,
    workloads: Any,
    *,
    resource: str = "nvidia.com/gpu",
    names: Mapping[str, str] | None = None,
) -> Snapshot:
    """Read lists of ``kubectl get … -o json``.

    Args:
        nodes: Nodes.
        pods: Pods of all namespaces.
        jobsets: JobSets.
        workloads: Workloads of Kueue.
        resource: Name of the devices as a resource.
        names: Value of the label nvidia.com/gpu.product to the name that throughputs
            have.

    Raises:
        QueueError: If a field is missing, or no node has such devices.
    """
    held: dict[str, dict[str, int]] = {}
    others: list[Entry] = []
    for pod in field_of(pods, "kubectl get pods", "items"):
        count, host = _asked(pod, resource), pod.get("spec", {}).get("nodeName")
        phase = pod.get("status", {}).get("phase")
        if not count or not host or phase in _OVER:
            continue
        owner = pod["metadata"].get("labels", {}).get(_JOBSET, "")
        if owner.startswith(PREFIX):
            mine = held.setdefault(owner, {})
            mine[host] = mine.get(host, 0) + count
        else:
            others.append(_of_others(pod, host, count))
    usage: dict[str, int] = {}
    for devices in (*held.values(), *(each.devices for each in others)):
        for host, count in devices.items():
            usage[host] = usage.get(host, 0) + count
    hosts = tuple(_hosts(nodes, resource, names or {}, usage))
    if not hosts:
        raise QueueError(
            f"no node has {resource} to allocate; see whether its device plugin runs"
        )
    inactive = {
        owner
        for each in field_of(workloads, "kubectl get workloads", "items")
        if each.get("spec", {}).get("active") is False
        for owner in _owners(each)
    }
    ours = (
        _entry(each, held, inactive)
        for each in field_of(jobsets, "kubectl get jobsets", "items")
        if each["metadata"]["name"].startswith(PREFIX)
    )
    return Snapshot(hosts=hosts, entries=(*ours, *others))


def _of_others(pod: Any, host: str, count: int) -> Entry:
    data = pod["metadata"]
    start = _seconds(pod.get("status", {}).get("startTime"))
    limit = pod["spec"].get("activeDeadlineSeconds")
    return Entry(
        id=f"{data.get('namespace', 'default')}/{data['name']}",
        # A name of theirs is not to be taken for one of ours.
        name=f"pod/{data['name']}",
        status="running",
        devices={host: count},
        start_s=start,
        until_s=start + limit if start is not None and limit else None,
    )


def _asked(pod: Any, resource: str) -> int:
    found = 0
    for container in pod.get("spec", {}).get("containers", ()):
        resources = container.get("resources", {})
        for part in ("limits", "requests"):
            if resource in resources.get(part, {}):
                name = f"pod {pod['metadata']['name']}"
                found += _count(resources[part][resource], name, resource)
                break
    return found


def _count(value: Any, where: str, resource: str) -> int:
    text = str(value)
    if not text.isdigit():
        raise QueueError(
            f"kubectl answered {text!r} {resource} of {where}, which is no whole "
            "number; nothing is done till it answers one, see kubectl describe"
        )
    return int(text)


def _hosts(
    nodes: Any, resource: str, names: Mapping[str, str], usage: Mapping[str, int]
) -> Iterator[StateHost]:
    for node in field_of(nodes, "kubectl get nodes", "items"):
        name = field_of(node, "kubectl get nodes", "metadata", "name")
        status = node.get("status", {})
        count = _count(
            status.get("capacity", {}).get(resource, 0), f"node {name}", resource
        )
        able = _count(
            status.get("allocatable", {}).get(resource, 0), f"node {name}", resource
        )
        if not count:
            continue
        ready = any(
            each.get("type") == "Ready" and each.get("status") == "True"
            for each in status.get("conditions", ())
        )
        if not ready:
            able = 0
        elif node.get("spec", {}).get("unschedulable"):
            able = min(able, usage.get(name, 0))
        product = node["metadata"].get("labels", {}).get(_PRODUCT, resource)
        yield StateHost(
            name=name,
            device=names.get(product, product),
            devices=count,
            down=count - min(able, count),
        )


def _owners(workload: Any) -> list[str]:
    return [
        each["name"]
        for each in workload["metadata"].get("ownerReferences", ())
        if each.get("kind") == "JobSet"
    ]


def _entry(
    jobset: Any, held: Mapping[str, Mapping[str, int]], inactive: set[str]
) -> Entry:
    name = jobset["metadata"]["name"]
    true = {
        each.get("type")
        for each in jobset.get("status", {}).get("conditions", ())
        if each.get("status") == "True"
    }
    devices = dict(held.get(name, {}))
    status: Status = "running" if devices else "pending"
    if "Completed" in true:
        status = "done"
    elif "Failed" in true or (name in inactive and not devices):
        status = "failed"
    return Entry(
        id=name,
        name=name,
        status=status,
        devices=devices if status == "running" else {},
    )


def _seconds(text: str | None) -> float | None:
    if not text:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError as error:
        raise QueueError(f"{text!r} is no time that kubectl writes") from error


def jobset_manifest(
    launch: Launch,
    *,
    local_queue: str,
    image: str,
    namespace: str = "default",
    resource: str = "nvidia.com/gpu",
) -> dict[str, Any]:
    """Return the JobSet of a launch, with a job for each host.

    Args:
        launch: The launch.
        local_queue: LocalQueue of Kueue.
        image: Image of the containers.
        namespace: Namespace.
        resource: Name of the devices as a resource.
    """
    jobs = [
        _job(at, host, count, launch, image, resource)
        for at, (host, count) in enumerate(launch.devices.items())
    ]
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": launch.name,
            "namespace": namespace,
            "labels": {_QUEUE: local_queue},
        },
        # Kueue lets it go on when it admits it.
        "spec": {"suspend": True, "replicatedJobs": jobs},
    }


def _job(
    at: int, host: str, count: int, launch: Launch, image: str, resource: str
) -> dict[str, Any]:
    variables = {
        "MESHWRIGHT_LAUNCH": launch.name,
        "MESHWRIGHT_NODE_RANK": str(at),
        "MESHWRIGHT_NODES": str(len(launch.devices)),
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": {_HOST: host},
        "containers": [
            {
                "name": "main",
                "image": image,
                "command": list(launch.words),
                "env": [{"name": n, "value": v} for n, v in variables.items()],
                "resources": {"limits": {resource: str(count)}},
            }
        ],
    }
    job = {"parallelism": 1, "completions": 1, "backoffLimit": 0}
    return {
        "name": f"host{at}",
        "replicas": 1,
        "template": {"spec": {**job, "template": {"spec": pod}}},
    }


def stop_command(workloads: Any, entry: str, namespace: str) -> Command | None:
    """Return the patch that makes Kueue evict a JobSet; None if it has no Workload.

    Args:
        workloads: List of Workloads.
        entry: Name of the JobSet.
        namespace: Namespace.
    """
    for each in field_of(workloads, "kubectl get workloads", "items"):
        if entry in _owners(each):
            words = ("kubectl", "patch", "workloads.kueue.x-k8s.io")
            patch = json.dumps({"spec": {"active": False}})
            more = (f"--namespace={namespace}", "--type=merge", f"--patch={patch}")
            return Command(words=(*words, each["metadata"]["name"], *more))
    return None
