"""Samples of a dataset: opened, made into tensors and batches, and checked.

Datasets of the library ``datasets`` are told by their class: it is imported by whoever
made one, and by :func:`saved_dataset` alone else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from executors.data.batches import Batch, require_size
from executors.data.parts import BatchPart, Part
from planner.errors import ExecutionError

__all__ = [
    "Collate",
    "Samples",
    "as_tensors",
    "collate",
    "is_hugging_face",
    "require_batch",
    "require_kind",
    "require_rows",
    "require_same",
    "resumes_exactly",
    "saved_dataset",
]

#: From samples to a batch, as DataLoader's ``collate_fn``.
Collate = Callable[[list[Any]], Any]

#: Files of which a folder that ``datasets`` saved, one split or all, has one.
_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """A dataset of samples, and how to make batches of it.

    Attributes:
        dataset: Mappings from keyword of forward to tensor or list, without a batch
            dimension: a :class:`torch.utils.data.Dataset` with a length, an
            :class:`~torch.utils.data.IterableDataset`, or one of ``datasets``.
        collate_fn: From a list of samples to a batch; None to stack them.
        shuffle: Draw a dataset with a length in a new order each time through, by the
            seed of the run. Streams keep their order.
        workers: Processes that read ahead; 0 to read in the training process.
    """

    dataset: Any
    collate_fn: Collate | None = None
    shuffle: bool = True
    workers: int = 0


def is_hugging_face(data: object) -> bool:
    """Return True for a dataset of the library ``datasets``, with a length or not."""
    library = sys.modules.get("datasets")
    if library is None:
        return False
    return isinstance(data, library.Dataset | library.IterableDataset)


def as_tensors(dataset: Any) -> Any:
    """A dataset that gives tensors where it can.

    Raises:
        ExecutionError: If it has columns that no tensor holds.
    """
    if not is_hugging_face(dataset):
        return dataset
    features = dataset.features or {}
    text = [n for n, f in features.items() if getattr(f, "dtype", "") == "string"]
    if text:
        raise ExecutionError(
            f"the dataset has text in {', '.join(map(repr, text))}, which forward does "
            f"not take; tokenize it (dataset.map(..., remove_columns={text}))"
        )
    formatted = getattr(dataset, "format", None)
    if hasattr(dataset, "__len__") and (formatted or {}).get("type") is None:
        return dataset.with_format("torch")
    return dataset


def saved_dataset(path: str) -> Any:
    """Open a folder that ``Dataset.save_to_disk`` wrote.

    Raises:
        ExecutionError: If it cannot be opened, or the library is missing.
    """
    if not any((Path(path) / name).exists() for name in _SAVED):
        raise ExecutionError(
            f"cannot read tokens from {path}: Is a directory, and none that "
            f"Dataset.save_to_disk of datasets wrote; name a token file, or save the "
            f"dataset again"
        )
    try:
        import datasets
    except ImportError as error:
        raise ExecutionError(
            f"{path} is a folder, which the library datasets reads, and it is not "
            f"installed; pip install datasets, or give a token file"
        ) from error
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise ExecutionError(
            f"cannot read {path}: {error}; give a folder that Dataset.save_to_disk "
            f"wrote, or a token file"
        ) from error
    if isinstance(found, dict):
        raise ExecutionError(
            f"{path} holds the splits {', '.join(found)}; name the folder of one: "
            f"{path}/{next(iter(found), 'train')}"
        )
    return found


def resumes_exactly(stream: Any) -> bool:
    """Return True if a stream's own state leads to the very next sample.

    A stream of ``datasets`` that shuffles in a buffer fills it anew: what was in it is
    lost. Seen in datasets 5.2, whose chain of iterables is private.
    """
    if not hasattr(stream, "state_dict") or not hasattr(stream, "load_state_dict"):
        return False
    link = getattr(stream, "_ex_iterable", None)
    while link is not None:
        if "Shuffled" in type(link).__name__ and hasattr(link, "buffer_size"):
            return False
        link = getattr(link, "ex_iterable", None)
    return True


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Stack samples into a batch.

    Args:
        samples: Mappings from keyword to tensor, array, number or list of numbers.

    Raises:
        ExecutionError: If they are none, have other keys, or shapes that differ.
    """
    first = samples[0]
    if not isinstance(first, Mapping):
        raise ExecutionError(
            f"the dataset gives {type(first).__name__}, not a mapping from keyword of "
            f"forward to tensor; change it, or give collate_fn"
        )
    other = next((one for one in samples if one.keys() != first.keys()), None)
    if other is not None:
        raise ExecutionError(
            f"samples have {', '.join(first)} and {', '.join(other)}; give every "
            f"sample the same keys, or give collate_fn"
        )
    batch = {}
    for name in first:
        try:
            values = [torch.as_tensor(one[name]) for one in samples]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ExecutionError(
                f"{name!r} of a sample is {type(first[name]).__name__}, of which there "
                f"is no tensor ({error}); leave it out, or give collate_fn"
            ) from error
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1:
            few, many = sorted(shapes)[0], sorted(shapes)[-1]
            raise ExecutionError(
                f"{name!r} has samples of shapes {few} to {many}, which do not make "
                f"one tensor; pad or cut them, or give a collate_fn that does"
            )
        batch[name] = torch.stack(values)
    return batch


def require_batch(values: Any, step: int) -> Batch:
    """Return a batch.

    Raises:
        ExecutionError: If it is no mapping to tensors.
    """
    if isinstance(values, Mapping):
        values = dict(values)
        wrong = next(
            (n for n, v in values.items() if not isinstance(v, torch.Tensor)), None
        )
        if wrong is None and values:
            batch: Batch = values
            return batch
        found = f"{type(values[wrong]).__name__} as {wrong!r}" if values else "nothing"
    else:
        found = type(values).__name__
    raise ExecutionError(
        f"the batch of step {step} has {found}; data must give a mapping from keyword "
        f"of forward to tensor: change the dataset, or its collate_fn"
    )


def require_rows(batch: BatchPart, part: Part) -> BatchPart:
    """Return a part of a batch; refuse one of another size than the rank's share.

    Raises:
        ExecutionError: As :func:`require_size` does.
    """
    require_size(batch.values, part.stop - part.start, part.inputs)
    return batch


def require_kind(state: Mapping[str, Any], kind: str) -> None:
    """Refuse a position in a source of another kind.

    Raises:
        ExecutionError: If it is one.
    """
    found = state.get("kind")
    if found != kind:
        raise ExecutionError(
            f"the checkpoint has a position in data of kind {found!r}, this run is "
            f"given {kind!r}; give the data that the run began with, or begin anew "
            f"from its weights (save_hf, init_from)"
        )


def require_same(where: str, what: str, have: object, saved: object) -> None:
    """Refuse data that has changed since a checkpoint.

    Raises:
        ExecutionError: If it has.
    """
    if have != saved:
        raise ExecutionError(
            f"{where} has {have} {what}, at the checkpoint it had {saved}: its order "
            f"is another; give the data that the run began with, or begin anew from "
            f"its weights (save_hf, init_from)"
        )
