"""Whether tensor parallelism can divide what lies between paired layers.

A part of the model is run twice on tensors without memory: as it is, and with twice
the features between the paired layers. Code that works for any number of features or
heads does the same ops on tensors of which one dimension is twice as long, and hands
the same shapes on. Code with a number of heads of its own, or that cuts its features
at fixed places, does not; what stands against it is the reason that people are given.

Twice as many, not half: then no dimension shrinks to 1, where broadcasting would hide
the error, and nothing has to divide.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.attention import fused_attention_patched
from planner.capture.fakes import fake_copy, quiet_state
from planner.capture.inputs import InputShape
from planner.capture.ladder import Source
from planner.capture.speculate import run_or_assume
from planner.capture.torch_private import (
    DispatchMode,
    as_parameter,
    fake_mode,
    fake_tensor,
    patched_function,
    tree_flatten,
    tree_unflatten,
    without_fused_rnn,
)
from planner.capture.transformers_private import unpacked_sequences
from planner.capture.widths import Op, Shape, why_not_divided

__all__ = ["rehearse"]

_PLAIN = (int, float, str, bool, type(None), torch.Tensor, torch.dtype, torch.device)


@dataclass(slots=True)
class _Call:
    """The first call of a module: copies of its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Ops and their shapes; what runs inside a paired layer is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.depth = 0

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, _ = run_or_assume(func, args, kwargs, fake=True, record=lambda *_: None)
        if not self.depth:
            self.ops.append(
                Op(
                    name=func._schema.name.removeprefix("aten::"),
                    dim=_dim_of(func, args, kwargs),
                    inputs=_shapes((args, kwargs)),
                    outputs=_shapes(out),
                )
            )
        return out


def _dim_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The dimension that an op was told to work along."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dim":
            default = argument.default_value if argument.has_default_value() else None
            given = args[place] if place < len(args) else kwargs.get("dim", default)
            return given if isinstance(given, int) else None
    return None


def _shapes(value: Any) -> tuple[Shape, ...]:
    leaves = tree_flatten(value)[0]
    return tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor))


def _copied(value: Any) -> Any:
    """Arguments anew: what is no tensor may change in a call (caches)."""
    leaves, spec = tree_flatten(value)
    with _tensors_kept():
        fresh = [x if isinstance(x, _PLAIN) else copy.deepcopy(x) for x in leaves]
    return tree_unflatten(fresh, spec)


@contextlib.contextmanager
def _tensors_kept() -> Iterator[None]:
    """While open, a deep copy shares tensors: fake ones have no memory to copy."""
    owner: Any = torch.Tensor
    before = owner.__deepcopy__
    owner.__deepcopy__ = lambda tensor, _: tensor
    try:
        yield
    finally:
        owner.__deepcopy__ = before


class _EnoughError(Exception):
    """Ends a run when every call that was waited for has been seen."""


def _around(names: Sequence[str]) -> str:
    """Innermost module that has all of the named ones in it."""
    parts = names[0].split(".")[:-1]
    while parts and not all(n.startswith(f"{'.'.join(parts)}.") for n in names):
        parts = parts[:-1]
    return ".".join(parts)


def _called(name: str, calls: Mapping[str, _Call]) -> str:
    """The module, or the innermost one around it that has been called."""
    while name and name not in calls:
        name = name.rpartition(".")[0]
    return name


def rehearse(source: Source, groups: Sequence[Mapping[str, str]]) -> list[str | None]:
    """Try whether what lies between paired layers can be divided.

    Args:
        source: The model and its inputs.
        groups: Paired layers by name, each ``colwise`` or ``rowwise``.

    Returns:
        Of each group why it cannot be, in words that may follow its names; None if
        it can.
    """
    if not groups:
        return []
    mode = fake_mode()
    with quiet_state(), warnings.catch_warnings(), _silent_failures():
        warnings.simplefilter("ignore")
        module = fake_copy(source.module, mode, source.dtype)
        module.train()
        with (
            mode,
            torch.no_grad(),
            fused_attention_patched(set()),
            _masks_checked(),
            unpacked_sequences(),
            without_fused_rnn(),
        ):
            try:
                calls = _first_calls(source, module, groups)
            except Exception as error:
                reason = f"could not be tried on fake tensors ({type(error).__name__})"
                return [reason] * len(groups)
            return [_refusal(module, calls, group, mode) for group in groups]


