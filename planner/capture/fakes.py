"""Copies of modules whose weights have shapes and no memory.

The caller's module is never changed: parameters and buffers are replaced through the
memo of ``copy.deepcopy``, so that no weight is copied and tied weights stay tied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from planner.capture.inputs import MOST_KEPT
from planner.capture.private_apis import (
    as_parameter,
    fake_tensor,
    named_attributes,
    tensor_constructors,
)
from planner.errors import CaptureError
from planner.kv_cache import disable_kv_cache
from planner.random_draws import host_numbers_kept

__all__ = [
    "build_on_meta",
    "fake_copy",
    "fakeify",
    "no_init",
    "quiet_state",
    "real_copy",
]


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """While open, ``torch.nn.init`` functions leave their tensor as it is.

    On tensors without memory an initialisation is wasted time at best, and some ask
    for values that are not there. A library that is imported meanwhile may keep the
    functions that it finds here: they initialise again once this is closed.
    """
    from torch.nn import init

    names = [
        name
        for name in vars(init)
        if name.endswith("_")
        and not name.startswith("_")
        and callable(vars(init)[name])
    ]
    before = {name: getattr(init, name) for name in names}

    closed = False

    def idle(initialise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(initialise)
        def untouched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return initialise(tensor, *args, **kwargs) if closed else tensor

        return untouched

    for name, function in before.items():
        setattr(init, name, idle(function))
    try:
        yield
    finally:
        closed = True
        for name, function in before.items():
            setattr(init, name, function)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """While open, run nothing compiled; nothing is, where dynamo was not imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    stance: Any = torch.compiler.set_stance("force_eager")
    return cast("contextlib.AbstractContextManager[Any]", stance)


@contextlib.contextmanager
def quiet_state() -> Iterator[None]:
    """Put the random state, default dtype and gradient mode back afterwards.

    Modules that were compiled run their own code meanwhile, whose ops can be seen.
    """
    random, dtype = torch.get_rng_state(), torch.get_default_dtype()
    gradients = torch.is_grad_enabled()
    try:
        with _eager(), host_numbers_kept():
            yield
    finally:
        torch.set_rng_state(random)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)


class _OnMeta(TorchFunctionMode):
    """Device context of meta in which small tensors of integers keep their values."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function; one that makes a tensor makes it on meta."""
        named = dict(kwargs or {})
        if func not in tensor_constructors() or named.get("device") is not None:
            return func(*args, **named)
        named.pop("device", None)
        made = func(*args, **named, device="meta")
        whole = not (made.is_floating_point() or made.is_complex())
        if whole and made.numel() <= MOST_KEPT and "empty" not in func.__name__:
            return func(*args, **named, device="cpu")
        return made


def build_on_meta(
    build: Callable[[], torch.nn.Module],
    dtype: torch.dtype | None,
    *,
    valued: bool = False,
) -> torch.nn.Module:
    """Build a module on the meta device without initialising weights.

    Skipping initialisation also skips weight tying in transformers, so
    ``tie_weights()`` is called where the module has one.

    Args:
        build: Makes the module.
        dtype: Default dtype meanwhile; None for torch's.
        valued: Make small tensors of integers on the CPU, so that they have values.

    Raises:
        CaptureError: If the constructor fails.
    """
    meta = _OnMeta() if valued else torch.device("meta")
    with quiet_state(), no_init(), meta:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            module = build()
            tie = getattr(module, "tie_weights", None)
            if callable(tie):
                tie()
        except CaptureError:
            raise
        except Exception as error:
            text = " ".join(str(error).split())[:300]
            raise CaptureError(
                f"the model could not be built on the meta device: "
                f"{type(error).__name__}: {text}; build it yourself and pass the module"
            ) from error
    return module


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None, weight: bool) -> torch.dtype:
    """Dtype of a tensor's copy: the compute dtype for weights that are floating.

    Buffers and tensors in attributes stay as the model makes them, in float32 at most,
    as in training: what mixed precision casts are weights.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor.dtype
    if not weight:
        return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return dtype


def _replacements(
    module: torch.nn.Module,
    make: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    dtype: torch.dtype | None,
) -> dict[int, torch.Tensor]:
    """Make a new tensor for each parameter, buffer and tensor attribute, by id."""
    made: dict[int, torch.Tensor] = {}

    def add(tensor: torch.Tensor, weight: bool) -> None:
        if id(tensor) in made:
            return
        fresh = make(tensor, _cast(tensor, dtype, weight))
        if isinstance(tensor, torch.nn.Parameter):
            fresh = as_parameter(fresh, requires_grad=tensor.requires_grad)
        made[id(tensor)] = fresh

    for child in module.modules():
        for parameter in child._parameters.values():
            if parameter is not None:
                add(parameter, True)
        for buffer in child._buffers.values():
            if buffer is not None:
                # Kernels of norms take statistics beside inputs of any dtype.
                add(buffer, isinstance(child, _NormBase))
        for value in vars(child).values():
            if isinstance(value, torch.Tensor):
                add(value, False)
    return made


def _maker(mode: Any) -> Callable[[torch.Tensor, torch.dtype], torch.Tensor]:
    def make(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return fake_tensor(mode, tensor, dtype)

    return make


def fake_copy(
    module: torch.nn.Module, mode: Any, dtype: torch.dtype | None
) -> torch.nn.Module:
    """Return a deep copy with fake weights; the module itself is only read.

    Args:
        module: Real or meta.
        mode: The FakeTensorMode that the copies belong to.
        dtype: For floating weights; None keeps each as it is.
    """
    memo: dict[int, Any] = dict(_replacements(module, _maker(mode), dtype))
    made = copy.deepcopy(module, memo)
    disable_kv_cache(made.modules())
    return made


def real_copy(module: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
    """Return a deep copy with small random weights on the CPU, for a real run."""

    def make(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
        if not kind.is_floating_point:
            return torch.zeros(tensor.shape, dtype=kind)
        return torch.empty(tensor.shape, dtype=kind).uniform_(0.01, 0.1)

    memo: dict[int, Any] = dict(_replacements(module, make, dtype))
    made = copy.deepcopy(module, memo)
    disable_kv_cache(made.modules())
    return made


def fakeify(
    module: torch.nn.Module, mode: Any, dtype: torch.dtype | None
) -> torch.nn.Module:
    """Replace the weights of a module that nobody else holds; return it."""
    made = _replacements(module, _maker(mode), dtype)
    for child in module.modules():
        tables: tuple[Mapping[str, Any], ...] = (
            *named_attributes(child)[:2],
            vars(child),
        )
        for table in tables:
            for name, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    table[name] = made[id(value)]  # type: ignore[index]
    disable_kv_cache(module.modules())
    return module
