"""From a target's name to what is written for it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.errors import MeshwrightError, UnknownNameError
from planner.export.checking import require_expressible
from planner.export.folder import write_folder
from planner.plugins import entry_points
from planner.targets import get_target, target_names

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["GROUP", "Exporter", "export", "export_files", "exporter_names"]

#: Turns a plan that the target can say into file names and their contents.
Exporter = Callable[["Plan"], dict[str, str]]

#: Entry-point group of other packages' exporters; the target of the same name is under
#: :data:`planner.targets.base.GROUP`.
GROUP = "meshwright.exporters"

#: Those that ship: target to module of :mod:`planner.export` and function in it.
_SHIPPED = {
    "json": ("plan_json", "export_json"),
    "torchrun": ("torchrun", "export_torchrun"),
    "slurm": ("slurm", "export_slurm"),
    "kubeflow": ("kubeflow", "export_kubeflow"),
    "jobset": ("jobset", "export_jobset"),
    "skypilot": ("skypilot", "export_skypilot"),
    "ray": ("ray_train", "export_ray"),
    "torchtitan": ("torchtitan", "export_torchtitan"),
    "torchtitan-0.2": ("torchtitan_toml", "export_torchtitan_toml"),
    "megatron": ("megatron", "export_megatron"),
    "accelerate": ("accelerate", "export_accelerate"),
    "deepspeed": ("deepspeed", "export_deepspeed"),
    "nanotron": ("nanotron", "export_nanotron"),
}


def exporter_names() -> tuple[str, ...]:
    """Targets that plans can be exported to."""
    others = {point.name for point in entry_points(group=GROUP)}
    return tuple(n for n in target_names() if n in _SHIPPED or n in others)


def _exporter(name: str) -> Exporter:
    if name in _SHIPPED:
        module, function = _SHIPPED[name]
        found = getattr(importlib.import_module(f"planner.export.{module}"), function)
    else:
        points = [point for point in entry_points(group=GROUP) if point.name == name]
        if not points:
            raise UnknownNameError("export target", name, exporter_names())
        try:
            found = points[0].load()
        except ImportError as error:
            raise MeshwrightError(
                f"export target {name!r} needs {error.name!r}, which is not installed; "
                f"install it or choose another target"
            ) from error
    made: Exporter = found
    return made


def export_files(plan: Plan, target: str) -> dict[str, str]:
    """What a target takes: file names and their contents.

    Raises:
        UnknownNameError: If there is no such target.
        ExportError: If the target cannot say what the plan says: every field, why, and
            the nearest that it could say.
    """
    write = _exporter(target)
    require_expressible(get_target(target), plan)
    return write(plan)


def export(
    plan: Plan, target: str, out: str | os.PathLike[str], *, force: bool = False
) -> tuple[str, ...]:
    """Write what a target takes into a folder, which is made if it is missing.

    Args:
        plan: Any.
        target: One of :func:`exporter_names`.
        out: The folder.
        force: Write over files of the same names with other contents.

    Returns:
        Paths written, in the order of the target.
    Raises:
        UnknownNameError: If there is no such target.
        ExportError: If the target cannot say what the plan says.
        PlanFileError: If the folder cannot be written, or holds other content.
    """
    return write_folder(export_files(plan, target), out, force=force)
