"""Whether ranks are processes on CPU cores, where some frameworks do not train."""

from __future__ import annotations

from planner.targets.base import Case, Refusal
from planner.targets.devices import is_cpu

__all__ = ["accelerators_alone", "on_cpu"]


def on_cpu(case: Case) -> bool:
    """Whether ranks are processes on CPU cores."""
    kinds = case.device_types
    return case.backend == "gloo" or (bool(kinds) and all(map(is_cpu, kinds)))


def accelerators_alone(case: Case) -> Refusal | None:
    """A rule: ranks are not processes on CPU cores."""
    if not on_cpu(case):
        return None
    return Refusal(
        field="cluster.device_types",
        value=", ".join(case.device_types) or case.backend,
        why="it trains on accelerators alone",
        remedy="plan for those, or use torchrun, by which Meshwright trains on CPUs",
    )
