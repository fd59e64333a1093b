"""Whether this machine is the one that a plan was made for."""

from __future__ import annotations

import os

from planner.errors import FingerprintError
from planner.schema import Plan

__all__ = ["check_machine", "on_one_host"]


def on_one_host() -> bool:
    """Whether torchrun started all ranks here; if it does not say, they may not be."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def check_machine(plan: Plan) -> None:
    """Refuse a plan that is for another machine.

    Raises:
        FingerprintError: With the differences, and what to do.
    """
    from planner.cluster import Cluster

    here = Cluster.detect()
    if here.num_devices != plan.cluster.num_devices and "gloo" in {
        device.backend for device in here.device_types
    }:
        # Any number of processes can be started on CPU cores.
        here = Cluster.detect(processes=plan.cluster.num_devices)
    if here.fingerprint == plan.cluster.fingerprint:
        return
    found = here.reference()
    differences = [
        f"{name} {ours} in the plan, {theirs} here"
        for name, ours, theirs in (
            (
                "devices",
                _devices(plan.cluster.device_types),
                _devices(found.device_types),
            ),
            ("hosts", _hosts(plan.cluster.hosts), _hosts(found.hosts)),
        )
        if ours != theirs
    ]
    raise FingerprintError(
        f"the plan is for {plan.cluster.name}, not for this machine: "
        f"{', '.join(differences) or 'their networks differ'}; plan for local, use "
        f"torchrun on those machines, or --force to run all the same"
    )


def _devices(kinds: dict[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _hosts(runs: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"{count} of {devices} devices" for count, devices in runs)
