"""Check that tensor parallelism can divide the ops between paired layers.

A part of the model is run twice on tensors without memory: as it is, and with twice
the features between the paired layers. Code that works for any number of features or
heads does the same ops on tensors of which one dimension is twice as long, and hands
the same shapes on. Code with a number of heads of its own, or that cuts its features
at fixed places, does not; the difference is the reason that the user is given.

Twice as many, not half: then no dimension shrinks to 1, where broadcasting would hide
the error, and nothing has to divide.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.fakes import quiet_state
from planner.capture.private_apis import (
    DispatchMode,
    as_parameter,
    fake_tensor,
    names_of_modules,
    patched_function,
    quiet_forward,
    tree_flatten,
    tree_unflatten,
)
from planner.capture.run import Source
from planner.capture.shapes import ShapeCache
from planner.capture.stand_ins import fused_attention_patched
from planner.capture.token_rules import doubled

__all__ = ["tp_violations"]

_Shape = tuple[int, ...]
_PLAIN = (int, float, str, bool, type(None), torch.Tensor, torch.dtype, torch.device)
_VIEWS = frozenset({"view", "_unsafe_view", "_reshape_alias", "reshape", "as_strided"})
#: Ops that pick elements, or lay copies side by side.
_CUTS = frozenset(
    {
        "slice",
        "split",
        "split_with_sizes",
        "unsafe_split",
        "unbind",
        "select",
        "narrow",
        "index_select",
        "constant_pad_nd",
        "repeat",
        "unfold",
    }
)
#: Ops that are told dimensions and mix nothing along them; all others are taken to.
_REARRANGES = frozenset({"permute", "squeeze", "stack", "unsqueeze"})
#: Ops whose results are equal along every dimension that they add.
_UNIFORM = frozenset(
    {
        "empty",
        "expand",
        "full",
        "new_empty",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "zeros",
    }
)
#: Ops whose arguments say no more than shapes do.
_SIZES = _VIEWS | _CUTS | _UNIFORM
_FIXED = "cut their features at fixed places ({})"
_COUNTED = "depend on the place or number of their features or heads ({})"
_MIXED = "mix their features before they are summed ({})"


# -- Two runs --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """Shapes that one op read and made.

    Attributes:
        name: Name of its schema, without ``aten::``; ``rowwise`` stands for a layer
            that sums over the divided features.
        inputs: Shapes of the tensors read.
        outputs: Shapes of the tensors made.
        dims: Dimensions that it was told to work along.
        others: Arguments that are no tensors.
    """

    name: str
    inputs: tuple[_Shape, ...]
    outputs: tuple[_Shape, ...] = ()
    dims: tuple[int, ...] = ()
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class _Call:
    """The first call of a module: copies of its arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Recorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records ops outside the paired layers, with their shapes.

    Args:
        shapes: Of the model's fake copy.
        depth: Number of paired layers that are running.
    """

    def __init__(self, shapes: ShapeCache, depth: int = 0) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self.depth = depth
        self._shapes = shapes

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out, _ = self._shapes.run(func, args, kwargs, lambda *_: None)
        if not self.depth:
            self.ops.append(
                _Op(
                    name=func._schema.name.removeprefix("aten::"),
                    dims=_dims_of(func, args, kwargs),
                    others=_others((args, kwargs)),
                    inputs=_shapes((args, kwargs)),
                    outputs=_shapes(out),
                )
            )
        return out


def _dims_of(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """The dimensions that an op was told to work along."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in {"dim", "dims"}:
            default = argument.default_value if argument.has_default_value() else None
            name = argument.name
            given = args[place] if place < len(args) else kwargs.get(name, default)
            return (given,) if isinstance(given, int) else tuple(given or ())
    return ()


def _others(value: Any) -> tuple[str, ...]:
    leaves = tree_flatten(value)[0]
    return tuple(repr(x) for x in leaves if not isinstance(x, torch.Tensor))


def _shapes(value: Any) -> tuple[_Shape, ...]:
    leaves = tree_flatten(value)[0]
    return tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor))


def _copied(value: Any) -> Any:
    """Copy arguments other than tensors: a call may change them (caches)."""
    leaves, spec = tree_flatten(value)
    with _tensors_kept():
        fresh = [x if isinstance(x, _PLAIN) else copy.deepcopy(x) for x in leaves]
    return tree_unflatten(fresh, spec)


@contextlib.contextmanager
def _tensors_kept() -> Iterator[None]:
    """While open, let deep copies share tensors: fake ones have no memory."""
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
    """Return the module, or the innermost one around it that has been called."""
    while name and name not in calls:
        name = name.rpartition(".")[0]
    return name


def tp_violations(
    source: Source, groups: Sequence[Mapping[str, str]]
) -> list[str | None]:
    """Check the ops between paired layers for what keeps tp from dividing them.

    Args:
        source: The model and its inputs.
        groups: Paired layers by name, each ``colwise`` or ``rowwise``.

    Returns:
        One entry a group: the violation, in words that may follow the names of its
        layers, or None.
    """
    if not groups:
        return []
    with quiet_state(), warnings.catch_warnings(), _silent_failures():
        warnings.simplefilter("ignore")
        module, mode = source.fake()
        with (
            mode,
            torch.no_grad(),
            fused_attention_patched(set()),
            _masks_checked(),
            quiet_forward(),
        ):
            try:
                calls = _first_calls(source, module, groups)
            except Exception as error:
                reason = f"could not be tried on fake tensors ({type(error).__name__})"
                return [reason] * len(groups)
            return [_group_violation(source, calls, group) for group in groups]


