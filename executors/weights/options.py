"""Weights that a run begins with, and the folder that it leaves them in."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints.snapshot import Inventory
from executors.deferred.model import record
from executors.trainer import Trainer
from executors.weights.files import WeightFiles
from executors.weights.load import load_into, load_whole
from executors.weights.naming import Naming
from executors.weights.save import WeightFolder, save_run
from planner.errors import ExecutionError

__all__ = ["WeightOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOptions:
    """Where a run's weights come from, and where they are saved.

    Attributes:
        model_fn: Builds the whole model.
        files: Weights to begin with; None for random ones.
        allow_missing: Begin at random with parameters that the files lack.
        folder: For the weights at the end; None for none.
    """

    model_fn: Callable[[], nn.Module]
    files: WeightFiles | None
    allow_missing: bool
    folder: WeightFolder | None

    @classmethod
    def of(
        cls,
        model_fn: Callable[[], nn.Module],
        init_from: str | os.PathLike[str] | None,
        allow_missing: bool,
        save_hf: str | os.PathLike[str] | None,
        save_dtype: str | None,
    ) -> WeightOptions:
        """Options of a run.

        Raises:
            ExecutionError: If files cannot be read, the folder exists, or an option
                has no effect.
        """
        if allow_missing and init_from is None:
            raise ExecutionError(
                "allow_missing_weights without init_from; name weights to begin with"
            )
        if save_dtype is not None and save_hf is None:
            raise ExecutionError(
                f"save_dtype={save_dtype} without save_hf; name a folder for weights"
            )
        dtype = getattr(torch, save_dtype, None) if save_dtype else None
        if save_dtype and not isinstance(dtype, torch.dtype):
            raise ExecutionError(
                f"save_dtype={save_dtype} is no dtype; use float32, bfloat16 or float16"
            )
        source = None if init_from is None else Path(init_from).absolute()
        return cls(
            model_fn=model_fn,
            files=None if source is None else WeightFiles(source),
            allow_missing=allow_missing,
            folder=None
            if save_hf is None
            else WeightFolder(
                path=Path(save_hf).absolute(), dtype=dtype, companions=source
            ),
        )

    def _naming(self) -> Naming:
        # Not the model that is trained, whose parts other processes take.
        with torch.random.fork_rng(devices=[]):
            return Naming(record(self.model_fn)[0])

    def load(self, trainer: Trainer, inventory: Inventory) -> None:
        """Begin a run with the files, if there are any; collective.

        Raises:
            ExecutionError: As :func:`executors.weights.load_into` does.
        """
        if self.files is None:
            return
        group = _group()
        load_into(
            trainer,
            inventory,
            self._naming(),
            self.files,
            group,
            allow_missing=self.allow_missing,
        )
        dist.destroy_process_group(group)

    def load_whole(self, model: nn.Module, inventory: Inventory) -> None:
        """Fill a whole model with the files, if there are any."""
        if self.files is not None:
            load_whole(
                model,
                inventory,
                self._naming(),
                self.files,
                allow_missing=self.allow_missing,
            )

    def save(self, trainer: Trainer, inventory: Inventory) -> None:
        """Save a run's weights, if there is a folder for them; collective.

        Raises:
            ExecutionError: As :func:`executors.weights.save_run` does.
        """
        if self.folder is None:
            return
        group = _group()
        save_run(trainer, inventory, self._naming(), self.folder, group)
        dist.destroy_process_group(group)


def _group() -> dist.ProcessGroup:
    """All ranks, with a CPU backend."""
    group: dist.ProcessGroup | None = dist.new_group(
        backend="gloo", timeout=datetime.timedelta(hours=1)
    )
    assert group is not None
    return group
