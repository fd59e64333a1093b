"""A plan as each launcher takes it. One file a target; nothing is dropped silently."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlanFileError, UnknownNameError
from planner.export.plan_json import export_json
from planner.export.torchrun import export_torchrun
from planner.schema import write_atomically

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["TARGETS", "export"]

#: Target to a function that turns a plan into file names and their contents.
TARGETS: Mapping[str, Callable[[Plan], dict[str, str]]] = {
    "json": export_json,
    "torchrun": export_torchrun,
}


def export(plan: Plan, target: str, out: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write what a target takes into a folder, which is made if it is missing.

    Returns:
        Paths written, in the order of the target.
    Raises:
        UnknownNameError: If there is no such target.
        ExportError: If the target cannot say what the plan says.
        PlanFileError: If the folder cannot be written.
    """
    if target not in TARGETS:
        raise UnknownNameError("export target", target, TARGETS)
    files = TARGETS[target](plan)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanFileError(
            f"cannot make the folder {folder}: {error.strerror}; choose another one"
        ) from error
    paths = []
    for name, text in files.items():
        path = folder / name
        write_atomically(path, text.encode())
        if text.startswith("#!"):
            path.chmod(path.stat().st_mode | 0o111)
        paths.append(str(path))
    return tuple(paths)
