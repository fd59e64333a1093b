"""Targets by name: those that ship, and those that other packages register."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import EntryPoint

from planner.errors import MeshwrightError, UnknownNameError
from planner.plugins import entry_points
from planner.targets.base import Target

__all__ = ["GROUP", "get_target", "target_names"]

#: Entry-point group under which anyone can ship a :class:`Target`. The function that
#: writes its files goes under ``meshwright.exporters``, by the same name.
GROUP = "meshwright.targets"

#: Those that ship: name to the module of :mod:`planner.targets` that declares it.
_SHIPPED = {
    "json": "meshwright",
    "torchrun": "torchrun",
    "slurm": "slurm",
    "kubeflow": "kubernetes",
    "jobset": "kubernetes",
    "skypilot": "skypilot",
    "ray": "ray_train",
    "torchtitan": "torchtitan",
    "torchtitan-0.2": "torchtitan",
    "megatron": "megatron",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "nanotron": "nanotron",
}


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def target_names() -> tuple[str, ...]:
    """Names of all installed targets: those that ship, then the others, sorted."""
    others = sorted(set(_registered()) - set(_SHIPPED))
    return (*_SHIPPED, *others)


@cache
def get_target(name: str) -> Target:
    """A target's declaration.

    Raises:
        UnknownNameError: If none of that name is installed.
        MeshwrightError: If what is registered under the name is no Target.
    """
    if name in _SHIPPED:
        module = importlib.import_module(f"planner.targets.{_SHIPPED[name]}")
        found: Target = next(t for t in module.TARGETS if t.name == name)
        return found
    points = _registered()
    if name not in points:
        raise UnknownNameError("target", name, target_names())
    try:
        made = points[name].load()
    except ImportError as error:
        raise MeshwrightError(
            f"target {name!r} needs {error.name!r}, which is not installed; install it "
            f"or choose another target"
        ) from error
    if not isinstance(made, Target):
        raise MeshwrightError(
            f"target {name!r} ({points[name].value}) is no planner.targets.Target"
        )
    return made
