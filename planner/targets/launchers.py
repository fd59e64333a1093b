"""Launchers that start Meshwright's own executors, and the plan file itself."""

from __future__ import annotations

from dataclasses import replace

from planner.targets.base import EVERYTHING, Target
from planner.targets.rules import (
    known_host_types,
    known_products,
    known_resource,
    on_skypilot,
    one_kind_of_core,
    one_kind_of_device,
    same_on_every_host,
    stops_on_failure,
    whole_hosts,
)

__all__ = ["TARGETS"]

_GOES_ON = "a run that goes on without ranks that fail"

_KUBEFLOW = Target(
    name="kubeflow",
    title="Kubeflow Trainer",
    version="2.3",
    runs="meshwright",
    says=EVERYTHING,
    rules=(same_on_every_host, one_kind_of_device, known_resource, stops_on_failure),
    limits=(
        "different numbers of devices on different hosts",
        "devices of several types",
        "device types without a known device plugin",
        "a plan file of more than 1 MB",
        _GOES_ON,
    ),
    check="models of the published schema (kubeflow-trainer-api), bash -n, shellcheck",
)

TARGETS = (
    Target(
        name="json",
        title="Meshwright plan",
        version="1",
        runs="itself",
        says=EVERYTHING,
        check="the plan's own schema",
    ),
    # One command a host; processes are numbered host by host.
    Target(
        name="torchrun",
        title="torchrun",
        version="2.13",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, stops_on_failure),
        limits=("different devices on different hosts", _GOES_ON),
        check="bash -n; run on 2 gloo processes",
    ),
    # One task a node, torchrun inside.
    Target(
        name="slurm",
        title="SLURM",
        version="25.05",
        runs="meshwright",
        says=EVERYTHING,
        rules=(
            same_on_every_host,
            known_host_types,
            one_kind_of_core,
            stops_on_failure,
        ),
        limits=(
            "different numbers of devices on different hosts",
            "CPU cores of several types",
            _GOES_ON,
        ),
        check="bash -n, shellcheck; run with stand-ins for sbatch, srun and scontrol",
    ),
    _KUBEFLOW,
    # The object that a TrainJob of Kubeflow is made of; one job for each run of hosts
    # with devices of one type.
    replace(
        _KUBEFLOW,
        name="jobset",
        title="JobSet",
        version="v1alpha2",
        rules=(
            same_on_every_host,
            known_host_types,
            one_kind_of_core,
            known_resource,
            known_products,
            stops_on_failure,
        ),
        limits=(
            "different numbers of devices on different hosts",
            "CPU cores of several types",
            "device types without a known device plugin, or of which it is not known "
            "how nodes are labelled where there are several",
            "a plan file of more than 1 MB",
            _GOES_ON,
        ),
    ),
    # Equal machines of any cloud, torchrun on each.
    Target(
        name="skypilot",
        title="SkyPilot",
        version="0.14",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, one_kind_of_device, on_skypilot, stops_on_failure),
        limits=(
            "different numbers of devices on different hosts",
            "devices of several types",
            "device types that SkyPilot has no name for",
            _GOES_ON,
        ),
        check="sky.Task.from_yaml; bash -n, shellcheck; its run section on 2 gloo "
        "processes",
    ),
    # One worker a rank, packed host by host.
    Target(
        name="ray",
        title="Ray Train",
        version="2.60",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, whole_hosts, one_kind_of_device, stops_on_failure),
        limits=(
            "some of the devices of several hosts",
            "devices of several types",
            _GOES_ON,
        ),
        check="ScalingConfig; run on a local Ray, 2 workers, loss equal to that of "
        "meshwright run",
    ),
)
