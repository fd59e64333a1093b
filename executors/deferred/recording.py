"""Recording: operations on tensors go on a tape instead of being done.

Under dispatch modes tensors claim to be on the CPU, have shapes and no memory. Where
values are asked for, they are computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from executors.deferred.non_dispatched_ops import non_dispatched_ops
from executors.deferred.tape import SMALL_BYTES, Tape, draw_seed, seeded
from planner.errors import ExecutionError

__all__ = ["Recording"]

_ATEN = torch.ops.aten

#: Ops that make memory and leave it as it is.
_EMPTY = frozenset(
    {
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    }
)

#: Ops on tensors that have their values already.
_LIFTS = frozenset({_ATEN.lift_fresh.default, _ATEN.lift.default})

#: What a fake tensor raises where a value, or a kernel's own word, is needed.
_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)


class Recording:
    """Record of the operations on a model's tensors that have no values yet.

    Args:
        small_bytes: Tensors below this size are computed at once: masks, norms.

    Attributes:
        fake: The mode that its tensors belong to.
    """

    def __init__(self, small_bytes: int = SMALL_BYTES) -> None:
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._small_bytes = small_bytes
        self._tape = Tape()

    @property
    def operations(self) -> int:
        """Number of operations on the tape."""
        return len(self._tape)

    def defers(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor without values that the tape knows."""
        return (
            isinstance(tensor, FakeTensor)
            and tensor.fake_mode is self.fake
            and self._tape.place(tensor) is not None
        )

    def replay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values that a deferred tensor has now.

        Args:
            tensor: See :meth:`defers`.

        Returns:
            A plain tensor on the CPU, of equal shape, strides and dtype, that needs no
            gradient; new at every call.

        Raises:
            ExecutionError: If the tape does not know it, or what it was made from has
                changed.
        """
        place = self._tape.place(tensor)
        if place is None:
            raise _unknown(tensor)
        return self._tape.replay(place)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record what is done to tensors in the block, and make new ones deferred."""
        with non_dispatched_ops(self.replay, self.whole), _Operations(self):
            yield

    def hidden(self, known: Iterable[torch.Tensor]) -> int:
        """Bytes of deferred tensors that still exist beside those that are known."""
        places = [self._tape.place(tensor) for tensor in known]
        found = {place.storage for place in places if place is not None}
        if self._tape.alive().keys() <= found:
            return 0
        # What is left over may hang in cycles.
        gc.collect()
        return sum(n for s, n in self._tape.alive().items() if s not in found)

    def perform(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do one operation of torch, or defer it."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        deferred = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if _elsewhere(func, tensors, leaves):
            return self._compute(func, args, kwargs, draws=False)
        if not deferred and self._has_values(func, tensors):
            return self._compute(func, args, kwargs)
        written = _written(func, args, kwargs)
        if any(not isinstance(tensor, FakeTensor) for tensor in written):
            return self._compute(func, args, kwargs)
        held = self._hold(args), self._hold(kwargs)
        in_place = bool(written) and len(written) == len(func._schema.returns)
        try:
            with self.fake:
                result = func(*tree_map(_faked, args), **tree_map(_faked, kwargs))
        except _NEEDS_VALUES:
            if not in_place:
                return self._compute(func, args, kwargs)
            result = written[0] if len(written) == 1 else tuple(written)
        results = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
        if not deferred and sum(_size(r) for r in results) < self._small_bytes:
            return self._compute(func, args, kwargs)
        self._note(func, held, (args, kwargs), written, result)
        return result

    def whole(self, call: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
        """Defer a function that fills one tensor, as one operation with one seed."""
        generator = next((a for a in args if isinstance(a, torch.Generator)), None)
        with _disable_current_modes():
            seed = draw_seed(generator)
        args = tuple(None if isinstance(a, torch.Generator) else a for a in args)
        if not self.defers(tensor):
            with _disable_current_modes(), seeded(seed):
                return call(tensor, *args)
        place = self._tape.hold(tensor)
        self._tape.add(
            call,
            ((place, *args), {}),
            (None,),
            written=frozenset({place.storage}),
            made=frozenset(),
            seed=seed,
        )
        return tensor

    def _hold(self, tree: Any) -> Any:
        return tree_map(self._hold_one, tree)

    def _hold_one(self, value: Any) -> Any:
        if isinstance(value, FakeTensor) and not self.defers(value):
            raise _unknown(value)
        return self._tape.hold(value)

    def _has_values(self, func: Any, tensors: list[torch.Tensor]) -> bool:
        """Return True if an operation on tensors with values is done at once."""
        large = any(
            tensor.device.type == "cpu" and _size(tensor) >= max(self._small_bytes, 1)
            for tensor in tensors
        )
        views = func in _LIFTS or (func.is_view and bool(tensors))
        return large or views or bool(func._schema.is_mutable)

    def _compute(self, func: Any, args: Any, kwargs: Any, *, draws: bool = True) -> Any:
        """Do an operation on values, replaying what it reads of deferred tensors."""

        def valued(leaf: Any) -> Any:
            if not isinstance(leaf, FakeTensor):
                return leaf
            return self.replay(leaf)

        with _disable_current_modes():
            seed = self._seed(func, (args, kwargs)) if draws else None
            if seed is not None:
                args, kwargs = _without_generator(args), _without_generator(kwargs)
            args, kwargs = tree_map(valued, args), tree_map(valued, kwargs)
            with seeded(seed):
                result = func(*args, **kwargs)
            # Memory that nobody writes to has the same values on every rank.
            return result.zero_() if draws and func in _EMPTY else result

    @staticmethod
    def _seed(func: Any, given: Any) -> int | None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        leaves = tree_leaves(given)
        return draw_seed(
            next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        )

    def _note(
        self,
        func: Any,
        held: tuple[Any, Any],
        given: Any,
        written: list[torch.Tensor],
        result: Any,
    ) -> None:
        """Put an operation on the tape, if it makes memory or writes to any."""
        tape, leaves = self._tape, tree_leaves(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        made = {tape.adopt(t) for t in tensors if tape.place(t) is None}
        if torch.Tag.inplace_view in func.tags:
            if func._schema.name.startswith("aten::resize") or made:
                raise ExecutionError(
                    f"{func} changes the memory of a tensor, which cannot be deferred"
                )
            return
        numbers = {place.storage for t in written if (place := tape.place(t))}
        if func in _EMPTY or not (made or numbers):
            return
        with _disable_current_modes():
            seed = self._seed(func, given)
        places = [
            tape.place(leaf) if isinstance(leaf, torch.Tensor) else None
            for leaf in leaves
        ]
        tape.add(
            func,
            held,
            places,
            written=frozenset(numbers - made),
            made=frozenset(made),
            seed=seed,
        )


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operation of torch to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "prim":
            # Asked from where nothing may be raised, and about no values.
            return func(*args, **(kwargs or {}))
        if any(kind not in _PLAIN for kind in types):
            # A DTensor: it does the operation on what it holds.
            return NotImplemented
        return self._recording.perform(func, args, kwargs or {})


_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor})


def _size(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; a sparse one counts as if it were dense."""
    return tensor.numel() * tensor.element_size()


def _unknown(tensor: torch.Tensor) -> ExecutionError:
    return ExecutionError(
        f"a tensor of shape {tuple(tensor.shape)} has no known values: it was made "
        f"outside of the recording; make it in model_fn"
    )


def _elsewhere(func: Any, tensors: list[torch.Tensor], leaves: list[Any]) -> bool:
    """Return True for an operation about another device than the CPU."""
    asked = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
    real = {t.device.type for t in tensors if not isinstance(t, FakeTensor)}
    if func in _EMPTY and asked == {"cpu"} and real == {"meta"}:
        # Module.to_empty, of a model that was built on the meta device.
        return False
    return bool((asked | real) - {"cpu"})


def _faked(value: Any) -> Any:
    """A tensor like one with values, in the fake mode that is on.

    Torch's own conversion looks at all that a tensor descends from, too.
    """
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return value


def _without_generator(tree: Any) -> Any:
    return tree_map(lambda v: None if isinstance(v, torch.Generator) else v, tree)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that an operation changes in place, by its schema."""
    found: list[torch.Tensor] = []
    if not func._schema.is_mutable:
        return found
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if leaf is not None]
    return found
