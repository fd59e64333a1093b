"""Adapter to ``torch.distributed.checkpoint``, its public and its private parts.

Private, by name, when a metadata file is read: ``filesystem._StorageInfo``,
``metadata._MEM_FORMAT_ENCODING``, ``torch.serialization._get_layout``. Seen to work on
torch 2.13.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import EnumType
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader, WriteResult
from torch.futures import Future as TorchFuture

from executors.checkpoints.eight_bit import decoded, is_eight_bit, plain
from executors.checkpoints.folder import inspect_file
from executors.exception_chain import chain, explain
from planner.errors import ExecutionError
from planner.schema.checkpoint import FileRecord

__all__ = ["Pending", "SavedTensor", "load", "load_values", "read_saved", "save"]

_METADATA = ".metadata"

#: Told of the files of a checkpoint when all ranks have written theirs.
Publish = Callable[[Mapping[str, FileRecord]], None]

#: What a metadata file is made of. Unpickling anything else could run code.
_KNOWN = {
    ("builtins", "dict"),
    ("builtins", "list"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Attributes:
        shape: Of the whole tensor.
        dtype: That it was saved in.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Inspected(WriteResult):
    """A written item, and size and checksum of its file."""

    record: FileRecord


class _Writer(FileSystemWriter):
    """Writes to a folder; publishes it once the last rank has written its part."""

    def __init__(self, folder: Path, publish: Publish) -> None:
        super().__init__(folder)
        self._publish = publish

    def write_data(self, plan: Any, planner: Any) -> TorchFuture[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).wait()
        except RuntimeError as error:
            # A full disk is met twice: torch closes its archive and finds it too short.
            # Of what is raised here others hear the last error alone.
            found = (one for one in chain(error) if isinstance(one, OSError))
            raise next(found, error) from None
        names = {result.storage_data.relative_path for result in written}
        records = {name: inspect_file(Path(self.path) / name) for name in names}
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(
            [
                _Inspected(
                    result.index,
                    result.size_in_bytes,
                    result.storage_data,
                    records[result.storage_data.relative_path],
                )
                for result in written
            ]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Finish the checkpoint; called on the coordinator, after all have written."""
        super().finish(metadata, results)
        records = {
            result.storage_data.relative_path: cast(_Inspected, result).record
            for rank in results
            for result in rank
        }
        records[_METADATA] = inspect_file(Path(self.path) / _METADATA)
        self._publish(records)


class _SavePlanner(DefaultSavePlanner):
    """Gives the writer numbers in place of states of 8 bits, one tensor at a time."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
        found = super().transform_object(write_item, object)
        return decoded(found) if is_eight_bit(found) else found


def _member(kind: object, name: object) -> Any:
    """A member of an enumeration, and no other attribute of anything.

    Python 3.11.0 to 3.11.3 write members as ``getattr(class, name)``, others as
    ``class(value)``. Source: enum.Enum.__reduce_ex__ of these releases.
    """
    if isinstance(kind, EnumType) and isinstance(name, str):
        members: Mapping[str, Any] = kind.__members__
        if name in members:
            return members[name]
    raise pickle.UnpicklingError(
        f"it wants the attribute {name!r} of {kind!r}, which no metadata has"
    )


class _Unpickler(pickle.Unpickler):
    """Reads what a metadata file is made of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if dtype or (module, name) in _KNOWN:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no metadata has")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / _METADATA).open("rb") as stream:
            return _unpickle(stream)


def _unpickle(stream: IO[bytes]) -> Metadata:
    metadata: Metadata = _Unpickler(stream).load()
    return metadata


def read_saved(folder: Path) -> dict[str, SavedTensor]:
    """Read shapes and dtypes of the tensors of a checkpoint, by name.

    Raises:
        ExecutionError: If its metadata cannot be read.
    """
    path = folder / _METADATA
    try:
        with path.open("rb") as stream:
            metadata = _unpickle(stream)
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise ExecutionError(
            f"cannot read {path}: {error}; resume from another checkpoint"
        ) from error
    return {
        name: SavedTensor(shape=tuple(saved.size), dtype=saved.properties.dtype)
        for name, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }


class Pending:
    """A save under way, or done.

    Args:
        what: For messages: the folder.
        future: Of torch; None if the save has ended.
    """

    def __init__(self, what: Path, future: Future[Any] | None = None) -> None:
        self._what, self._future = what, future

    def wait(self) -> None:
        """Return when every rank has written.

        Raises:
            ExecutionError: If one of them could not.
        """
        if self._future is None:
            return
        future, self._future = self._future, None
        try:
            future.result()
        except CheckpointException as error:
            raise _failure("write", self._what, error) from error


