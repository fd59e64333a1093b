"""Private APIs of torch and transformers that capture needs, all in this one file.

Seen to work on torch 2.11 to 2.13. Each is looked up with a guard, so that a torch
that lacks one ends in a :class:`~planner.errors.CaptureError` that names it.

Seen to work on transformers 5.23. A release without one of its names is read all the
same: then a mask is made where a real run needs none, and keys and values are repeated.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from typing import Any, Self, cast
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.checkpointing import checkpoints_in_place
from planner.errors import CaptureError

__all__ = [
    "DispatchMode",
    "as_parameter",
    "backward_sequence",
    "fake_mode",
    "fake_output",
    "fake_tensor",
    "flop_formulas",
    "fused_dropout",
    "has_fakes",
    "in_backward",
    "is_plain_fake",
    "is_view",
    "known_tensor",
    "known_value",
    "last_sequence",
    "modes_off",
    "named_attributes",
    "names_of_modules",
    "patched_function",
    "pin_storage",
    "quiet_forward",
    "storage_key",
    "tensor_constructors",
    "tree_flatten",
    "tree_unflatten",
]

_SEEN = "2.11 to 2.13"


def _private(owner: Any, *names: str) -> Any:
    """Return the first of ``names`` that ``owner`` has."""
    for name in names:
        found = getattr(owner, name, None)
        if found is not None:
            return found
    raise CaptureError(
        f"torch {torch.__version__} has no {' or '.join(names)}, which reading a model "
        f"needs; install a torch that Meshwright was tested with ({_SEEN})"
    )


#: Op that reaches a dispatch mode but does no work.
_DEVICE: Any = torch.ops.prim.device.default


class DispatchMode(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler dynamo does not wrap.

    The wrapper guards against compiling the handler, which never happens here, and
    costs a tenth of a trace.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @abstractmethod
    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an op, and return its result."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:
            # Two thirds of all dispatches ask for the device of a fake tensor, which it
            # knows. They come from a noexcept function: raising there ends the process.
            known = getattr(args[0], "fake_device", None)
            return func(*args) if known is None else known
        return self.perform(func, args, kwargs or {})

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_sequence_nr: Callable[[], int] = _private(torch.autograd, "_get_sequence_nr")
_graph_task_id: Callable[[], int] = _private(torch._C, "_current_graph_task_id")
_autograd_node: Callable[[], Any] = _private(torch._C, "_current_autograd_node")


def last_sequence() -> int:
    """Sequence number of the autograd node made last in this thread."""
    return _sequence_nr() - 1


def in_backward() -> bool:
    """True while the autograd engine is running."""
    return _graph_task_id() != -1


def backward_sequence() -> int:
    """Sequence number of the node whose backward runs now; -1 outside any node."""
    node = _autograd_node()
    return -1 if node is None else cast("int", node._sequence_nr())


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the storage; tensors that share memory share it.

    Sparse and opaque tensors have no storage and stand for themselves.
    """
    try:
        return cast("int", tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return -id(tensor)


def pin_storage(tensor: torch.Tensor) -> object:
    """Return an object that, while held, keeps the key of a storage from reuse.

    A weak reference: it pins the address, not the memory.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    try:
        weak: Any = StorageWeakRef
        return cast("object", weak(tensor.untyped_storage()))
    except (RuntimeError, NotImplementedError):
        return tensor


def is_view(func: Any) -> bool:
    """True if an op only makes a view of its input, by its schema."""
    return bool(getattr(func, "is_view", False))


_COUNTING = frozenset(
    {torch.ops.aten.arange, torch.ops.aten.zeros, torch.ops.aten.ones}
    | {torch.ops.aten.full, torch.ops.aten.scalar_tensor}
)
#: Largest tensor of integers or booleans whose values a fake mode computes.
_MOST_KNOWN = 1 << 18


def fake_mode(*, valued: bool = False) -> Any:
    """Make a FakeTensorMode: shapes are computed, memory is not allocated.

    Args:
        valued: Compute integers and booleans that follow from known ones alone, too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Valued(FakeTensorMode):  # type: ignore[no-untyped-call]
        """Fake mode in which integers stay known, beyond single ones."""

        def may_turn_const(self, t: torch.Tensor) -> bool:
            if t.is_floating_point() or t.is_complex() or t.numel() > _MOST_KNOWN:
                return super().may_turn_const(t)
            return t.device.type != "meta" and not self.is_our_fake(t)

        def dispatch(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            packet = getattr(func, "overloadpacket", None)
            if packet in _COUNTING and not self.in_kernel_invocation:
                with modes_off():
                    made = func(*args, **{**(kwargs or {}), "device": "cpu"})
                if not made.is_floating_point() and made.numel() <= _MOST_KNOWN:
                    return known_tensor(self, lambda: made)
            return super().dispatch(func, types, args, kwargs)

    _private(FakeTensorMode, "may_turn_const")
    return (Valued if valued else FakeTensorMode)(allow_non_fake_inputs=True)


def known_tensor(mode: Any, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Make a fake tensor whose values a mode made with ``valued`` knows.

    Args:
        mode: Of the fake tensor.
        make: Makes the values, on the CPU.
    """
    with modes_off():
        converter: Any = mode.fake_tensor_converter
        known = converter.from_real_tensor(mode, make(), make_constant=True)
    return cast("torch.Tensor", known)


def known_value(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a fake tensor as far as its mode knows them."""
    found: torch.Tensor | None = getattr(tensor, "constant", None)
    return found


def tensor_constructors() -> Collection[Any]:
    """Functions that make a tensor on the device that a context names."""
    from torch.utils import _device

    found: Collection[Any] = _private(_device, "_device_constructors")()
    return found


def has_fakes() -> bool:
    """Return False where torch was built without what fake tensors import."""
    try:
        fake_mode()
    except (ImportError, AttributeError):
        return False
    return True


def fake_tensor(
    mode: Any, tensor: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Make a fake tensor of the same shape and strides that claims to be on the CPU.

    Never a fake ``cuda`` tensor: autograd of a torch built without CUDA ends the
    process when it meets one.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    like = torch.empty_strided(
        tuple(tensor.shape),
        tensor.stride(),
        dtype=dtype or tensor.dtype,
        device="meta",
    )
    return cast("torch.Tensor", FakeTensor(mode, like, torch.device("cpu")))


def modes_off() -> contextlib.AbstractContextManager[Any]:
    """While open, no dispatch mode sees what is done, fake tensors included."""
    from torch.utils import _python_dispatch

    off: Callable[[], Any] = _private(_python_dispatch, "_disable_current_modes")
    return cast("contextlib.AbstractContextManager[Any]", off())


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """True if a tensor is fake, strided and holds no constant."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor and tensor.constant is None


def fake_output(
    mode: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    *,
    alias: torch.Tensor | None,
    offset: int,
) -> torch.Tensor:
    """Make a fake CPU tensor, or one that views the storage of ``alias``.

    To be called inside a dispatch handler; the fake mode itself is bypassed.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    guard: Any = _private(torch._C, "_DisableTorchDispatch")
    with guard():
        like = torch.empty_strided(
            (0,) if alias is not None else shape,
            (1,) if alias is not None else stride,
            dtype=dtype,
            device="meta",
        )
        if alias is not None:
            source: Any = alias.untyped_storage()
            like.set_(source, offset, shape, stride)
        return cast("torch.Tensor", FakeTensor(mode, like, _CPU))


_CPU = torch.device("cpu")


def as_parameter(tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    """Mark a tensor as an ``nn.Parameter``, without its constructor's detach.

    ``isinstance(tensor, torch.nn.Parameter)`` holds for tensor subclasses marked so.
    """
    marked: Any = tensor.requires_grad_(requires_grad)
    marked._is_param = True
    return cast("torch.Tensor", marked)


def flop_formulas() -> dict[Any, Callable[..., int]]:
    """Formulas that torch's own FlopCounterMode uses, by op packet."""
    from torch.utils.flop_counter import flop_registry

    return dict(flop_registry)


@contextlib.contextmanager
def patched_function(replacement: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Put ``replacement`` in the place of scaled dot product attention.

    Both names under which torch reaches it are replaced, and put back afterwards.
    """
    functional: Any = torch.nn.functional
    bound: Any = _private(torch._C, "_nn")
    name = "scaled_dot_product_attention"
    before = (getattr(functional, name), getattr(bound, name))
    setattr(functional, name, replacement)
    setattr(bound, name, replacement)
    try:
        yield
    finally:
        setattr(functional, name, before[0])
        setattr(bound, name, before[1])


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor * torch.zeros_like(tensor)
    return torch.native_dropout(tensor, p, train)[0]


@contextlib.contextmanager
def fused_dropout() -> Iterator[None]:
    """While open, dropout is the op that it is on GPUs, which keeps a byte an element.

    On CPUs it is a product with random numbers in the dtype of its input. The
    dispatcher is told, so that attention that is not fused drops its scores so, too.
    """
    scoped: Any = _private(torch.library, "_scoped_library")
    with scoped("aten", "IMPL") as library:
        library.impl("dropout", _dropout, "AutogradCPU")
        yield


@contextlib.contextmanager
def _without_fused_rnn() -> Iterator[None]:
    """While open, run recurrent layers step by step.

    The fused CPU op keeps its gates in a workspace that has no size on fake tensors, so
    five sixths of what an LSTM keeps for backward would be missed.
    """
    get: Callable[[], bool] = _private(torch._C, "_get_mkldnn_enabled")
    put: Callable[[bool], None] = _private(torch._C, "_set_mkldnn_enabled")
    before = get()
    put(False)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def _module_casts() -> Iterator[None]:
    """While open, let modules cast themselves within forward; undone at the end.

    As routers of experts do. torch swaps the parameter for the one that was cast, which
    it cannot do to a tensor that others refer to, as a trace does.
    """
    undo: list[tuple[dict[str, Any], str, Any]] = []

    def apply(self: torch.nn.Module, fn: Callable[..., torch.Tensor]) -> Any:
        for module in self.modules():
            for held in named_attributes(module)[:2]:
                for name, tensor in held.items():
                    if tensor is None:
                        continue
                    with torch.no_grad():
                        cast = fn(tensor)
                    if cast is not tensor:
                        undo.append((held, name, tensor))
                        if held is module._parameters:
                            grows = tensor.requires_grad
                            cast = as_parameter(cast, requires_grad=grows)
                        held[name] = cast
        return self

    try:
        with mock.patch.object(torch.nn.Module, "_apply", apply):
            yield
    finally:
        for held, name, tensor in reversed(undo):
            held[name] = tensor


_torch_tensor = torch.tensor


def _tensor_of_numbers(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Make a tensor of lists in which fake tensors stand for their numbers."""
    return _torch_tensor(_as_numbers(data), *args, **kwargs)


def _as_numbers(data: Any) -> Any:
    if isinstance(data, list | tuple):
        return [
            part.tolist() if isinstance(part, torch.Tensor) else _as_numbers(part)
            for part in data
        ]
    return data


@contextlib.contextmanager
def quiet_forward() -> Iterator[None]:
    """Open all of the above for a forward on fake tensors, whose failures are told."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with (
            _unpacked_sequences(),
            _without_fused_rnn(),
            _module_casts(),
            checkpoints_in_place(),
            mock.patch.object(torch, "tensor", _tensor_of_numbers),
            # Values are looked at to be allowed, and fake ones have none.
            mock.patch.object(
                torch.distributions.Distribution, "_validate_args", False
            ),
        ):
            yield
    finally:
        log.disabled = before


def named_attributes(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which a module keeps its parameters, buffers and children."""
    return (
        module._parameters,
        module._buffers,
        cast("dict[str, Any]", module._modules),
    )


def names_of_modules(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Return the FQN of each module, in the order of ``named_modules()``.

    That is a generator in a generator for each level: over a deep model of a thousand
    modules it takes ten times as long.
    """
    names: dict[torch.nn.Module, str] = {}
    waiting = [("", module)]
    while waiting:
        name, part = waiting.pop()
        if part in names:
            continue
        names[part] = name
        lead = f"{name}." if name else ""
        waiting += [
            (lead + key, child)
            for key, child in reversed(part._modules.items())
            if child is not None
        ]
    return names


# -- transformers --------------------------------------------------------------


def _no_packing(position_ids: torch.Tensor) -> None:
    """Return None, the answer of the real function for one sequence a row."""


@contextlib.contextmanager
def _unpacked_sequences() -> Iterator[None]:
    """While open, take every row of a batch to be one sequence.

    transformers reads the position ids to find out, which on tensors without data it
    cannot, so it would build a mask [length, length] and take the slower path of
    attention that no training run takes.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    before = getattr(masking, name, None)
    if before is None:
        yield
        return
    setattr(masking, name, _no_packing)
    try:
        yield
    finally:
        setattr(masking, name, before)
