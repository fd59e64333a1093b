"""Checkpoints of a run: saved by all ranks together, and the way back from them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints import dcp
from executors.checkpoints.data_state import read_states, write_states
from executors.checkpoints.folder import CheckpointFolder, damage, is_checkpoint_name
from executors.checkpoints.snapshot import (
    Inventory,
    collect,
    difference,
    require_states,
    restore_codecs,
    restore_generators,
    targets,
)
from executors.data import DataSource
from executors.replicas import DrainedReplicas, Replicas
from executors.soundness import require_sound_weights
from executors.trainer import Trainer
from planner.errors import ExecutionError, FingerprintError, MeshwrightError
from planner.schema.checkpoint import CheckpointRecord, FileRecord

__all__ = ["CheckpointOptions", "Checkpoints"]

_LOG = logging.getLogger(__name__)

#: Between the seeds of runs that go on under another mesh, by step.
_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOptions:
    """Folder and times at which a run saves its state, and where it begins.

    Attributes:
        folder: Holds the checkpoints of one run; all ranks must see the same.
        every: Steps between them; None for one at the end.
        resume: Begin where the latest ends, or a named one (``step-000100``).
            With True and an empty folder a run begins at its beginning.
        keep: How many of the last to keep.
        background: Write from a thread while training goes on.
        keep_best: Also keep that with the lowest evaluation loss, and save one after
            each evaluation that is the best so far.

    Raises:
        ExecutionError: If a number is below 1, or the name is none.
    """

    folder: Path
    every: int | None = None
    resume: bool | str = False
    keep: int = 2
    background: bool = False
    keep_best: bool = False

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("keep", self.keep)):
            if value is not None and value < 1:
                raise ExecutionError(
                    f"checkpoint {name}={value}; give a number of at least 1"
                )
        if isinstance(self.resume, str) and not is_checkpoint_name(self.resume):
            raise ExecutionError(
                f"resume={self.resume!r} names no checkpoint; give step-000100, say, "
                f"or nothing for the latest in {self.folder}"
            )

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str] | None,
        every: int | None,
        resume: bool | str,
        keep: int,
        background: bool,
        keep_best: bool = False,
    ) -> CheckpointOptions | None:
        """Options as a run is given them; None without a folder.

        Args:
            folder: As for :func:`executors.run`.
            every: Steps between checkpoints; None for one at the end.
            resume: As for ``run``.
            keep: How many of the last to keep.
            background: Write from a thread while training goes on.
            keep_best: As for ``run``.

        Raises:
            ExecutionError: If there is no folder, although checkpoints are asked for.
        """
        if folder is None:
            if every is not None or resume or keep_best:
                asked = "checkpoint_every" if every is not None else "keep_best"
                asked = "resume" if resume else asked
                raise ExecutionError(f"{asked} needs a folder; give checkpoint_dir")
            return None
        return cls(
            folder=Path(folder).absolute(),
            every=every,
            resume=resume,
            keep=keep,
            background=background,
            keep_best=keep_best,
        )

    def due(self, done: int, steps: int) -> bool:
        """Return True if a checkpoint is due after so many steps of a run.

        Args:
            done: Steps done.
            steps: Steps that the run will have done at its end.
        """
        return done == steps or (self.every is not None and done % self.every == 0)

    def require_rests(
        self, steps: int, replicas: Replicas, evaluate_every: int | None = None
    ) -> None:
        """Refuse to save while copies of the weights are on their own.

        Args:
            steps: Steps that the run will have done at its end.
            replicas: What keeps the copies together.
            evaluate_every: Steps between evaluations, behind which the best is saved.

        Raises:
            ExecutionError: If a checkpoint would be due between exchanges.
        """
        period = replicas.rests_every
        wanted = [("checkpoint_every", self.every), ("steps", steps)]
        if self.keep_best:
            wanted.append(("evaluate_every", evaluate_every))
        for name, value in wanted:
            if value is not None and value % period and not replicas.rests(value):
                more = value + period - value % period
                raise ExecutionError(
                    f"{name}={value} with checkpoints, but {self._rests(replicas)} "
                    f"every {period} steps alone; use {name}={more} or another "
                    f"multiple of {period}"
                )

    @staticmethod
    def _rests(replicas: Replicas) -> str:
        if isinstance(replicas, DrainedReplicas):
            return "the pipeline is drained, and copies of the weights are equal,"
        return "copies of the weights come together"


class Checkpoints:
    """Saves and restores one run. Every method is collective.

    A context: what is being written in the background ends before the block does.

    Args:
        options: Where and when.
        trainer: Whose state.
        inventory: Of its model, taken while it was whole.
        seed: Of the run.
        timeout_s: How long ranks wait for each other, in seconds.
        force: Load a checkpoint of a model with another fingerprint, if its tensors
            fit.
        data: Source of the batches, whose position is saved; None for none.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        trainer: Trainer,
        inventory: Inventory,
        *,
        seed: int,
        timeout_s: float = 600.0,
        force: bool = False,
        data: DataSource | None = None,
    ) -> None:
        self.options, self._data = options, data
        self._trainer, self._inventory = trainer, inventory
        self._seed, self._force = seed, force
        self._folder = CheckpointFolder(options.folder)
        self._rank = trainer.place.rank
        # Its own: writing in the background must not meet training's collectives.
        timeout = datetime.timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert group is not None
        self._group: dist.ProcessGroup = group
        self._pending: tuple[int, dcp.Pending] | None = None
        #: Step of the last checkpoint that was written, or resumed from.
        self.last: int | None = None
        #: Lowest evaluation loss of a checkpoint of this run.
        self._best = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
            # What ended the run says more than that its last save failed too.
            _LOG.warning("the last checkpoint could not be written", exc_info=True)
        if error is None:
            dist.destroy_process_group(self._group)

    def begin(self) -> int:
        """Make the folder ready and restore the state, if that is asked for.

        Returns:
            Steps done; also the number of the first one to do.

        Raises:
            ExecutionError: If the folder cannot be used, holds another run's
                checkpoints, or not the one asked for, or that one is damaged.
            FingerprintError: If the checkpoint is of another model.
        """
        begin = time.perf_counter()
        chosen = self._on_first_rank(self._choose)
        if chosen is None:
            return 0
        name: str = chosen[0]
        record: CheckpointRecord = chosen[1]
        self._verify(name, record)
        self._restore(name, record)
        if self._data is not None and record.data:
            part = self._trainer.part
            state = read_states(record.data, part.index, part.count)
            self._data.load_state_dict(state)
        best = self._on_first_rank(lambda: self._folder.settle(record.step))
        self._best = math.inf if best is None else best
        self.last = self._trainer.done = record.step
        if self._rank == 0:
            took = time.perf_counter() - begin
            _LOG.info("resumed from %s in %.2f s", self.options.folder / name, took)
        return record.step

    def _on_first_rank(self, work: Callable[[], Any]) -> Any:
        """Call a function on rank 0; its result, or its error, reaches all ranks."""
        said: list[Any] = [None, None]
        if self._rank == 0:
            try:
                said[0] = work()
            except MeshwrightError as error:
                said[1] = error
            except OSError as error:
                said[1] = ExecutionError(
                    f"cannot use {error.filename or self.options.folder}: "
                    f"{error.strerror}; choose another checkpoint_dir"
                )
        dist.broadcast_object_list(said, src=0, group=self._group)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def _choose(self) -> tuple[str, CheckpointRecord] | None:
        name = self._folder.choose(self.options.resume)
        if name is None:
            return None
        record = self._folder.read_record(name)
        optimizer = self._trainer.optimizer_name
        if record.optimizer != optimizer:
            raise ExecutionError(
                f"{self.options.folder / name} holds states of {record.optimizer}, "
                f"the plan trains with {optimizer}; plan with {record.optimizer} or "
                f"begin anew in another checkpoint_dir"
            )
        return name, record

    def _verify(self, name: str, record: CheckpointRecord) -> None:
        """Read every file through, each on one rank.

        Raises:
            ExecutionError: The same on all ranks, if one is missing or not as written.
        """
        size = dist.get_world_size(self._group)
        mine = sorted(record.files)[self._rank :: size]
        folder = self.options.folder / name
        found = (damage(folder / file, record.files[file]) for file in mine)
        problems: list[str | None] = [None] * size
        problem = next(filter(None, found), None)
        dist.all_gather_object(problems, problem, group=self._group)
        worst = next(filter(None, problems), None)
        if worst is not None:
            raise ExecutionError(f"{worst}{self._folder.remedy(name)}")

    def _restore(self, name: str, record: CheckpointRecord) -> None:
        folder, trainer = self.options.folder / name, self._trainer
        saved = dcp.read_saved(folder)
        here = self._inventory.fingerprint
        if record.model_fingerprint != here and not self._force:
            found = difference(self._inventory, saved)
            raise FingerprintError(
                f"{folder} is of another model ({record.model_name}, fingerprint "
                f"{record.model_fingerprint}, here {here}): {found}; choose another "
                f"checkpoint_dir"
            )
        same = record.mesh == trainer.plan.strategy.mesh
        wanted = targets(trainer, self._inventory, saved, same_mesh=same)
        dcp.load(wanted.tensors, folder, self._group)
        wanted.copy()
        trainer.replicas.restored(complete=wanted.complete)
        if same:
            restore_generators(trainer, wanted.tensors)
            restore_codecs(trainer, wanted.tensors)
        else:
            # A stream belongs to a place on a mesh: on another one all begin anew,
            # but not where the run began.
            torch.manual_seed(torch.initial_seed() + _STRIDE * record.step)

    def read_into(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        """Fill a whole model from the checkpoint that the run was resumed from.

        Not collective over the run.

        Args:
            model: With values; parameters and persistent buffers are read.
            group: This process alone, with a CPU backend.
        """
        assert self.last is not None
        folder, inventory = self._folder.of(self.last), self._inventory
        tensors = {
            f"model.{inventory.name(name)}": parameter.detach()
            for name, parameter in model.named_parameters()
        }
        saved = dcp.read_saved(folder)
        for name, buffer in model.named_buffers():
            if name in inventory.buffers and f"model.{name}" in saved:
                tensors[f"model.{name}"] = buffer
        dcp.load(tensors, folder, group)

    def require_states(self) -> None:
        """Refuse, behind a step, an optimizer whose states cannot be saved.

        Raises:
            ExecutionError: If there is such a state on this rank.
        """
        require_states(self._trainer, self._inventory)

    def is_best(self, eval_loss: float | None) -> bool:
        """Return True if a checkpoint of this evaluation loss is the best so far.

        Args:
            eval_loss: The same on all ranks; None for no evaluation.
        """
        return (
            self.options.keep_best
            and eval_loss is not None
            and math.isfinite(eval_loss)
            and eval_loss < self._best
        )

    def save(self, step: int, *, eval_loss: float | None = None) -> Path:
        """Save the state after so many steps.

        Args:
            step: Steps done.
            eval_loss: Of an evaluation after this step; None without one.

        Returns:
            Folder of the checkpoint.

        Raises:
            ExecutionError: If a parameter is no longer finite, copies of it differ, or
                a rank cannot write.
                What was saved before stays as it is.
        """
        self.wait()
        require_sound_weights(self._trainer, step, self.remedy, self._group)
        begin = time.perf_counter()
        options, plan = self.options, self._trainer.plan
        record = CheckpointRecord(
            step=step,
            model_name=plan.model.name,
            model_fingerprint=self._inventory.fingerprint,
            plan_label=plan.strategy.label(),
            mesh=plan.strategy.mesh,
            optimizer=self._trainer.optimizer_name,
            seed=self._seed,
            environment={"torch": str(torch.__version__)},
            data=self._data_states(),
            eval_loss=eval_loss,
        )
        best = self.is_best(eval_loss)
        if best and eval_loss is not None:
            self._best = eval_loss

        def publish(files: Mapping[str, FileRecord]) -> None:
            self._folder.publish(
                record, files, options.keep, best=best, keep_best=options.keep_best
            )
            took = time.perf_counter() - begin
            _LOG.info("saved %s in %.2f s", self._folder.of(step), took)

        with self._discarded_on_failure(step):
            pending = dcp.save(
                collect(self._trainer, self._inventory),
                self._folder.unfinished(step),
                self._group,
                publish,
                background=options.background,
            )
        self._pending = step, pending
        if not options.background:
            self.wait()
        return self._folder.of(step)

    def _data_states(self) -> tuple[dict[str, Any], ...]:
        """Position in the data of each data-parallel coordinate; collective."""
        own = None if self._data is None else write_states(self._data.state_dict())
        everyone: list[tuple[int, Any]] = [(0, None)] * dist.get_world_size(self._group)
        mine = (self._trainer.part.index, own)
        dist.all_gather_object(everyone, mine, group=self._group)
        by_index = dict(reversed(everyone))
        states = [by_index[index] for index in sorted(by_index)]
        if states[0] is None:
            return ()
        alike = all(state == states[0] for state in states)
        return tuple(states[:1] if alike else states)

    def wait(self) -> None:
        """Return when what is being written in the background is written.

        Raises:
            ExecutionError: If a rank could not write.
        """
        if self._pending is not None:
            (step, pending), self._pending = self._pending, None
            with self._discarded_on_failure(step):
                pending.wait()
            self.last = step

    @contextlib.contextmanager
    def _discarded_on_failure(self, step: int) -> Iterator[None]:
        """Delete what was written of a checkpoint if the block fails.

        Where the disk is full it would take the room that others need.
        """
        try:
            yield
        except ExecutionError:
            if self._rank == 0:
                shutil.rmtree(self._folder.unfinished(step), ignore_errors=True)
            raise

    def remedy(self, change: str) -> str:
        """Add to advice what to resume from; collective like :meth:`wait`.

        Args:
            change: What to do first.
        """
        self.wait()
        if self.last is None:
            return f"{change}; no checkpoint had been saved"
        return f"{change}, and resume from {self._folder.of(self.last)}"
