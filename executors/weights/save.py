"""A run, or a checkpoint, into a folder that transformers loads.

Tensors are put together one after the other, on the process that writes. The folder is
written beside its place and renamed when it is whole.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

from executors.checkpoints import dcp
from executors.checkpoints.snapshot import Inventory, collect
from executors.trainer import Trainer
from executors.weights.adapters import ADAPTER_WEIGHTS, AdapterNames
from executors.weights.files import INDEX, WEIGHTS
from executors.weights.naming import Naming
from planner.errors import ExecutionError

__all__ = ["WeightFolder", "save_checkpoint", "save_run"]

_LOG = logging.getLogger(__name__)

_MODEL = "model."
#: Largest file, as transformers has it.
_FILE_BYTES = 5 * 10**9
#: Files of a tokenizer or a processor, which go with the weights.
_COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "spiece.model", "*.tiktoken", "*.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "preprocessor_config.json"),
    *("processor_config.json", "generation_config.json"),
)


@dataclass(kw_only=True)
class WeightFolder:
    """A folder to write, on the process that writes.

    Attributes:
        path: Must not exist yet.
        dtype: Of floating-point tensors; None for that of the parameters.
        companions: Folder whose tokenizer is copied; None for none.
        file_bytes: Largest file.

    Raises:
        ExecutionError: If the folder exists, or its parent cannot be written to.
    """

    path: Path
    dtype: torch.dtype | None = None
    companions: Path | None = None
    file_bytes: int = _FILE_BYTES
    _files: list[tuple[Path, list[str]]] = field(default_factory=list)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)
    _bytes: int = 0
    _total: int = 0

    def __post_init__(self) -> None:
        if self.path.exists():
            raise ExecutionError(f"{self.path} exists; name a new folder for weights")

    @property
    def _unfinished(self) -> Path:
        return self.path.with_name(f"{self.path.name}.tmp")

    def prepare(self) -> None:
        """Make the folder that is written to.

        Raises:
            ExecutionError: If that is not possible.
        """
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
        except OSError as error:
            raise ExecutionError(
                f"cannot write {self._unfinished}: {error.strerror}; name another "
                f"folder for weights"
            ) from error

    def discard(self) -> None:
        """Delete what has been written."""
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def add(self, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors, or keep them until a file is full."""
        for name, tensor in tensors.items():
            value = tensor.detach().cpu()
            if self.dtype is not None and value.is_floating_point():
                value = value.to(self.dtype)
            if self._held and self._bytes + value.nbytes > self.file_bytes:
                self._write()
            # A view would keep, and write, what it is a view of.
            self._held[name] = value.clone() if value is tensor else value.contiguous()
            self._bytes += value.nbytes
            self._total += value.nbytes

    def _write(self) -> None:
        path = self._unfinished / f"part-{len(self._files)}.safetensors"
        # transformers reads files that say who they are for.
        save_file(self._held, path, metadata={"format": "pt"})
        self._files.append((path, list(self._held)))
        self._held, self._bytes = {}, 0

    def finish(self, naming: Naming, dtype: torch.dtype) -> None:
        """Write what is left, the index and the configuration; name the folder.

        Args:
            naming: Of the model.
            dtype: Of its parameters.
        """
        self._write()
        if naming.adapters is not None:
            self._finish_adapters(naming.adapters)
            return
        count = len(self._files)
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
            name = WEIGHTS if count == 1 else name
            path.rename(self._unfinished / name)
            places |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": places}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._unfinished / INDEX).write_text(text, encoding="utf-8")
        if hasattr(naming.config, "save_pretrained"):
            _save_config(naming.config, self._unfinished, self.dtype or dtype)
        self._finish(len(places))

    def _finish_adapters(self, adapters: AdapterNames) -> None:
        (path, names), *others = self._files
        if others:
            raise ExecutionError(
                f"adapters are over {self.file_bytes:,} bytes, and peft reads one "
                f"file; use adapters of a lower rank or of fewer layers"
            )
        path.rename(self._unfinished / ADAPTER_WEIGHTS)
        adapters.save_config(self._unfinished)
        self._finish(len(names))

    def _finish(self, count: int) -> None:
        self._copy_companions()
        self._unfinished.rename(self.path)
        _LOG.info("saved %d tensors in %s", count, self.path)

    def _copy_companions(self) -> None:
        folder = self.companions
        if folder is None or not folder.is_dir():
            return
        for pattern in _COMPANIONS:
            for file in sorted(folder.glob(pattern)):
                if file.is_file():
                    shutil.copyfile(file, self._unfinished / file.name)


def _save_config(config: Any, folder: Path, dtype: torch.dtype) -> None:
    said = config.dtype
    try:
        config.dtype = dtype
        config.save_pretrained(folder)
    finally:
        config.dtype = said


