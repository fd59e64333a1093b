"""Objects of Kubernetes: Kubeflow's TrainJob, and the JobSet that it is made of."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.devices import known_resource, one_kind_of_device
from planner.targets.fields import EVERYTHING
from planner.targets.placement import same_on_every_host

__all__ = ["TARGETS"]

_RULES = (same_on_every_host, one_kind_of_device, known_resource)
_CANNOT = (
    "ranks out of the order of devices",
    "different numbers of devices on different hosts",
    "devices of several types",
    "device types without a known device plugin",
    "a plan file of more than 1 MB",
)
_CHECK = "models of the published schema (kubeflow-trainer-api), bash -n, shellcheck"

TARGETS = (
    Target(
        name="kubeflow",
        title="Kubeflow Trainer",
        version="2.3",
        runs="meshwright",
        says=EVERYTHING,
        rules=_RULES,
        cannot=_CANNOT,
        check=_CHECK,
    ),
    Target(
        name="jobset",
        title="JobSet",
        version="v1alpha2",
        runs="meshwright",
        says=EVERYTHING,
        rules=_RULES,
        cannot=_CANNOT,
        check=_CHECK,
    ),
)
