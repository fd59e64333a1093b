"""Sources of training data, each of which gives a rank its part of a step's batch.

==================  =============================  ===============================
source              what a rank reads              what a checkpoint keeps
==================  =============================  ===============================
token file          its windows                    seed, number of tokens
dataset with a      its samples, in an order of    seed, samples seen, number of
length              the seed                       samples
DataLoader          its samples of each batch of   batches drawn; the loader's own
                    the loader's sampler           state where it has one
stream of samples   all, and keeps its own         samples seen; the stream's own
                                                   state where it has one
global batches      all, and keeps its own         nothing: the step's number
==================  =============================  ===============================

No order depends on the number of ranks: a run that goes on with more or fewer replicas
gets the very next samples.
"""

from __future__ import annotations

import itertools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset

from executors.data.batches import Batch, Data, global_batches
from executors.data.data_source import DataSource
from executors.data.loaders import LoaderSource
from executors.data.parts import BatchPart, Part
from executors.data.prefetch import Prefetched
from executors.data.samples import (
    Collate,
    Samples,
    as_tensors,
    collate,
    is_hugging_face,
    require_batch,
    require_kind,
    require_rows,
    require_same,
    resumes_exactly,
    saved_dataset,
)
from executors.data.tokens import TokenFile, open_tokens
from executors.data.volumes import Volumes
from planner.errors import ExecutionError
from planner.schema import Workload

__all__ = [
    "TrainingData",
    "evaluation_batches",
    "open_source",
    "require_data",
]

#: Steps of a run of unknown length: global batches are made as they are asked for.
_ENDLESS = sys.maxsize


#: What a run can be given: a token file's name, samples, a loader, global batches.
TrainingData = (
    str
    | os.PathLike[str]
    | Samples
    | Dataset[Any]
    | DataLoader[Any]
    | DataSource
    | Data
)


def open_source(
    data: TrainingData | None,
    workload: Workload,
    part: Part,
    *,
    seed: int = 0,
    pin_memory: bool = False,
) -> DataSource:
    """Adapt training data to a source of this rank's part of every batch.

    Args:
        data: Name of a token file, or of a folder that ``datasets`` saved; samples; a
            dataset or loader; global batches; None for synthetic ones.
        workload: Says what a batch is.
        part: Samples of a global batch that this rank reads.
        seed: Of synthetic batches, and of orders.
        pin_memory: Put batches into memory that a GPU copies from at once.

    Raises:
        ExecutionError: If the data does not fit the plan, or its library is missing.
    """
    if isinstance(data, str | os.PathLike):
        path = os.fspath(data)
        if not Path(path).is_dir():
            tokens = _TokenSource(open_tokens(path, workload), part, seed)
            return Prefetched(tokens, pin_memory=pin_memory)
        data = Samples(dataset=saved_dataset(path))
    if isinstance(data, DataLoader):
        if isinstance(data.dataset, IterableDataset) or data.batch_sampler is None:
            return _GlobalBatches(data, workload, seed)
        return LoaderSource(data, part, pin_memory=pin_memory)
    if isinstance(data, Dataset) or is_hugging_face(data):
        data = Samples(dataset=data)
    if isinstance(data, Samples):
        return _of_samples(data, part, seed, pin_memory)
    if isinstance(data, DataSource):
        return data
    return _GlobalBatches(data, workload, seed)


def _of_samples(
    samples: Samples, part: Part, seed: int, pin_memory: bool
) -> DataSource:
    if samples.workers < 0:
        raise ExecutionError(
            f"workers={samples.workers}; give a number of processes, 0 for none"
        )
    dataset = as_tensors(samples.dataset)
    if isinstance(dataset, Volumes) and part.regions:
        dataset = dataset.of_region(part.regions)
    if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return _IndexedSource(dataset, samples, part, seed, pin_memory)
    if not hasattr(dataset, "__iter__"):
        raise ExecutionError(
            f"{type(dataset).__name__} has neither a length nor __iter__; give a "
            f"dataset with __len__ and __getitem__, or an IterableDataset"
        )
    if samples.workers:
        raise ExecutionError(
            f"workers={samples.workers} with a stream, which each would read whole; "
            f"use workers=0, a thread reads ahead"
        )
    stream = _StreamSource(dataset, samples.collate_fn or collate, part)
    # A stream may draw from torch's generator, which dropout draws from, too.
    return (
        Prefetched(stream, pin_memory=pin_memory)
        if is_hugging_face(dataset)
        else stream
    )


