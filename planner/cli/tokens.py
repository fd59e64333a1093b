"""Training data of ``meshwright run --data``: token ids in a .npy file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import ExecutionError
from planner.schema import Workload

__all__ = ["TokenFile", "open_tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A row of token ids, and windows of it as batches.

    Attributes:
        tokens: Not read into memory. Shape [n].
        length: Tokens of a window.
        samples: Windows of a batch.
    """

    tokens: NDArray[Any]
    length: int
    samples: int

    def batches(self, seed: int) -> Callable[[int], NDArray[np.int64]]:
        """From a step's number to its windows, at random places.

        The same seed and step give the same windows. Shape [samples, length].
        """

        def batch(step: int) -> NDArray[np.int64]:
            rng = np.random.default_rng([seed, step])
            starts = rng.integers(0, len(self.tokens) - self.length + 1, self.samples)
            rows = [self.tokens[start : start + self.length] for start in starts]
            return np.stack(rows).astype(np.int64)

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
        whole = np.asarray(rows[chosen]).astype(np.int64)
        return list(whole.reshape(batches, self.samples, self.length))


def open_tokens(path: str, workload: Workload) -> TokenFile:
    """Open and check a token file.

    Args:
        path: One-dimensional integer .npy file; never unpickled.
        workload: Must read ``input_ids`` of some length, and nothing else.
    Raises:
        ExecutionError: If the file is not such a file, is too short, has tokens that
            are not in the vocabulary, or the model reads something else.
    """
    names = [spec.name for spec in workload.inputs]
    if names != ["input_ids"] or len(workload.inputs[0].shape) != 1:
        raise ExecutionError(
            f"--data holds tokens, but the model reads "
            f"{', '.join(names) or 'nothing'}; leave --data out"
        )
    spec = workload.inputs[0]
    tokens = _read(path)
    length = spec.shape[0]
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < length:
        raise ExecutionError(
            f"{path} has shape {tokens.shape} and dtype {tokens.dtype}; it must be one "
            f"row of at least {length} integer tokens"
        )
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or (spec.high is not None and highest >= spec.high):
        wrong = lowest if lowest < 0 else highest
        raise ExecutionError(
            f"{path} has token {wrong}, the vocabulary is 0 to {(spec.high or 0) - 1}; "
            f"use the model's own tokenizer"
        )
    return TokenFile(tokens=tokens, length=length, samples=workload.global_batch)


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
