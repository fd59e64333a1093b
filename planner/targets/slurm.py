"""SLURM: one task a node, torchrun inside."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.devices import one_kind_of_device
from planner.targets.fields import EVERYTHING
from planner.targets.placement import same_on_every_host

__all__ = ["TARGETS"]

TARGETS = (
    Target(
        name="slurm",
        title="SLURM",
        version="25.05",
        runs="meshwright",
        says=EVERYTHING,
        rules=(same_on_every_host, one_kind_of_device),
        cannot=(
            "ranks out of the order of devices",
            "different numbers of devices on different hosts",
            "devices of several types",
        ),
        check="bash -n, shellcheck; run with stand-ins for sbatch, srun and scontrol",
    ),
)
