"""All files of an export, or none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.errors import PlanFileError
from planner.schema import write_atomically

__all__ = ["write_folder"]


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
    _refuse_others(files, folder, force)
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


def _refuse_others(files: Mapping[str, str], folder: Path, force: bool) -> None:
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
