"""torchrun: one command a host, ranks numbered host by host."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.fields import EVERYTHING
from planner.targets.placement import same_on_every_host

__all__ = ["TARGETS"]

TARGETS = (
    Target(
        name="torchrun",
        title="torchrun",
        version="2.13",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host,),
        cannot=(
            "ranks out of the order of devices",
            "different devices on different hosts",
        ),
        check="bash -n; run on 2 gloo processes",
    ),
)
