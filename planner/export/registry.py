"""Exporters by the name of their target, and the folders that they fill."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import ExportError, MeshwrightError, PlanFileError, UnknownNameError
from planner.export.torchrun import case_of
from planner.plugins import entry_points
from planner.schema import write_atomically
from planner.targets import Target, get_target, nearest_expressible, target_names

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = [
    "GROUP",
    "Exporter",
    "export",
    "export_files",
    "export_json",
    "exporter_names",
    "require_expressible",
    "write_folder",
]

#: Turns a plan that the target can express into file names and their contents.
Exporter = Callable[["Plan"], dict[str, str]]

#: Entry-point group of other packages' exporters; the target of the same name is under
#: :data:`planner.targets.base.GROUP`.
GROUP = "meshwright.exporters"

#: Those that ship: target to module of :mod:`planner.export` and function in it.
_SHIPPED = {
    "json": ("registry", "export_json"),
    "torchrun": ("torchrun", "export_torchrun"),
    "slurm": ("slurm", "export_slurm"),
    "kubeflow": ("kubernetes", "export_kubeflow"),
    "jobset": ("kubernetes", "export_jobset"),
    "skypilot": ("skypilot", "export_skypilot"),
    "ray": ("ray_train", "export_ray"),
    "torchtitan": ("torchtitan", "export_torchtitan"),
    "torchtitan-0.2": ("torchtitan", "export_torchtitan_toml"),
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


def require_expressible(target: Target, plan: Plan) -> None:
    """Refuse a plan that a target cannot express.

    Raises:
        ExportError: Naming every field, why, and the nearest expressible strategy.
    """
    case = case_of(plan)
    found = [str(violation) for violation in target.violations(case)]
    if target.runs == "meshwright" and plan.not_runnable:
        # The plan's own reasons count, once.
        found = [f for f in found if not f.startswith("strategy=")]
        found += [
            f"strategy={plan.strategy.label()}: Meshwright's executors do not run it: "
            f"{reason}"
            for reason in plan.not_runnable
        ]
    if not found:
        return
    near = nearest_expressible(target, case)
    hint = "--nearest plans again within its limits"
    if near is not None:
        hint = f"nearest that it can: {near.label()} (not priced); {hint}"
    raise ExportError(
        f"{target.title} {target.version} cannot express this plan: "
        f"{' | '.join(found)}. {hint}"
    )


def export_files(plan: Plan, target: str) -> dict[str, str]:
    """Return the files that a target takes: their names and contents.

    Raises:
        UnknownNameError: If there is no such target.
        ExportError: If the target cannot express the plan: every field, why, and the
            nearest strategy that it could.
    """
    write = _exporter(target)
    require_expressible(get_target(target), plan)
    return write(plan)


def export(
    plan: Plan, target: str, out: str | os.PathLike[str], *, force: bool = False
) -> tuple[str, ...]:
    """Write the files that a target takes into a folder, made if it is missing.

    Args:
        plan: Any.
        target: One of :func:`exporter_names`.
        out: The folder.
        force: Write over files of the same names with other contents.

    Returns:
        Paths written, in the order of the target.
    Raises:
        UnknownNameError: If there is no such target.
        ExportError: If the target cannot express the plan.
        PlanFileError: If the folder cannot be written, or holds other content.
    """
    return write_folder(export_files(plan, target), out, force=force)


def export_json(plan: Plan) -> dict[str, str]:
    """``plan.json``, as :meth:`planner.schema.Plan.save` writes it."""
    return {"plan.json": plan.to_json()}


def write_folder(
    files: Mapping[str, str], out: str | os.PathLike[str], *, force: bool = False
) -> tuple[str, ...]:
    """Write files into a folder, which is made if it is missing.

    Args:
        files: Name inside the folder to contents. Scripts (``#!``) become executable.
        out: The folder.
        force: Write over files of the same names with other contents; what else is in
            the folder is left alone.

    Returns:
        Paths written, in order.
    Raises:
        PlanFileError: If a file of the same name has other contents, or the folder
            cannot be written. Nothing is written then.
    """
    folder = Path(out)
    _require_own_files(files, folder, force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Written aside first: a full disk leaves nothing behind.
        aside = Path(tempfile.mkdtemp(dir=folder, prefix=".meshwright-"))
    except OSError as error:
        raise PlanFileError(
            f"cannot write into the folder {folder}: {error.strerror}; choose another "
            f"one"
        ) from error
    try:
        return tuple(_written(files, folder, aside))
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _require_own_files(files: Mapping[str, str], folder: Path, force: bool) -> None:
    if force:
        return
    for name, text in files.items():
        path = folder / name
        if path.exists() and not (
            path.is_file() and path.read_bytes() == text.encode()
        ):
            raise PlanFileError(
                f"{path} exists with other content; choose another folder, or write "
                f"over it with --force (force=True)"
            )


def _written(files: Mapping[str, str], folder: Path, aside: Path) -> list[str]:
    for name, text in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
    paths = []
    for name in files:
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            (aside / name).replace(path)
        except OSError as error:
            raise PlanFileError(
                f"cannot write {path}: {error.strerror}; choose another folder"
            ) from error
        paths.append(str(path))
    return paths
