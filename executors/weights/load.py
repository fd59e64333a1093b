"""Weight files into the shards of a run, or into a whole model.

A rank reads the parts that it holds. What transformers converts, experts above all, is
read whole, one conversion at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from executors.checkpoints import dcp
from executors.checkpoints.snapshot import Inventory, targets
from executors.trainer import Trainer
from executors.weights.files import WeightFiles
from executors.weights.naming import Naming, Reading
from planner.errors import ExecutionError

__all__ = ["load_into", "load_whole"]

_LOG = logging.getLogger(__name__)

#: Prefix of parameters and buffers in checkpoints.
_MODEL = "model."


def load_into(
    trainer: Trainer,
    inventory: Inventory,
    naming: Naming,
    files: WeightFiles,
    group: dist.ProcessGroup,
    *,
    allow_missing: bool = False,
) -> None:
    """Give a run the weights of files, and begin it anew from them; collective.

    Args:
        trainer: Whose parameters and persistent buffers are filled.
        inventory: Of the whole model.
        naming: Likewise.
        files: Of equal content on every rank.
        group: All ranks, with a CPU backend.
        allow_missing: Leave parameters that the files lack as they are.

    Raises:
        ExecutionError: If the files lack a parameter, or are of another model.
    """
    reading = naming.read(files, inventory.first)
    missing = _missing(reading, naming, inventory, allow_missing)
    buffers = sorted(inventory.buffers - reading.tensors.keys())
    if buffers and trainer.place.process == 0:
        shown = ", ".join(buffers[:5])
        _LOG.warning("%s lacks buffers, left as built: %s", files.path, shown)
    if trainer.place.process == 0:
        _tell(reading, missing)
    saved = {
        f"{_MODEL}{name}": dcp.SavedTensor(shape=read.shape, dtype=read.dtype)
        for name, read in reading.tensors.items()
    }
    left = {f"{_MODEL}{name}" for name in missing}
    known = saved | {
        f"{_MODEL}{name}": dcp.SavedTensor(
            shape=inventory.shapes[name], dtype=torch.float32
        )
        for name in missing
    }
    wanted = targets(trainer, inventory, known, same_mesh=False)
    dcp.load_values(
        {name: t for name, t in wanted.tensors.items() if name not in left},
        saved,
        lambda name, places: reading.part(name.removeprefix(_MODEL), places),
        files.path,
        group,
    )
    wanted.copy()
    trainer.replicas.restored(complete=False)


def load_whole(
    model: nn.Module,
    inventory: Inventory,
    naming: Naming,
    files: WeightFiles,
    *,
    allow_missing: bool = False,
) -> None:
    """Fill a whole model with the weights of files.

    Args:
        model: With values; on any device.
        inventory: Of it.
        naming: As for :func:`load_into`.
        files: The same.
        allow_missing: The same.

    Raises:
        ExecutionError: As :func:`load_into` does.
    """
    reading = naming.read(files, inventory.first)
    _missing(reading, naming, inventory, allow_missing)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in reading.tensors:
                everything = (slice(None),) * tensor.ndim
                tensor.copy_(reading.part(name, everything))


def _missing(
    reading: Reading, naming: Naming, inventory: Inventory, allowed: bool
) -> list[str]:
    """Parameters that the files lack; none of them unless that is allowed.

    Adapters may all be missing: they begin as peft makes them.

    Raises:
        ExecutionError: With their names.
    """
    adapters = naming.adapters.stored if naming.adapters else {}
    names = [name for name in inventory.shapes if name not in adapters]
    missing = [name for name in names if name not in reading.tensors]
    fresh = [name for name in adapters if name not in reading.tensors]
    if missing and (not allowed or len(missing) == len(names)):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        unused = ", ".join(reading.unused[:5]) or "none"
        raise ExecutionError(
            f"{reading.files.path} lacks {len(missing)} of {len(names)} parameters: "
            f"{shown}; tensors that fit nowhere: {unused}; name weights of this model"
            + ("" if allowed else ", or allow missing ones, which begin at random")
        )
    if fresh and len(fresh) < len(adapters) and not allowed:
        raise ExecutionError(
            f"{reading.files.path} lacks {len(fresh)} of {len(adapters)} tensors of "
            f"adapters: {', '.join(fresh[:5])}; name adapters of this model, or allow "
            f"missing ones, which begin anew"
        )
    return [*missing, *(name for name in fresh if name in inventory.shapes)]


def _tell(reading: Reading, missing: Sequence[str]) -> None:
    path = reading.files.path
    _LOG.info("weights from %s: %d tensors", path, len(reading.tensors))
    if missing:
        _LOG.warning("%s lacks %s: begun at random", path, ", ".join(missing))
    if reading.unused:
        shown = ", ".join(reading.unused[:5])
        _LOG.warning(
            "%d tensors of %s are not used: %s", len(reading.unused), path, shown
        )
