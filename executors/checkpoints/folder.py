"""A folder of checkpoints: whole ones under their names, and a file that names one.

``step-000123`` is the state after 123 steps. It is written as ``step-000123.tmp`` and
renamed when every rank has written its part; then the file ``latest`` is made to name
it. Whatever kills a run, at any moment, ``latest`` names a whole checkpoint. So does
``best``, where that with the lowest evaluation loss is kept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path

from planner.errors import ExecutionError, PlanFileError
from planner.schema.base import write_atomically
from planner.schema.checkpoint import CheckpointRecord, FileRecord

__all__ = ["CheckpointFolder", "damage", "inspect_file", "is_checkpoint_name"]

_LOG = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d{6,})")
_RECORD, _LATEST, _BEST = "checkpoint.json", "latest", "best"
#: Endings of folders that are no checkpoints: half written or half deleted; set aside.
_TEMPORARY, _ASIDE = ".tmp", ".aside"
_CHUNK_BYTES = 1 << 20


def is_checkpoint_name(name: str) -> bool:
    """Return True if a text has the form of a checkpoint's name."""
    return _STEP.fullmatch(name) is not None


def inspect_file(path: Path) -> FileRecord:
    """Size and checksum of a file, read through once."""
    size = crc = 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return FileRecord(bytes=size, crc32=crc)


def damage(path: Path, expected: FileRecord) -> str | None:
    """Describe the damage of a file; None if it is as it was written."""
    if not path.is_file():
        return f"{path} is missing; is the folder seen by every rank?"
    size = path.stat().st_size
    if size != expected.bytes:
        return f"{path} is damaged: it has {size} bytes, {expected.bytes} were written"
    if inspect_file(path).crc32 != expected.crc32:
        return f"{path} is damaged: its bytes are not those that were written"
    return None