def save(
    tensors: Mapping[str, torch.Tensor],
    folder: Path,
    group: dist.ProcessGroup,
    publish: Publish,
    *,
    background: bool = False,
) -> Pending:
    """Write tensors, each shard once; collective.

    Args:
        tensors: This rank's, plain or DTensor. What several ranks give under one name
            and place is taken to be equal, and written once.
        folder: Is made.
        group: All ranks, with a CPU backend; used by nothing else in the background.
        publish: Called on rank 0 when all is written.
        background: Copy the tensors to the CPU and write from a thread.
    Returns:
        What to wait for.
    Raises:
        ExecutionError: If a rank could not write; in the background, see
            :meth:`Pending.wait`.
    """
    arguments: dict[str, Any] = {
        "storage_writer": _Writer(folder, publish),
        # Names are FQNs: flat already.
        "planner": _SavePlanner(flatten_state_dict=False),
        "process_group": group,
    }
    if background:
        # torch copies storages, of which a state of 8 bits has several.
        copied = {name: plain(one) for name, one in tensors.items()}
        future = state_dict_saver.async_save(copied, **arguments)
        return Pending(folder, cast(Future[Any], future))
    try:
        state_dict_saver.save(dict(tensors), **arguments)
    except CheckpointException as error:
        raise _failure("write", folder, error) from error
    return Pending(folder)


def load(
    tensors: Mapping[str, torch.Tensor], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Fill tensors in place from a checkpoint of any sharding; collective.

    Args:
        tensors: This rank's, plain or DTensor.
        folder: Of the checkpoint.
        group: All ranks, with a CPU backend; None for this process alone.

    Raises:
        ExecutionError: If a rank could not.
    """
    _load(tensors, _Reader(folder), folder, group)


def load_values(
    tensors: Mapping[str, torch.Tensor],
    saved: Mapping[str, SavedTensor],
    part: Callable[[str, tuple[slice, ...]], torch.Tensor],
    source: Path,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill tensors in place from whole ones, of which each rank reads its parts.

    Collective; see :func:`load` for the tensors, the group and errors.

    Args:
        tensors: To be filled.
        saved: Shape and dtype of the whole ones, by name.
        part: Returns a part of one: its name, one slice a dimension.
        source: For messages.
        group: All ranks.
    """
    _load(tensors, _Values(saved, part), source, group, "name other weights")


class _Values(StorageReader):
    """Whole tensors that a function reads parts of."""

    def __init__(
        self,
        saved: Mapping[str, SavedTensor],
        part: Callable[[str, tuple[slice, ...]], torch.Tensor],
    ) -> None:
        self._saved, self._part = saved, part

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Shapes, each of one piece."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=one.dtype),
                    size=torch.Size(one.shape),
                    chunks=[
                        ChunkStorageMetadata(
                            offsets=torch.Size([0] * len(one.shape)),
                            sizes=torch.Size(one.shape),
                        )
                    ],
                )
                for name, one in self._saved.items()
            }
        )

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read what torch plans, in the order of names."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Read what torch plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> TorchFuture[None]:
        """Copy each part, its dtype converted."""
        for item in plan.items:
            places = tuple(
                slice(first, first + length)
                for first, length in zip(
                    item.storage_offsets, item.lengths, strict=True
                )
            )
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._part(item.storage_index.fqn, places))
            planner.commit_tensor(item, target)
        done: TorchFuture[None] = TorchFuture()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, _: Any) -> bool:
        """No storage is chosen by its name."""
        return False


def _load(
    tensors: Mapping[str, torch.Tensor],
    reader: StorageReader,
    source: Path,
    group: dist.ProcessGroup | None,
    remedy: str = "resume from another checkpoint",
) -> None:
    try:
        with warnings.catch_warnings():
            # Of one process torch says that it takes it for one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                dict(tensors),
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        raise _failure("read", source, error, remedy) from error


def _failure(
    verb: str, folder: Path, error: CheckpointException, remedy: str = ""
) -> ExecutionError:
    """Error of one line from torch's page of them: the first rank's reason."""
    rank, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
    said = f"{type(reason).__name__}: {explain(reason)}"
    remedy = remedy or (
        "make room or choose another checkpoint_dir"
        if verb == "write"
        else "resume from another checkpoint"
    )
    return ExecutionError(f"rank {rank} cannot {verb} {folder}: {said}; {remedy}")
