"""Ray Train: one worker a rank, packed host by host."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.devices import one_kind_of_device
from planner.targets.fields import EVERYTHING
from planner.targets.placement import same_on_every_host, whole_hosts

__all__ = ["TARGETS"]

TARGETS = (
    Target(
        name="ray",
        title="Ray Train",
        version="2.60",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, whole_hosts, one_kind_of_device),
        cannot=(
            "ranks out of the order of devices",
            "some of the devices of several hosts",
            "devices of several types",
        ),
        check="ScalingConfig; run on a local Ray, 2 workers, loss equal to that of "
        "meshwright run",
    ),
)