@contextlib.contextmanager
def _silent_failures() -> Iterator[None]:
    """While open, keep torch from logging failures on fake tensors."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _masks_checked() -> Iterator[None]:
    """While open, make attention refuse a mask that does not fit its scores.

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
    """Run the model until each module around a group was called; return the calls."""
    if source.dtype is not None:
        torch.set_default_dtype(source.dtype)

    innermost = {_around(list(group)) for group in groups}
    wanted = {""}
    for name in innermost:
        parts = name.split(".")
        wanted.update(".".join(parts[: end + 1]) for end in range(len(parts)))
    calls: dict[str, _Call] = {}
    handles = []
    for part, name in names_of_modules(module).items():
        if name not in wanted:
            continue

        def hook(_: torch.nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            if name not in calls:
                args, kwargs = _copied((args, kwargs))
                calls[name] = _Call(args=args, kwargs=kwargs)
            if innermost <= calls.keys():
                raise _EnoughError

        handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))
    args, kwargs = source.arguments(source.fake()[1])
    try:
        with contextlib.suppress(_EnoughError), _Recorder(source.shapes(), 1):
            module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _group_violation(
    source: Source, calls: Mapping[str, _Call], group: Mapping[str, str]
) -> str | None:
    module, mode = source.fake()
    name = _called(_around(list(group)), calls)
    part, call = module.get_submodule(name), calls[name]
    try:
        whole, before = _record(source, part, call, group)
        with _widened(module, group, mode):
            wide, after = _record(source, part, call, group)
    except Exception as error:
        text = " ".join(str(error).split("\n")[0].split())[:80]
        return f"read their features in fixed numbers ({text})"
    if before != after:
        return "hand features of their own to modules that need all of them"
    return _violation(whole, wide)


def _record(
    source: Source,
    part: torch.nn.Module,
    call: _Call,
    group: Mapping[str, str],
) -> tuple[list[_Op], tuple[_Shape, ...]]:
    """Record the ops of one call outside the paired layers, and its output shapes."""
    module, recorder = source.fake()[0], _Recorder(source.shapes())
    handles = []
    for name, style in group.items():

        def enter(_: Any, args: Any, style: str = style) -> None:
            if style == "rowwise":
                recorder.ops.append(_Op(name="rowwise", inputs=_shapes(args)))
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
    """While open, double the features between the paired layers."""
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


# -- Comparing them --------------------------------------------------------------


def _violation(whole: Sequence[_Op], wide: Sequence[_Op]) -> str | None:
    """Compare two runs of ops; return the violation that keeps ranks from sharing.

    Ranks share the features in equal runs. That is right if every op treats each run
    on its own: the doubled dimension stays one dimension with the same elements outside
    of it, is never summed, cut or joined, and arrives whole in the layer that sums.

    Args:
        whole: Ops of the run as it is.
        wide: Ops of the run with twice the features.

    Returns:
        Words that may follow the names of the layers; None if nothing does.
    """
    if [op.name for op in whole] != [op.name for op in wide]:
        return "run other ops with other numbers of features"
    for one, two in zip(whole, wide, strict=True):
        reason = _op_violation(one, two)
        if reason is not None:
            return reason.format(one.name)
    return None


def _op_violation(one: _Op, two: _Op) -> str | None:
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        return _FIXED
    ins = [doubled(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)]
    outs = [doubled(a, b) for a, b in zip(one.outputs, two.outputs, strict=True)]
    if -1 in ins or -1 in outs:
        return _MIXED
    if one.name == "rowwise":
        return None if ins and ins[0] == len(one.inputs[0]) - 1 else _MIXED
    if one.others != two.others and one.name not in _SIZES:
        return _COUNTED
    if all(axis is None for axis in ins):
        grown = any(axis is not None for axis in outs)
        return _COUNTED if grown and one.name not in _UNIFORM else None
    if all(axis is None for axis in outs):
        return _MIXED
    if one.name == "meshwright::attention":
        # Heads: the third dimension from the right, of all three.
        at = [len(shape) - 3 for shape in one.inputs]
        return None if ins == at else _FIXED
    axis, shape = next(
        (a, s) for a, s in zip(ins, one.inputs, strict=True) if a is not None
    )
    along = {dim % len(shape) for dim in one.dims if -len(shape) <= dim < len(shape)}
    if axis in along and one.name not in _REARRANGES | _CUTS:
        return _MIXED
    if one.name in _CUTS:
        made = zip(outs, one.outputs, strict=True)
        same = all(a is not None and s[a] == shape[axis] for a, s in made)
        return None if same else _FIXED
    if one.name in _VIEWS:
        out = outs[0]
        kept = out is not None and _in_place(shape, axis, one.outputs[0], out)
        return None if kept else _FIXED
    return None


def _in_place(before: _Shape, axis: int, after: _Shape, at: int) -> bool:
    """True if a view leaves the shared dimension where it was in memory."""
    outside, now = math.prod(before[:axis]), math.prod(after[:at])
    if outside == now:
        return True
    # Products of matrices take [batch x heads] as one dimension, and give it back.
    merged = len(after) == 3 and not at and after[0] == math.prod(before[: axis + 1])
    parted = len(before) == 3 and not axis and before[0] == math.prod(after[: at + 1])
    return (now < outside and merged) or (now > outside and parted)
