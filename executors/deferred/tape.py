"""A tape of tensor operations, from which any one tensor is computed alone.

Tensors are known by their place in a storage, so that views need no entry: an
operation reads and writes storages. What one tensor depends on is found by walking
back over the operations that wrote to its storage, and to those that they read.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from planner.errors import ExecutionError

__all__ = ["SMALL_BYTES", "Memory", "Place", "Tape", "draw_seed", "seeded"]


def draw_seed(generator: torch.Generator | None = None) -> int:
    """The next seed for one random operation.

    Drawn from the generator that the operation would have drawn its numbers from, so
    that ``torch.manual_seed`` and generators of a model's own are heeded.

    Args:
        generator: None for torch's.
    """
    drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
    return int(drawn.item())


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's CPU generator for the block; None for a block that draws nothing."""
    if seed is None:
        yield
        return
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of a tensor in a storage.

    Attributes:
        storage: Number of its storage on the tape.
        dtype: Of its elements.
        size: Its shape.
        stride: In elements, by dimension.
        offset: Of its first element, in elements.
        conjugate: Whether what lies there is to be conjugated when it is read.
        negative: Whether it is to be negated.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool
    negative: bool


class Memory:
    """Storages with values, by number.

    Args:
        sizes: Bytes of every storage that there may be.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._storages: dict[int, torch.UntypedStorage] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._storages

    def at(self, place: Place, *, empty: bool = False) -> torch.Tensor:
        """Tensor at a place; zeros, or undefined, if nothing was written there."""
        storage = self._storages.get(place.storage)
        if storage is None:
            size = self._sizes[place.storage]
            make = torch.empty if empty else torch.zeros
            storage = make(size, dtype=torch.uint8).untyped_storage()
            self._storages[place.storage] = storage
        tensor = torch.empty(0, dtype=place.dtype)
        tensor.set_(storage, place.offset, place.size, place.stride)
        if place.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if place.negative else tensor

    def put(self, place: Place, result: torch.Tensor) -> None:
        """Keep the storage that an operation has made."""
        storage = result.untyped_storage()
        plain = result.is_conj() == place.conjugate and (
            result.is_neg() == place.negative
        )
        if (
            plain
            and tuple(result.stride()) == place.stride
            and result.storage_offset() == place.offset
            and storage.nbytes() == self._sizes[place.storage]
        ):
            self._storages[place.storage] = storage
        else:
            # A kernel may lay its result out otherwise than was foretold.
            self.at(place, empty=True).copy_(result)

    def drop(self, number: int) -> None:
        """Free a storage."""
        self._storages.pop(number, None)


_ATEN = torch.ops.aten

#: Tensors below this size are not worth an effort to save their memory.
SMALL_BYTES = 64 * 1024

#: Ops that write all of their first argument and read nothing of it.
_OVERWRITES = frozenset(
    {
        _ATEN.normal_.default,
        _ATEN.uniform_.default,
        _ATEN.bernoulli_.float,
        _ATEN.zero_.default,
        _ATEN.fill_.Scalar,
        _ATEN.fill_.Tensor,
        _ATEN.copy_.default,
    }
)


@dataclass(frozen=True, slots=True)
class _Constant:
    """A tensor with values, as it was when an operation read it."""

    tensor: torch.Tensor
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One operation.

    ``fresh`` are the storages of which it leaves nothing as it was: those that it
    makes, and those that it overwrites.
    """

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[Place | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    fresh: frozenset[int]
    seed: int | None
    default_dtype: torch.dtype


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Tape:
    """Operations on tensors that have shapes but no values, in order."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._weak: list[StorageWeakRef] = []
        self._sizes: list[int] = []
        self._numbers: dict[int, int] = {}
        #: By storage: the entries that write to it, and those that leave nothing.
        self._writers: list[list[int]] = []
        self._fresh: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def adopt(self, tensor: torch.Tensor) -> int:
        """Number of a tensor's storage, which is new if the tape has not seen it.

        A new storage holds zeros, until an operation writes to it.
        """
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._weak)
            # The weak reference also keeps the address from being used again.
            self._weak.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            self._sizes.append(storage.nbytes())
            self._writers.append([])
            self._fresh.append([])
        return number

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Current place of a tensor; None if the tape does not know its storage."""
        if not torch._C._has_storage(tensor):
            return None
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is None:
            return None
        return Place(
            storage=number,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugate=tensor.is_conj(),
            negative=tensor.is_neg(),
        )

    def alive(self) -> dict[int, int]:
        """Storages that a tensor still lies in: bytes by number."""
        return {
            number: self._sizes[number]
            for number, weak in enumerate(self._weak)
            if not weak.expired()  # type: ignore[no-untyped-call]
        }

    def hold(self, value: Any) -> Any:
        """An argument as an entry keeps it: no tensor without values, no generator."""
        if isinstance(value, torch.Generator):
            return None
        if not isinstance(value, torch.Tensor):
            return value
        place = self.place(value)
        if place is not None:
            return place
        if value.numel() * value.element_size() < SMALL_BYTES:
            return _Constant(value.detach().clone(), None)
        # Too large to copy for every operation; whether it has changed is checked.
        return _Constant(value, None if value.is_inference() else value._version)

    def add(
        self,
        call: Callable[..., Any],
        held: tuple[Any, Any],
        results: Sequence[Place | None],
        *,
        written: frozenset[int],
        made: frozenset[int],
        seed: int | None,
    ) -> None:
        """Note one operation.

        Args:
            call: What is called.
            held: Its positional and keyword arguments, each :meth:`hold`.
            results: Where its results lie; None for what is no tensor.
            written: Storages that it writes to in place.
            made: Storages that its results are the first to lie in.
            seed: Of its random numbers, if it draws any.
        """
        places = [leaf for leaf in tree_leaves(held) if isinstance(leaf, Place)]
        fresh = made | self._overwritten(call, places)
        index = len(self._entries)
        self._entries.append(
            _Entry(
                call=call,
                args=held[0],
                kwargs=held[1],
                results=tuple(results),
                reads=frozenset(place.storage for place in places),
                writes=written | made,
                fresh=fresh,
                seed=seed,
                default_dtype=torch.get_default_dtype(),
            )
        )
        for storage in written | made:
            self._writers[storage].append(index)
        for storage in fresh:
            self._fresh[storage].append(index)

    def _overwritten(
        self, call: Callable[..., Any], places: Sequence[Place]
    ) -> frozenset[int]:
        if call not in _OVERWRITES or not places:
            return frozenset()
        target, *sources = places
        whole = target.dtype.itemsize
        for size, stride in zip(
            reversed(target.size), reversed(target.stride), strict=True
        ):
            if size != 1 and stride * target.dtype.itemsize != whole:
                return frozenset()
            whole *= size
        if target.offset or whole != self._sizes[target.storage]:
            return frozenset()
        if any(source.storage == target.storage for source in sources):
            return frozenset()
        return frozenset({target.storage})

    def _needed(self, storage: int) -> list[int]:
        """Entries that a storage's values depend on, in order."""
        chosen: set[int] = set()
        # What was read of a storage before it was overwritten, and after it.
        done: dict[tuple[int, int], int] = {}
        todo = [(storage, len(self._entries))]
        while todo:
            number, end = todo.pop()
            fresh = self._fresh[number]
            last = bisect_left(fresh, end)
            begin = fresh[last - 1] if last else 0
            if done.get((number, begin), -1) >= end:
                continue
            done[number, begin] = end
            writers = self._writers[number]
            for index in writers[
                bisect_left(writers, begin) : bisect_left(writers, end)
            ]:
                if index not in chosen:
                    chosen.add(index)
                    entry = self._entries[index]
                    todo += [(read, index) for read in entry.reads - entry.fresh]
        return sorted(chosen)

    def replay(self, place: Place) -> torch.Tensor:
        """Compute one tensor, on the CPU.

        Memory is that of the tensor, and of what single operations on the way to it
        read and write.

        Args:
            place: Where it lies.

        Returns:
            A tensor of its shape, strides and dtype, that needs no gradient.

        Raises:
            ExecutionError: If a constant that it depends on has changed since.
        """
        needed = self._needed(place.storage)
        last: dict[int, int] = {}
        for index in needed:
            entry = self._entries[index]
            last |= dict.fromkeys(entry.reads | entry.writes, index)
        last[place.storage] = len(self._entries)
        memory = Memory(self._sizes)
        with _disable_current_modes(), torch.no_grad():
            for index in needed:
                self._run(self._entries[index], memory)
                for number in self._entries[index].reads | self._entries[index].writes:
                    if last[number] == index:
                        memory.drop(number)
            return memory.at(place)

    def _run(self, entry: _Entry, memory: Memory) -> None:
        def given(value: Any) -> Any:
            if isinstance(value, Place):
                return memory.at(value, empty=value.storage in entry.fresh)
            if isinstance(value, _Constant):
                return _unchanged(value)
            return value

        args, kwargs = tree_map(given, entry.args), tree_map(given, entry.kwargs)
        with seeded(entry.seed), _default_dtype(entry.default_dtype):
            results, _ = tree_flatten(entry.call(*args, **kwargs))
        for place, result in zip(entry.results, results, strict=True):
            if place is not None and place.storage not in memory:
                memory.put(place, result)


def _unchanged(constant: _Constant) -> torch.Tensor:
    tensor = constant.tensor
    if constant.version is not None and tensor._version != constant.version:
        raise ExecutionError(
            f"a tensor of shape {tuple(tensor.shape)} was changed in place after "
            f"parameters had been made from it; let model_fn copy it first"
        )
    return tensor
