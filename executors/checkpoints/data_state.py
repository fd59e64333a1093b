"""Positions in training data as JSON values of a checkpoint's record.

Loaders of torchdata keep states of generators, which are tensors, and tuples. Nothing
is pickled: a checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from planner.errors import ExecutionError

__all__ = ["read_states", "write_states"]

_TAG = "__kind__"


def write_states(state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a position as JSON values.

    Raises:
        ExecutionError: If it holds something else than numbers, text, bytes, arrays,
            tensors, and lists, tuples and mappings of them.
    """
    written = _write(dict(state))
    assert isinstance(written, dict)
    return written


def _write(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "value": _write(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {_TAG: "array", "value": _text(file.getvalue())}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": _text(value)}
    if isinstance(value, tuple):
        return {_TAG: "tuple", "value": [_write(one) for one in value]}
    if isinstance(value, list):
        return [_write(one) for one in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: _write(one) for key, one in value.items()}
        pairs = [[_write(key), _write(one)] for key, one in value.items()]
        return {_TAG: "mapping", "value": pairs}
    raise ExecutionError(
        f"the data's state_dict holds a {type(value).__name__}; a checkpoint keeps "
        f"numbers, text, bytes, tensors, and lists and mappings of them: change the "
        f"state_dict of the dataset"
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _read(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_read(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: _read(one) for key, one in value.items()}
    held = value["value"]
    if kind == "tensor":
        return torch.from_numpy(_read(held))
    if kind == "array":
        file = io.BytesIO(base64.b64decode(held))
        return np.load(file, allow_pickle=False)
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tuple":
        return tuple(_read(one) for one in held)
    if kind == "mapping":
        return {_read(key): _read(one) for key, one in held}
    raise ExecutionError(
        f"the checkpoint's data state has an entry of kind {kind!r}, which this "
        f"version does not know; use the version that wrote it"
    )


def read_states(
    states: Sequence[Mapping[str, Any]], index: int, count: int
) -> dict[str, Any]:
    """Read the position of one data-parallel coordinate.

    Args:
        states: Of each coordinate, or one for all.
        index: Of the coordinate.
        count: How many there are now.

    Raises:
        ExecutionError: If coordinates had positions of their own, and there are more or
            fewer now.
    """
    if len(states) not in (1, count):
        raise ExecutionError(
            f"the checkpoint has positions of {len(states)} replicas in their own "
            f"data, this plan has {count}; plan with {len(states)}, or give data "
            f"whose state is equal on all of them"
        )
    found: dict[str, Any] = _read(states[index if len(states) > 1 else 0])
    return found
