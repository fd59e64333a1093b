"""The plan and a TrainJob of Kubeflow Trainer.

Written for Kubeflow Trainer 2.3, ``trainer.kubeflow.org/v1alpha1``: its runtime
``torch-distributed`` sets PET_NNODES and its kin, which torchrun reads by itself.
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
from planner.export.yaml_text import yaml_text

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_kubeflow"]

_SCRIPT = INSTALL + 'exec torchrun --no-python meshwright run "$PLAN" "$@"\n'


def export_kubeflow(plan: Plan) -> dict[str, str]:
    """``plan.json`` and ``trainjob.yaml``, a TrainJob and its ConfigMap.

    Raises:
        ExportError: If ranks are not the same on every host, nobody knows what the
            devices are called, or the plan is larger than a ConfigMap may be.
    """
    pods = pods_of(plan)
    header = HEADER.format(label=plan.strategy.label(), file="trainjob.yaml")
    text = yaml_text(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": pods.name},
            "spec": _spec(pods),
        },
        config_map(plan, pods.name),
        header=header,
    )
    return {"plan.json": plan.to_json(), "trainjob.yaml": text}


def _spec(pods: Pods) -> dict[str, Any]:
    node = {
        "volumes": volumes(pods.name),
        "containers": [{"name": "node", "volumeMounts": MOUNTS}],
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
            "command": ["bash", "-c", _SCRIPT, "meshwright"],
            "args": ["--steps", "1000"],
            "env": environment(),
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