@contextlib.contextmanager
def _silent_failures() -> Iterator[None]:
    """While open, torch does not log what fails on fake tensors: it is an answer."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _masks_checked() -> Iterator[None]:
    """While open, attention refuses a mask that does not fit its scores.

    A bias of a fixed number of heads is such a mask; the stand-in for attention does
    not look at masks.
    """
    functional: Any = torch.nn.functional
    attend = functional.scaled_dot_product_attention

    def checked(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            # This raises where they do not fit.
            attn_mask.expand(*query.shape[:-1], key.shape[-2])
        result: torch.Tensor = attend(query, key, value, attn_mask, *args, **kwargs)
        return result

    with patched_function(checked):
        yield


def _first_calls(
    source: Source, module: torch.nn.Module, groups: Sequence[Mapping[str, str]]
) -> dict[str, _Call]:
    """Run the model until all modules around a group were called; their arguments."""
    if source.dtype is not None:
        torch.set_default_dtype(source.dtype)

    def make(shape: InputShape) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, shape.dtype)
        if dtype.is_floating_point and source.dtype is not None:
            dtype = source.dtype
        return torch.zeros(shape.shape, dtype=dtype)

    innermost = {_around(list(group)) for group in groups}
    wanted = {""}
    for name in innermost:
        parts = name.split(".")
        wanted.update(".".join(parts[: end + 1]) for end in range(len(parts)))
    calls: dict[str, _Call] = {}
    handles = []
    for name, part in module.named_modules():
        if name not in wanted:
            continue

        def hook(_: torch.nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in calls:
                args, kwargs = _copied((args, kwargs))
                calls[name] = _Call(args=args, kwargs=kwargs)
            if innermost <= calls.keys():
                raise _EnoughError

        handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
    args, kwargs = source.inputs.materialise(make)
    try:
        with contextlib.suppress(_EnoughError), _Recorder():
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _refusal(
    module: torch.nn.Module,
    calls: Mapping[str, _Call],
    group: Mapping[str, str],
    mode: Any,
) -> str | None:
    name = _called(_around(list(group)), calls)
    part, call = module.get_submodule(name), calls[name]
    try:
        whole, before = _record(module, part, call, group)
        with _widened(module, group, mode):
            wide, after = _record(module, part, call, group)
    except Exception as error:
        text = " ".join(str(error).split("\n")[0].split())[:80]
        return f"read their features in fixed numbers ({text})"
    if before != after:
        return "hand features of their own to modules that need all of them"
    return why_not_divided(whole, wide)


def _record(
    module: torch.nn.Module,
    part: torch.nn.Module,
    call: _Call,
    group: Mapping[str, str],
) -> tuple[list[Op], tuple[Shape, ...]]:
    """Ops of one call outside the paired layers, and the shapes it returns."""
    recorder = _Recorder()
    handles = []
    for name, style in group.items():

        def enter(_: Any, args: Any, style: str = style) -> None:
            if style == "rowwise":
                recorder.ops.append(Op(name="rowwise", inputs=_shapes(args)))
            recorder.depth += 1

        def leave(*_: Any) -> None:
            recorder.depth -= 1

        layer = module.get_submodule(name)
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))
    args, kwargs = _copied((call.args, call.kwargs))
    try:
        with recorder:
            out = part(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.ops, _shapes(out)


@contextlib.contextmanager
def _widened(
    module: torch.nn.Module, group: Mapping[str, str], mode: Any
) -> Iterator[None]:
    """While open, paired layers have twice the features between them."""
    kept: list[tuple[Any, str, Any]] = []
    for name, style in group.items():
        layer: Any = module.get_submodule(name)
        columns = style == "colwise"
        transposed = not isinstance(layer, torch.nn.Linear)
        dims = {"weight": int(columns == transposed)}
        if columns:
            dims["bias"] = 0
        for leaf, dim in dims.items():
            before = layer._parameters.get(leaf)
            if before is None:
                continue
            shape = [s * (2 if at == dim else 1) for at, s in enumerate(before.shape)]
            like = torch.empty(shape, dtype=before.dtype, device="meta")
            fresh = fake_tensor(mode, like, before.dtype)
            kept.append((layer, leaf, before))
            layer._parameters[leaf] = as_parameter(fresh, requires_grad=True)
        if transposed and columns:
            kept.append((layer, "nf", layer.nf))
            layer.nf *= 2
    try:
        yield
    finally:
        for layer, leaf, before in kept:
            if leaf == "nf":
                layer.nf = before
            else:
                layer._parameters[leaf] = before