def save_run(
    trainer: Trainer,
    inventory: Inventory,
    naming: Naming,
    folder: WeightFolder,
    group: dist.ProcessGroup,
) -> None:
    """Write the weights of a run; collective.

    Args:
        trainer: Whose; copies of the weights must be at rest.
        inventory: Of the whole model.
        naming: Likewise.
        folder: Where to; process 0 writes.
        group: All ranks, with a CPU backend.

    Raises:
        ExecutionError: On every rank, if process 0 cannot write.
    """
    every = {
        name.removeprefix(_MODEL): tensor
        for name, tensor in collect(trainer, inventory).items()
        if name.startswith(_MODEL)
    }
    held: list[list[str]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(held, list(every), group=group)
    order = [*inventory.shapes, *sorted(inventory.buffers)]
    holders: dict[str, int] = {}
    for rank, names in enumerate(held):
        for name in names:
            holders.setdefault(name, rank)
    writes = dist.get_rank(group) == 0
    dtype = getattr(torch, trainer.plan.strategy.precision.parameter)

    def whole() -> Iterator[dict[str, torch.Tensor]]:
        for together in naming.together([name for name in order if name in holders]):
            made = {
                name: _at_first(every.get(name), holders[name], group)
                for name in together
            }
            yield {name: value for name, value in made.items() if value is not None}

    _write_all(whole(), naming, folder if writes else None, dtype, group)


def _at_first(
    tensor: torch.Tensor | None,
    holder: int,
    group: dist.ProcessGroup,
) -> torch.Tensor | None:
    """Put a tensor together on the first rank; collective over those that hold it."""
    rank = dist.get_rank(group)
    if tensor is not None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        value = whole.detach().cpu()
    if holder == 0:
        return value if rank == 0 else None
    if rank == holder:
        dist.send_object_list([(value.shape, value.dtype)], group=group, group_dst=0)
        dist.send(value.contiguous(), group=group, group_dst=0)
    if rank != 0:
        return None
    said: list[Any] = [None]
    dist.recv_object_list(said, group=group, group_src=holder)
    received = torch.empty(said[0][0], dtype=said[0][1])
    dist.recv(received, group=group, group_src=holder)
    return received


def _write_all(
    tensors: Iterator[dict[str, torch.Tensor]],
    naming: Naming,
    folder: WeightFolder | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
) -> None:
    """Write groups of tensors as they come; where there is no folder, let them pass.

    An error of the one that writes is raised when all have passed, on every rank.
    """
    problem: str | None = None

    def attempt(work: Callable[[], None]) -> None:
        nonlocal problem
        try:
            if problem is None:
                work()
        except ExecutionError as error:
            problem = str(error)
        except Exception as error:  # the other ranks wait for word of this one
            problem = (
                f"cannot write weights to {'' if folder is None else folder.path}: "
                f"{error}; make room or name another folder"
            )

    if folder is not None:
        attempt(folder.prepare)
    for together in tensors:
        if folder is not None:
            attempt(partial(_add, folder, naming, together))
    if folder is not None:
        attempt(partial(folder.finish, naming, dtype))
        if problem is not None:
            folder.discard()
    said: list[Any] = [problem]
    if group is not None:
        dist.broadcast_object_list(said, group=group, group_src=0)
    if said[0] is not None:
        raise ExecutionError(said[0])


def _add(
    folder: WeightFolder, naming: Naming, tensors: dict[str, torch.Tensor]
) -> None:
    folder.add(naming.stored(tensors))


def save_checkpoint(checkpoint: Path, model: nn.Module, folder: WeightFolder) -> None:
    """Write the weights of a checkpoint, in one process.

    Args:
        checkpoint: Folder of one, ``.../step-000100``.
        model: That it is of, with or without values.
        folder: Where to.

    Raises:
        ExecutionError: If the checkpoint is of another model, or cannot be read, or
            the folder cannot be written.
    """
    inventory, naming = Inventory.of(model), Naming(model)
    saved = dcp.read_saved(checkpoint)
    _require_same(checkpoint, inventory, saved)
    every = (*inventory.shapes, *sorted(inventory.buffers))
    order = [name for name in every if f"{_MODEL}{name}" in saved]

    def whole() -> Iterator[dict[str, torch.Tensor]]:
        for names in naming.together(order):
            made = {
                f"{_MODEL}{name}": torch.empty(
                    saved[f"{_MODEL}{name}"].shape, dtype=saved[f"{_MODEL}{name}"].dtype
                )
                for name in names
            }
            dcp.load(made, checkpoint, None)
            yield {name.removeprefix(_MODEL): value for name, value in made.items()}

    kinds = {saved[f"{_MODEL}{name}"].dtype for name in inventory.shapes}
    _write_all(whole(), naming, folder, max(kinds, key=lambda d: d.itemsize), None)


def _require_same(
    checkpoint: Path, inventory: Inventory, saved: dict[str, dcp.SavedTensor]
) -> None:
    def problems() -> Iterator[str]:
        for name, shape in inventory.shapes.items():
            there = saved.get(f"{_MODEL}{name}")
            if there is None:
                yield f"it lacks {name}"
            elif there.shape != shape:
                yield f"{name} is {list(there.shape)} there and {list(shape)} here"

    said: Sequence[str] = list(problems())
    if said:
        more = f" (and {len(said) - 2} more)" if len(said) > 2 else ""
        raise ExecutionError(
            f"{checkpoint} is of another model: {'; '.join(said[:2])}{more}; name its "
            f"own by --model"
        )
