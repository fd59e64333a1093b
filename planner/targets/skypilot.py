"""SkyPilot: equal machines of any cloud, torchrun on each."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.devices import on_skypilot, one_kind_of_device
from planner.targets.fields import EVERYTHING
from planner.targets.placement import same_on_every_host

__all__ = ["TARGETS"]

TARGETS = (
    Target(
        name="skypilot",
        title="SkyPilot",
        version="0.14",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, one_kind_of_device, on_skypilot),
        cannot=(
            "ranks out of the order of devices",
            "different numbers of devices on different hosts",
            "devices of several types",
            "device types that SkyPilot has no name for",
        ),
        check="sky.Task.from_yaml; bash -n, shellcheck; its run section on 2 gloo "
        "processes",
    ),
)
