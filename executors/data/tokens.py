"""Token ids in a file that is mapped into memory: ``.npy``, or ``.bin`` without a head.

A ``.bin`` file holds unsigned integers one after the other, as nanoGPT and Megatron-LM
write them. Megatron's ``.idx`` beside it says of which dtype they are and how many.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import ExecutionError
from planner.schema import Workload

__all__ = ["TokenFile", "open_tokens"]

#: Tokens that are looked at before training; others are as they are read.
_CHECKED = 2**26
#: Largest vocabulary of two bytes.
_TWO_BYTES = 2**16

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_VERSION = 1
#: Codes of Megatron-LM, megatron/core/datasets/indexed_dataset.py, class DType.
_INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A row of token ids, and windows of it as batches.

    Attributes:
        tokens: Not read into memory. Shape [n].
        length: Tokens of a window.
        samples: Windows of a batch.
        path: Of the file, for messages.
        vocabulary: Ids are below it; None for any.
    """

    tokens: NDArray[Any]
    length: int
    samples: int
    path: str = "the file"
    vocabulary: int | None = None

    def batches(
        self, seed: int, part: slice = slice(None)
    ) -> Callable[[int], NDArray[np.int64]]:
        """From a step's number to its windows, at random places.

        The same seed and step give the same windows, however many ranks there are.
        Shape [samples, length].

        Args:
            seed: Of the places.
            part: Windows of every batch that are read; all by default.
        """

        def batch(step: int) -> NDArray[np.int64]:
            rng = np.random.default_rng([seed, step])
            starts = rng.integers(0, len(self.tokens) - self.length + 1, self.samples)
            rows = [self.tokens[at : at + self.length] for at in starts[part]]
            return self._checked(np.stack(rows))

        return batch

    def windows(self, most: int) -> list[NDArray[np.int64]]:
        """Windows one behind the other from the first token on, as batches.

        A file of fewer windows than a batch has them repeated. Shape [samples, length]
        each.

        Args:
            most: How many batches at most.
        """
        count = len(self.tokens) // self.length
        rows = self.tokens[: count * self.length].reshape(count, self.length)
        batches = min(most, max(1, count // self.samples))
        chosen = np.arange(batches * self.samples) % count
        whole = self._checked(np.asarray(rows[chosen]))
        return list(whole.reshape(batches, self.samples, self.length))

    def _checked(self, rows: NDArray[Any]) -> NDArray[np.int64]:
        """Rows as int64.

        Raises:
            ExecutionError: If one has a token outside of the vocabulary.
        """
        lowest, highest = int(rows.min()), int(rows.max())
        if lowest < 0 or (self.vocabulary is not None and highest >= self.vocabulary):
            wrong = lowest if lowest < 0 else highest
            raise ExecutionError(
                f"{self.path} has token {wrong}, the vocabulary is 0 to "
                f"{(self.vocabulary or 0) - 1}; use the model's own tokenizer"
            )
        return rows.astype(np.int64)


def open_tokens(path: str, workload: Workload) -> TokenFile:
    """Open and check a token file.

    Args:
        path: One-dimensional integer .npy file, never unpickled; or .bin of unsigned
            integers, of two bytes if the vocabulary has at most 65,536 ids, else of
            four, unless an .idx of Megatron-LM beside it says otherwise.
        workload: Must read ``input_ids`` of some length, and nothing else.

    Raises:
        ExecutionError: If the file is not such a file, is cut off, is too short, has
            tokens that are not in the vocabulary, or the model reads something else.
    """
    names = [spec.name for spec in workload.inputs]
    # A model planned for packed documents reads their positions too.
    if names[:1] != ["input_ids"] or set(names[1:]) - {"position_ids"}:
        raise ExecutionError(
            f"--data holds tokens, but the model reads "
            f"{', '.join(names) or 'nothing'}; leave --data out"
        )
    spec = workload.inputs[0]
    if len(spec.shape) != 1:
        raise ExecutionError(
            f"--data holds tokens, but the model's input_ids have shape "
            f"{list(spec.shape)} a sample; leave --data out"
        )
    tokens = _read_binary(path, spec.high) if path.endswith(".bin") else _read(path)
    length = spec.shape[0]
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < length:
        raise ExecutionError(
            f"{path} has shape {tokens.shape} and dtype {tokens.dtype}; it must be one "
            f"row of at least {length} integer tokens"
        )
    file = TokenFile(
        tokens=tokens,
        length=length,
        samples=workload.global_batch,
        path=path,
        vocabulary=spec.high,
    )
    file._checked(tokens[:_CHECKED])
    return file


def _read(path: str) -> NDArray[Any]:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        reason = error.strerror or "it is cut off"
        raise ExecutionError(f"cannot read tokens from {path}: {reason}") from error
    except (ValueError, EOFError) as error:
        raise ExecutionError(
            f"cannot read tokens from {path}: it is not a whole .npy file of numbers "
            f"({error}); write one with numpy.save"
        ) from error
    if not isinstance(tokens, np.ndarray):
        tokens.close()
        raise ExecutionError(
            f"cannot read tokens from {path}: it is a .npz of several arrays; save the "
            f"tokens alone with numpy.save"
        )
    return tokens


def _read_binary(path: str, vocabulary: int | None) -> NDArray[Any]:
    """Map a .bin file into memory.

    Raises:
        ExecutionError: If it cannot be read, is empty, or is cut off.
    """
    try:
        size = Path(path).stat().st_size
        dtype, expected = _binary_dtype(path, size, vocabulary)
        if size != expected or not size:
            raise ExecutionError(
                f"cannot read tokens from {path}: it has {size} bytes, and whole "
                f"tokens of {dtype} would have {expected or 'more'}; it is cut off or "
                f"of another dtype: write it again"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        reason = error.strerror or "it is cut off"
        raise ExecutionError(f"cannot read tokens from {path}: {reason}") from error


def _binary_dtype(
    path: str, size: int, vocabulary: int | None
) -> tuple[np.dtype[Any], int]:
    """Dtype of a .bin file, and how many bytes it ought to have."""
    index = Path(path).with_suffix(".idx")
    if index.exists():
        return _read_index(index)
    small = vocabulary is not None and vocabulary <= _TWO_BYTES
    dtype = np.dtype("<u2" if small else "<u4")
    if small and size and not size % 4:
        # Ids below 65,536 in four bytes each have zeros in every other two.
        words = np.fromfile(path, dtype="<u2", count=_TWO_BYTES)
        if words.any() and not words[1::2].any():
            dtype = np.dtype("<u4")
    return dtype, size - size % dtype.itemsize


def _read_index(path: Path) -> tuple[np.dtype[Any], int]:
    """Dtype and bytes of the file that an .idx of Megatron-LM describes.

    Raises:
        ExecutionError: If it is no such index, or is cut off.
    """
    with path.open("rb") as file:
        head = file.read(len(_INDEX_MAGIC) + 25)
        try:
            magic, (version, code, count, _) = (
                head[: len(_INDEX_MAGIC)],
                struct.unpack("<QBQQ", head[len(_INDEX_MAGIC) :]),
            )
        except struct.error:
            magic, version, code, count = b"", 0, 0, 0
        lengths = np.fromfile(file, dtype="<i4", count=count)
    known = magic == _INDEX_MAGIC and version == _INDEX_VERSION
    if not known or code not in _INDEX_DTYPES or len(lengths) != count:
        raise ExecutionError(
            f"cannot read {path}: it is not a whole index of Megatron-LM of integer "
            f"tokens; write both files again with its preprocess_data.py, or take the "
            f".idx away if it is something else"
        )
    dtype = np.dtype(_INDEX_DTYPES[code])
    return dtype, int(lengths.sum(dtype=np.int64)) * dtype.itemsize
