"""Remember the shapes of results, so that a run on fake tensors asks once for each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.private_apis import fake_output, is_plain_fake, storage_key
from planner.capture.stand_ins import Answer, run_or_assume

__all__ = ["ShapeCache"]

_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_UNKNOWN_TAGS = frozenset(
    {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
)


@dataclass(frozen=True, slots=True)
class _Output:
    """One result: the input it is a view of (-1 for none), and its layout."""

    alias: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int


@dataclass(frozen=True, slots=True)
class _Answer:
    outputs: tuple[_Output, ...]
    #: Type that holds the results; None for a single tensor.
    container: type | None


class _NotPlainError(Exception):
    """Raised for an argument that no key can be made of."""


def _describe(value: Any, key: list[Hashable], tensors: list[torch.Tensor]) -> None:
    """Append the parts of a value that decide the shape of the result to ``key``."""
    if isinstance(value, torch.Tensor):
        if not is_plain_fake(value):
            raise _NotPlainError
        tensors.append(value)
        key.append(value.shape)
        key.append(value.stride())
        key.append(value.dtype)
        key.append(value.storage_offset())
    elif isinstance(value, list | tuple):
        key.append(len(value))
        for item in value:
            _describe(item, key, tensors)
    elif isinstance(value, _PLAIN):
        # 1, 1.0 and True are equal and lead to different dtypes.
        key.append((type(value), value))
    else:
        raise _NotPlainError


class ShapeCache:
    """Shapes of results by op and arguments, for all runs of one model.

    Which shapes an op returns depends on the shapes it is given and on its scalars. A
    model of many equal layers asks the same question hundreds of times, and so do its
    runs, so answers are kept, and a fake result is made without asking the fake mode
    again.

    Args:
        mode: The FakeTensorMode that made the tensors.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._answers: dict[Hashable, _Answer | None] = {}
        self._functional: dict[Any, bool] = {}

    def _is_functional(self, func: Any) -> bool:
        """True if an op writes to no input and its shapes depend on no data."""
        known = self._functional.get(func)
        if known is None:
            known = not func._schema.is_mutable and not _UNKNOWN_TAGS.intersection(
                func.tags
            )
            self._functional[func] = known
        return known

    def run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], record: Answer
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the result of an op, remembered if possible, and its arguments.

        Args:
            func: The op overload.
            args: As dispatched.
            kwargs: As dispatched.
            record: Told of each assumption.
        """
        call = self._key(func, args, kwargs)
        if call is not None:
            known = self._result(*call)
            if known is not None:
                return known, args
        out, used = run_or_assume(func, args, kwargs, fake=True, record=record)
        if call is not None and used is args:
            self._remember(*call, out)
        return out, used

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Make a fake tensor that no op has made."""
        return fake_output(self._mode, shape, stride, dtype, alias=None, offset=0)

    def _key(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Hashable, list[torch.Tensor]] | None:
        """Make the key of a call and list its tensors; None if it has no key."""
        if not self._is_functional(func):
            return None
        key: list[Hashable] = [func]
        tensors: list[torch.Tensor] = []
        try:
            _describe(args, key, tensors)
            for name, value in kwargs.items():
                key.append(name)
                _describe(value, key, tensors)
        except _NotPlainError:
            return None
        # Without a tensor, values such as torch.tensor(3) may be asked for later.
        return (tuple(key), tensors) if tensors else None

    def _result(self, key: Hashable, tensors: list[torch.Tensor]) -> Any:
        """Make a fresh result of a call that was answered before; None otherwise."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        made = [
            fake_output(
                self._mode,
                output.shape,
                output.stride,
                output.dtype,
                alias=None if output.alias < 0 else tensors[output.alias],
                offset=output.offset,
            )
            for output in answer.outputs
        ]
        return made[0] if answer.container is None else answer.container(made)

    def _remember(self, key: Hashable, tensors: list[torch.Tensor], out: Any) -> None:
        """Keep the answer to a call, if it is made of plain tensors."""
        if key not in self._answers:
            self._answers[key] = _answer(tensors, out)


def _answer(tensors: list[torch.Tensor], out: Any) -> _Answer | None:
    container = type(out) if isinstance(out, list | tuple) else None
    results = [out] if container is None else list(out)
    if container not in {None, list, tuple}:
        return None
    held = {storage_key(tensor): index for index, tensor in enumerate(tensors)}
    outputs: list[_Output] = []
    fresh: set[int] = set()
    for tensor in results:
        if not isinstance(tensor, torch.Tensor) or not is_plain_fake(tensor):
            return None
        if any(tensor is given for given in tensors):
            return None
        storage = storage_key(tensor)
        alias = held.get(storage, -1)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if alias < 0:
            extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
            extent = extent if tensor.numel() else 0
            size = tensor.untyped_storage().nbytes()
            if storage in fresh or size != extent * tensor.element_size():
                return None
            fresh.add(storage)
        outputs.append(
            _Output(alias, shape, stride, tensor.dtype, int(tensor.storage_offset()))
        )
    return _Answer(tuple(outputs), container)