def evaluation_batches(
    data: TrainingData, workload: Workload, part: Part, *, most: int = 50
) -> Sequence[Batch | BatchPart]:
    """Batches of which a mean loss is computed, the same each time.

    A file or dataset is read from its beginning, in its own order.

    Args:
        data: As for :func:`open_source`; global batches are taken whole.
        workload: Says what a batch is.
        part: Samples of a global batch that this rank reads.
        most: How many batches of a file or dataset at most.

    Raises:
        ExecutionError: If there is none, or as :func:`open_source` says.
    """
    batches: Sequence[Batch | BatchPart]
    if isinstance(data, str | os.PathLike) and not Path(data).is_dir():
        windows = open_tokens(os.fspath(data), workload).windows(most)
        batches = [
            BatchPart(values={"input_ids": torch.from_numpy(rows[part.samples].copy())})
            for rows in windows
        ]
    elif isinstance(data, str | os.PathLike):
        rows = Samples(dataset=saved_dataset(os.fspath(data)))
        return evaluation_batches(rows, workload, part, most=most)
    elif isinstance(data, Samples | Dataset) or is_hugging_face(data):
        given = data if isinstance(data, Samples) else Samples(dataset=data)
        plain = replace(given, shuffle=False, workers=0)
        source = _of_samples(plain, part, 0, False)
        if isinstance(source, _IndexedSource):
            most = min(most, source.size // part.whole)
        batches = [source.batch(step) for step in range(most)]
        source.close()
    elif isinstance(data, Iterable):
        batches = list(data)
    else:
        raise ExecutionError(
            f"eval_data is a {type(data).__name__}, of which there is no end; give a "
            f"token file, a dataset, or a list of global batches"
        )
    if not batches:
        raise ExecutionError("eval_data holds no batch; give at least one, or None")
    return batches


def require_data(path: str, workload: Workload) -> None:
    """Refuse a file or folder that cannot be trained on, before a process is started.

    Raises:
        ExecutionError: As :func:`open_source` does.
    """
    whole = workload.global_batch
    open_source(path, workload, Part(start=0, stop=whole, whole=whole)).close()


# -- Batches that are whole on every rank ----------------------------------------


class _GlobalBatches(DataSource):
    """Global batches, of which the trainer cuts out this rank's part."""

    def __init__(self, data: Any, workload: Workload, seed: int) -> None:
        self._data, self._workload, self._seed = data, workload, seed
        self._next = -1
        self._batches: Iterator[Batch] = iter(())

    def batch(self, step: int) -> Batch:
        """The global batch of a step; one that is not next is found from the start."""
        if step != self._next:
            self._batches = global_batches(
                self._workload, self._data, _ENDLESS, seed=self._seed, first=step
            )
        self._next = step + 1
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The kind alone: the step's number says where global batches go on."""
        return {"kind": "global_batches"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at any step, with the same kind of data.

        Raises:
            ExecutionError: If the checkpoint is of another kind of data.
        """
        require_kind(state, "global_batches")

    def close(self) -> None:
        """Forget the iterator of what is left."""
        self._batches = iter(())


# -- Token files -----------------------------------------------------------------


class _TokenSource(DataSource):
    """Windows of a token file, at places drawn by seed and step."""

    def __init__(self, file: TokenFile, part: Part, seed: int) -> None:
        self._file, self._part, self._seed = file, part, seed
        self._rows = file.batches(seed, part.samples)

    def batch(self, step: int) -> BatchPart:
        """This rank's windows of a step, token ids of shape [samples, length]."""
        seen = f"{len(self._file.tokens)} {self._seed} {step}"
        return BatchPart(
            values={"input_ids": torch.from_numpy(self._rows(step))},
            shared=zlib.crc32(seen.encode()),
        )

    def state_dict(self) -> dict[str, Any]:
        """Seed of the places, and number of tokens in the file."""
        return {
            "kind": "tokens",
            "seed": self._seed,
            "tokens": len(self._file.tokens),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw places by the seed of a checkpoint.

        Raises:
            ExecutionError: If it is of another kind of data, or of a file with another
                number of tokens.
        """
        require_kind(state, "tokens")
        have = len(self._file.tokens)
        require_same(self._file.path, "tokens", have, state["tokens"])
        self._seed = state["seed"]
        self._rows = self._file.batches(self._seed, self._part.samples)

    def close(self) -> None:
        """Keep the file as it is: it is mapped into memory, and nothing reads ahead."""


# -- Datasets with a length ------------------------------------------------------


class _IndexedSource(DataSource):
    """Samples of a dataset with a length, in an order of the seed.

    Sample number k of the run is sample k mod n of pass k // n through the dataset.
    """

    def __init__(
        self, dataset: Any, samples: Samples, part: Part, seed: int, pin_memory: bool
    ) -> None:
        self._dataset, self._options, self._part = dataset, samples, part
        self._seed, self._pin = seed, pin_memory
        self.size = len(dataset)
        if self.size < part.whole:
            raise ExecutionError(
                f"the dataset has {self.size} samples, fewer than the plan's "
                f"global_batch={part.whole}; add samples, or plan with a global batch "
                f"of at most {self.size}"
            )
        #: Samples seen before step 0: not 0 if the run began with another batch.
        self._offset = 0
        self._next = 0
        self._batches: Iterator[Any] | None = None
        self._order: tuple[int, NDArray[np.int64]] | None = None

    def _pass(self, number: int) -> NDArray[np.int64]:
        """Order of one pass through the dataset."""
        if self._order is None or self._order[0] != number:
            order = np.arange(self.size)
            if self._options.shuffle:
                np.random.default_rng([self._seed, number]).shuffle(order)
            self._order = number, order
        return self._order[1]

    def _numbers(self, step: int) -> NDArray[np.int64]:
        """Numbers of the samples of a global batch."""
        first = self._offset + step * self._part.whole
        number, at = divmod(first, self.size)
        found = self._pass(number)[at : at + self._part.whole]
        missing = self._part.whole - len(found)
        if missing:
            found = np.concatenate([found, self._pass(number + 1)[:missing]])
        return found

    def _own_numbers(self, step: int) -> Iterator[list[int]]:
        for each in itertools.count(step):
            yield self._numbers(each)[self._part.samples].tolist()

    def batch(self, step: int) -> BatchPart:
        """This rank's samples of a step, collated.

        Args:
            step: From 0; another one than the next begins anew there.

        Raises:
            ExecutionError: If what is collated is no batch of this rank's samples.
        """
        if self._batches is None or step != self._next:
            self._batches = iter(
                DataLoader(
                    self._dataset,
                    batch_sampler=_Iterated(self._own_numbers(step)),
                    collate_fn=self._options.collate_fn or collate,
                    num_workers=self._options.workers,
                    pin_memory=self._pin,
                    # Workers draw other numbers on every rank, dropout its own.
                    generator=torch.Generator().manual_seed(
                        (self._seed * 1009 + self._part.index) * 1_000_003 + step
                    ),
                )
            )
        values = require_batch(next(self._batches), step)
        self._next = step + 1
        numbers = self._numbers(step)
        shared = zlib.crc32(numbers.tobytes(), self.size & 0xFFFFFFFF)
        part = BatchPart(values=values, shared=shared)
        return require_rows(part, self._part)

    def state_dict(self) -> dict[str, Any]:
        """Seed, samples seen, and facts that the dataset must share to go on."""
        return {
            "kind": "samples",
            "seed": self._seed,
            "seen": self._offset + self._next * self._part.whole,
            "samples": self.size,
            "shuffle": self._options.shuffle,
            "step": self._next,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the samples seen, whatever the global batch was.

        Raises:
            ExecutionError: If the checkpoint is of another kind of data, of a dataset
                with another number of samples, or of another order.
        """
        require_kind(state, "samples")
        require_same("the dataset", "samples", self.size, state["samples"])
        shuffle = self._options.shuffle
        require_same("the dataset", "as shuffle", shuffle, state["shuffle"])
        self._seed, self._next = state["seed"], state["step"]
        self._offset = state["seen"] - self._next * self._part.whole
        self._order = self._batches = None

    def close(self) -> None:
        """End the workers of the loader, with its iterator."""
        self._batches = None


class _Iterated:
    """Lists of numbers of samples as DataLoader takes them."""

    def __init__(self, numbers: Iterator[list[int]]) -> None:
        self._numbers = numbers

    def __iter__(self) -> Iterator[list[int]]:
        return self._numbers


# -- Streams ---------------------------------------------------------------------


class _StreamSource(DataSource):
    """Samples one after the other, of which this rank keeps its own.

    Every rank reads the whole stream: where it is cut would depend on their number.
    """

    def __init__(self, stream: Any, collate_fn: Collate, part: Part) -> None:
        self._stream, self._collate, self._part = stream, collate_fn, part
        self._samples: Iterator[Any] | None = None
        #: Passes through the stream that ended, and samples of this one.
        self._epoch = self._at = 0
        self._next = 0

    def _take(self, count: int) -> Iterator[Any]:
        """Samples that follow; the stream is begun anew where it ends."""
        empty = 0
        while count:
            if self._samples is None:
                if hasattr(self._stream, "set_epoch"):
                    self._stream.set_epoch(self._epoch)
                self._samples = iter(self._stream)
            for sample in self._samples:
                self._at += 1
                count -= 1
                empty = 0
                yield sample
                if not count:
                    return
            self._samples = None
            empty += 1
            if empty > 1:
                raise ExecutionError(
                    "the stream gave no sample; give an IterableDataset that can be "
                    "iterated more than once"
                )
            self._epoch, self._at = self._epoch + 1, 0

    def batch(self, step: int) -> BatchPart:
        """This rank's samples of a step, collated; the others are read and left.

        Args:
            step: From 0; before or behind the next one the stream is read from its
                beginning.

        Raises:
            ExecutionError: If the stream has fewer samples than a global batch, or
                what is collated is no batch of this rank's samples.
        """
        part = self._part
        if step != self._next:
            self._epoch = self._at = 0
            self._samples = None
            for _ in self._take(step * part.whole):
                pass
        own: list[Any] = []
        shared, began = 0, self._epoch
        for number, sample in enumerate(self._take(part.whole)):
            if not number:
                shared = _sample_checksum(sample)
            if part.start <= number < part.stop:
                own.append(sample)
        if self._epoch > began + 1:
            raise ExecutionError(
                f"the stream ended twice within a batch: it has fewer samples than "
                f"the plan's global_batch={part.whole}; add samples, or plan with a "
                f"smaller global batch"
            )
        self._next = step + 1
        values = require_batch(self._collate(own), step)
        return require_rows(BatchPart(values=values, shared=shared), part)

    def state_dict(self) -> dict[str, Any]:
        """Passes that ended, samples of this one, the stream's own state if it has."""
        state: dict[str, Any] = {
            "kind": "stream",
            "epoch": self._epoch,
            "at": self._at,
            "step": self._next,
        }
        if resumes_exactly(self._stream):
            state["stream"] = self._stream.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the samples seen; they are read again where the stream cannot
        say where it was.

        Raises:
            ExecutionError: If the checkpoint is of another kind of data.
        """
        require_kind(state, "stream")
        self._epoch, self._next, self._samples = state["epoch"], state["step"], None
        if "stream" in state and resumes_exactly(self._stream):
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(self._epoch)
            self._stream.load_state_dict(state["stream"])
            self._at = state["at"]
            return
        self._at = 0
        for _ in self._take(state["at"]):
            pass

    def close(self) -> None:
        """Forget the iterator of what is left."""
        self._samples = None


def _sample_checksum(sample: Any) -> int:
    """Checksum of a sample's values."""
    items = sample.items() if isinstance(sample, Mapping) else [("", sample)]
    total = 0
    for name, value in items:
        data = value.tolist() if isinstance(value, torch.Tensor) else value
        total = zlib.crc32(f"{name} {data!r}".encode(), total)
    return total