class CheckpointFolder:
    """The checkpoints of one run. For one process to change; others may read.

    Args:
        path: Need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending; none if there is no folder."""
        if not self.path.is_dir():
            return []
        found = [_STEP.fullmatch(entry.name) for entry in self.path.iterdir()]
        return sorted(int(match[1]) for match in found if match)

    def of(self, step: int) -> Path:
        """Folder of the checkpoint of a step, there or not."""
        return self.path / f"step-{step:06d}"

    def unfinished(self, step: int) -> Path:
        """Folder in which the checkpoint of a step is written until it is whole."""
        return self.path / f"{self.of(step).name}{_TEMPORARY}"

    def choose(self, resume: bool | str) -> str | None:
        """Make the folder, remove unfinished checkpoints, and choose where to begin.

        Args:
            resume: A name, or True for the latest.
        Returns:
            Name of a checkpoint; None to begin at the beginning.
        Raises:
            ExecutionError: If there is no such checkpoint, or there are some and
                none was asked for.
            OSError: If the folder cannot be made or read.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for left in self.path.glob(f"step-*{_TEMPORARY}"):
            shutil.rmtree(left)
        steps = self.steps()
        if not steps and not isinstance(resume, str):
            return None
        if resume is False:
            raise ExecutionError(
                f"{self.path} holds checkpoints of another run, up to "
                f"{self.of(steps[-1]).name}; resume it or choose another checkpoint_dir"
            )
        wanted = resume if isinstance(resume, str) else self._latest(steps)
        if not (self.path / wanted).is_dir():
            raise ExecutionError(f"{self.path} holds no {wanted}{self.remedy()}")
        return wanted

    def latest(self) -> str | None:
        """Name of the latest checkpoint; None if there is none."""
        steps = self.steps()
        return self._latest(steps) if steps else None

    def _latest(self, steps: list[int]) -> str:
        """Name in the pointer file; the highest step where there is no pointer."""
        pointer = self.path / _LATEST
        if not pointer.is_file():
            return self.of(steps[-1]).name
        name = pointer.read_bytes().decode(errors="replace").strip()
        if not is_checkpoint_name(name):
            raise ExecutionError(
                f"{pointer} names no checkpoint but {name[:40]!r}{self.remedy()}"
            )
        return name

    def remedy(self, damaged: str | None = None) -> str:
        """Remedy that ends a message: the other checkpoint to resume from.

        Args:
            damaged: Name of the one that cannot be used.
        """
        whole = [
            self.of(step).name
            for step in self.steps()
            if self.of(step).name != damaged and (self.of(step) / _RECORD).is_file()
        ]
        if whole:
            return f"; resume from {whole[-1]} instead (--resume {whole[-1]})"
        return "; there is no other checkpoint, begin anew in another checkpoint_dir"

    def read_record(self, name: str) -> CheckpointRecord:
        """Read the record of a checkpoint.

        Raises:
            ExecutionError: If it cannot be read.
        """
        try:
            return CheckpointRecord.load(self.path / name / _RECORD)
        except PlanFileError as error:
            raise ExecutionError(f"{error}{self.remedy(name)}") from error

    def settle(self, step: int) -> float | None:
        """Make a checkpoint the latest; set later ones aside.

        Returns:
            Lowest evaluation loss of those that stay; None if none has any.
        """
        self._point_to(self.of(step).name)
        for later in self.steps():
            if later > step:
                old = self.of(later)
                aside = old.with_name(old.name + _ASIDE)
                shutil.rmtree(aside, ignore_errors=True)
                old.rename(aside)
                _LOG.warning("%s set aside: the run goes on from %d", aside, step)
        losses = self._losses()
        if not losses:
            (self.path / _BEST).unlink(missing_ok=True)
            return None
        best = min(losses, key=lambda one: (losses[one], one))
        if (self.path / _BEST).exists():
            self._point_to(self.of(best).name, _BEST)
        return losses[best]

    def _losses(self) -> dict[int, float]:
        """Evaluation loss of each checkpoint that has one, by its step."""
        found: dict[int, float] = {}
        for step in self.steps():
            with contextlib.suppress(PlanFileError):
                # One that is damaged is refused when it is asked for.
                loss = CheckpointRecord.load(self.of(step) / _RECORD).eval_loss
                if loss is not None and math.isfinite(loss):
                    found[step] = loss
        return found

    def _best(self) -> str | None:
        """Name in the file ``best``; None without one."""
        pointer = self.path / _BEST
        if not pointer.is_file():
            return None
        return pointer.read_bytes().decode(errors="replace").strip()

    def publish(
        self,
        record: CheckpointRecord,
        files: Mapping[str, FileRecord],
        keep: int,
        *,
        best: bool = False,
        keep_best: bool = False,
    ) -> None:
        """Make what all ranks have written a checkpoint, the latest; drop old ones.

        Args:
            record: Without files.
            files: All files of the folder.
            keep: How many of the last to keep.
            best: Make it the best, too.
            keep_best: Keep the best, though it is not among the last.
        """
        folder, written = self.of(record.step), self.unfinished(record.step)
        record = record.model_copy(update={"files": dict(sorted(files.items()))})
        record.save(written / _RECORD)
        _sync(written / _RECORD)
        _sync(written)
        if folder.exists():
            self._delete(folder)
        written.rename(folder)
        _sync(self.path)
        self._point_to(folder.name)
        if best:
            self._point_to(folder.name, _BEST)
        kept = self._best() if keep_best else None
        earlier = [step for step in self.steps() if step < record.step]
        for step in earlier[: max(0, len(earlier) - (keep - 1))]:
            if self.of(step).name != kept:
                self._delete(self.of(step))

    def _point_to(self, name: str, pointer: str = _LATEST) -> None:
        write_atomically(self.path / pointer, f"{name}\n".encode())
        _sync(self.path)

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint; first its name, so that no half of one ever has it."""
        doomed = folder.with_name(f"{folder.name}.old{_TEMPORARY}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
