"""The plan and a JobSet.

Written for ``jobset.x-k8s.io/v1alpha2``, as of JobSet 0.10. One indexed Job with a pod
a host; the first pod has a name of its own in the JobSet's subdomain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.export.kubernetes import (
    HEADER,
    INSTALL,
    MOUNTS,
    Pods,
    config_map,
    environment,
    pods_of,
    volumes,
)
from planner.export.torchrun import torchrun_command
from planner.export.yaml_text import yaml_text

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_jobset"]

#: Kubernetes numbers the pods of an indexed Job from 0.
_RANK = 'export NODE_RANK="$JOB_COMPLETION_INDEX"\n'


def export_jobset(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``jobset.yaml``, a JobSet and its ConfigMap.

    Raises:
        ExportError: If ranks are not the same on every host, nobody knows what the
            devices are called, or the plan is larger than a ConfigMap may be.
    """
    pods = pods_of(plan)
    script = INSTALL + _RANK + f'exec {torchrun_command(plan)} "$PLAN" "$@"\n'
    text = yaml_text(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": pods.name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": pods.name},
                "failurePolicy": {"maxRestarts": 0},
                "replicatedJobs": [
                    {
                        "name": "node",
                        "replicas": 1,
                        "template": {"spec": _job(pods, script)},
                    }
                ],
            },
        },
        config_map(plan, pods.name),
        header=HEADER.format(label=plan.strategy.label(), file="jobset.yaml")
        + "\nWith --checkpoint-dir and --resume, maxRestarts may be above 0.",
    )
    return {"plan.json": plan.to_json(), "jobset.yaml": text}


def _job(pods: Pods, script: str) -> dict[str, Any]:
    first = f"{pods.name}-node-0-0.{pods.name}"
    container = {
        "name": "node",
        "image": pods.image,
        "command": ["bash", "-c", script, "meshwright"],
        "args": ["--steps", "1000"],
        "env": [
            *environment(),
            {"name": "MASTER_ADDR", "value": first},
            {"name": "MASTER_PORT", "value": "29500"},
        ],
        "resources": pods.resources,
        "volumeMounts": MOUNTS,
    }
    return {
        "completionMode": "Indexed",
        "parallelism": pods.count,
        "completions": pods.count,
        "backoffLimit": 0,
        "template": {
            "spec": {
                "restartPolicy": "Never",
                "containers": [container],
                "volumes": volumes(pods.name),
            }
        },
    }
