"""Check that tokens meet in attention alone, so that a sequence can be divided.

The model is run twice on tensors without memory, the second time with twice the tokens.
The dimension that doubled is that of the tokens, in every tensor, and each op that has
it must be known to treat tokens one by one, in their order. Any other op refuses, as
does a number that depends on the number of tokens, and a tensor that counts them. Only
ops from which the scores follow matter: masks, which attention is not given, do not.

Where positions are told to the model, the integers that meet its weights must be those
of a run in which it counts them itself: they are computed beside the run.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.fakes import quiet_state
from planner.capture.inputs import ExampleInputs, InputShape
from planner.capture.private_apis import (
    modes_off,
    tree_flatten,
    tree_unflatten,
    unpacked_sequences,
    without_fused_rnn,
)
from planner.capture.repeat import repeats_traced_once
from planner.capture.run import Source, scores_of
from planner.capture.stand_ins import fused_attention_patched
from planner.capture.trace import Call, Tracer
from planner.schema.strategy import matches_pattern

__all__ = ["TokenCheck"]

_Shape = tuple[int, ...]
#: Largest tensor of which values are computed.
_MOST_VALUES = 1 << 18

# fmt: off
#: Ops that return the same elements, their dimensions in another order.
_MOVES = frozenset({
    "alias", "clone", "detach", "lift", "lift_fresh", "permute", "squeeze", "t",
    "transpose", "unsqueeze",
})
#: Ops that treat each element on its own, besides those that torch tags as such.
_POINTWISE = frozenset({
    "_to_copy", "bernoulli", "copy", "copy_", "masked_fill", "masked_fill_",
    "native_dropout", "where",
})
#: Ops whose results are equal along the tokens.
_UNIFORM = frozenset({
    "empty", "empty_like", "empty_permuted", "empty_strided", "expand", "fill",
    "fill_", "full", "full_like", "new_empty", "new_empty_strided", "new_full",
    "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zero_", "zeros",
    "zeros_like",
})
#: Ops that work along the dimensions that they are told, and nowhere else.
_ALONG = frozenset({
    "_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax", "_softmax", "all", "amax",
    "amin", "any", "argmax", "argmin", "argsort", "cat", "cumprod", "cumsum",
    "flip", "gather", "glu", "index_select", "linalg_vector_norm", "log_softmax",
    "logcumsumexp", "logsumexp", "max", "mean", "min", "norm", "prod", "roll",
    "scatter", "scatter_", "scatter_add", "select", "slice", "softmax", "sort",
    "split", "split_with_sizes", "stack", "std", "sum", "topk", "unbind", "unfold",
    "unsafe_split", "var", "var_mean",
})
_VIEWS = frozenset({
    "_reshape_alias", "_unsafe_view", "reshape", "view",
})
#: Norms over the last dimensions, whose shape they are told.
_NORMS = frozenset({
    "_fused_rms_norm", "native_layer_norm", "rms_norm",
})
#: Ops that hand a value to Python, which may do anything with it.
_READS_VALUES = frozenset({
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero",
})
# fmt: on
#: Arguments that say no more than shapes do.
_SIZES = _VIEWS | _UNIFORM | frozenset(["select", "slice", "split", "split_with_sizes"])
_COUNTS = "counts its tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """One op of one run.

    Attributes:
        name: Packet name, without ``aten::``.
        module: FQN of the module in whose forward it ran.
        reads: Storages of the tensors read.
        writes: Storages of the tensors made or written.
        inputs: Shapes of the tensors read.
        outputs: Shapes of the tensors made.
        dims: Dimensions that it was told to work along; None for none.
        others: Arguments that are no tensors.
        pointwise: True if torch says so.
        values: Values of each tensor read; None where not known.
        made: The same of each tensor made.
    """

    name: str
    module: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    inputs: tuple[_Shape, ...]
    outputs: tuple[_Shape, ...]
    dims: tuple[int, ...] | None = None
    others: tuple[str, ...] = ()
    pointwise: bool = False
    values: tuple[torch.Tensor | None, ...] = ()
    made: tuple[torch.Tensor | None, ...] = ()


class _Recorder(Tracer):  # type: ignore[no-untyped-call]
    """Tracer that keeps every forward op, views too, with shapes and known values.

    Args:
        module: With fake weights.
        mode: Its FakeTensorMode.
        op_budget: Most ops.
        opaque: Modules of which only what goes in and comes out is kept.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mode: Any,
        op_budget: int,
        opaque: Collection[str],
    ) -> None:
        super().__init__(module, op_budget=op_budget, hooks=False, mode=mode)
        self.ops: list[_Op] = []
        self._values: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []
        self._opaque = opaque

    def know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Tell the value of a tensor."""
        if tuple(tensor.shape) != tuple(value.shape):
            return
        self._values[id(tensor)] = value
        self._kept.append(tensor)

    def stand_for(self, call: Call) -> None:
        super().stand_for(call)
        self.ops.append(
            _Op(
                name="repeat",
                module=call.module,
                reads=call.inputs,
                writes=call.outputs,
                inputs=(),
                outputs=(),
            )
        )

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.paused:
            return self._run(func, args, kwargs)[0]
        ins = _tensors((args, kwargs))
        shapes = tuple(tuple(t.shape) for t in ins)
        values = tuple(self._values.get(id(tensor)) for tensor in ins)
        out, _ = self._run(func, args, kwargs)
        outs = _tensors(out)
        self._value(func, args, kwargs, ins, outs, out)
        self.trace.names.append(func._schema.name)
        name = func._schema.name.removeprefix("aten::")
        inside = any(_inside(self.module, one) for one in self._opaque)
        self.ops.append(
            _Op(
                name="opaque" if inside else name,
                module=self.module,
                reads=tuple(self._id(tensor) for tensor in ins),
                writes=tuple(self._id(tensor) for tensor in outs),
                inputs=shapes,
                outputs=tuple(tuple(tensor.shape) for tensor in outs),
                dims=_dims(func, args, kwargs),
                others=_others(args, kwargs),
                pointwise=torch.Tag.pointwise in func.tags,
                values=values,
                made=tuple(self._values.get(id(tensor)) for tensor in outs),
            )
        )
        return out

    def _value(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """Compute the values of what an op makes, where those it reads are known."""
        known = all(id(tensor) in self._values for tensor in ins)
        small = sum(tensor.numel() for tensor in outs) <= _MOST_VALUES
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not (known and small and outs) or random:
            if func._schema.is_mutable:
                for tensor in ins:
                    self._values.pop(id(tensor), None)
            return
        flat, spec = tree_flatten((args, kwargs))
        real = [
            self._values[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf
            for leaf in flat
        ]
        try:
            with modes_off():
                args, kwargs = tree_unflatten(real, spec)
                made = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        for fake, value in zip(outs, _tensors(made), strict=False):
            self.know(fake, value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(value)[0] if isinstance(x, torch.Tensor)]


def _dims(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, ...] | None:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in {"dim", "dims", "dimension"}:
            default = argument.default_value if argument.has_default_value() else None
            given = (
                args[place] if place < len(args) else kwargs.get(argument.name, default)
            )
            if isinstance(given, int):
                return (given,)
            return tuple(given) if given else None
    return None


def _others(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    flat = tree_flatten((args, dict(kwargs)))[0]
    return tuple(repr(leaf) for leaf in flat if not isinstance(leaf, torch.Tensor))


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# -- One op ----------------------------------------------------------------------


def _doubled(one: _Shape, two: _Shape) -> int | None:
    """Index of the one dimension that doubled; None if equal, -1 if else differs."""
    if one == two:
        return None
    if len(one) != len(two):
        return -1
    at, *more = [at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    return at if not more and two[at] == 2 * one[at] else -1


def _op_violation(one: _Op, two: _Op, length: int) -> str | None:
    """Return what an op does to tokens beside treating them one by one, or None."""
    if one.name in {"repeat", "opaque"}:
        return None
    if len(one.inputs) != len(two.inputs) or len(one.outputs) != len(two.outputs):
        return "reads another number of tensors where there are more tokens"
    ins = [_doubled(a, b) for a, b in zip(one.inputs, two.inputs, strict=True)]
    outs = [_doubled(a, b) for a, b in zip(one.outputs, two.outputs, strict=True)]
    for axis, a, b in zip(ins, one.values, two.values, strict=True):
        if axis is None and a is not None and b is not None and not torch.equal(a, b):
            return "depends on the number of tokens"
    if one.others != two.others and one.name not in _SIZES:
        numbers = not any(axis is not None for axis in ins)
        return _COUNTS if numbers else "depends on the number of tokens"
    if -1 in ins or -1 in outs:
        return "lets tokens meet"
    if any(axis is not None for axis in outs) and _is_uniform(two, outs):
        return None
    axes = {axis for axis in ins if axis is not None}
    made = {axis for axis in outs if axis is not None}
    if not axes:
        return _COUNTS if made and one.name not in _UNIFORM else None
    if not made:
        return "sums tokens up, or chooses among them"
    whole = [
        shape[axis] % length == 0
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    ]
    if not all(whole) or not _apart(one, ins, outs):
        return "lets tokens meet"
    return None


def _is_uniform(op: _Op, axes: Sequence[int | None]) -> bool:
    """True if what an op makes is known to be equal along the tokens."""
    return all(
        axis is None
        or (value is not None and bool((value == value.narrow(axis, 0, 1)).all()))
        for axis, value in zip(axes, op.made, strict=True)
    )


def _apart(one: _Op, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if an op is known to treat tokens one by one."""
    sizes = {
        shape[axis]
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    }
    first = next(at for at, axis in enumerate(ins) if axis is not None)
    axis, shape = ins[first], one.inputs[first]
    assert axis is not None
    if one.name in _VIEWS:
        after = outs[0]
        assert after is not None
        return math.prod(shape[axis + 1 :]) == math.prod(one.outputs[0][after + 1 :])
    if len(sizes) > 1:
        return False
    if one.name == "meshwright::attention":
        return ins == [2, 2, 2] and all(len(s) == 4 for s in one.inputs)
    if one.name in _MOVES:
        return True
    if one.name in _UNIFORM or one.name in _POINTWISE or one.pointwise:
        return _aligned(one, ins, outs)
    if one.name in _ALONG:
        rank = len(one.outputs[0]) if one.name == "stack" else len(shape)
        if one.dims is None:
            # Without one, these work along the first.
            first_by_default = one.name in {"cat", "slice", "split", "stack", "unbind"}
            return first_by_default and axis != 0
        along = {dim % rank for dim in one.dims}
        places = {outs[0] if one.name == "stack" else axis}
        return not along & places
    if one.name in _NORMS:
        return axis == outs[0] and shape[axis + 1 :] != () and ins.count(axis) == 1
    if one.name in {"mm", "addmm", "bmm", "baddbmm"}:
        return _product(one.name, ins, outs)
    if one.name == "embedding":
        return ins == [None, outs[0]]
    if one.name in {"constant_pad_nd", "view_as_complex", "view_as_real"}:
        return axis == outs[0]
    return False


def _aligned(one: _Op, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if the tokens are the same dimension from the right, in all tensors."""
    places = {
        axis - len(shape)
        for axis, shape in zip((*ins, *outs), (*one.inputs, *one.outputs), strict=True)
        if axis is not None
    }
    return len(places) == 1 and all(axis is not None for axis in outs)


def _product(name: str, ins: Sequence[int | None], outs: Sequence[int | None]) -> bool:
    """True if a product of matrices does not sum over tokens."""
    bias, (a, b) = (ins[0], ins[1:]) if len(ins) == 3 else (None, ins)
    batched = name in {"bmm", "baddbmm"}
    rows, columns = (1, 2) if batched else (0, 1)
    if batched and a == b == outs[0] == 0:
        return bias is None or bias == 0
    if bias is not None and bias != outs[0]:
        return False
    return (a, b, outs[0]) in {(rows, None, rows), (None, columns, columns)}


# -- Runs ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Ops of one forward, and the storages that hold what is trained on."""

    ops: list[_Op]
    results: frozenset[int]

    def used(self) -> list[bool]:
        """True for each op from which results, or a choice of the code, follow."""
        live = set(self.results)
        used = []
        for op in reversed(self.ops):
            needed = op.name in _READS_VALUES or not live.isdisjoint(op.writes)
            used.append(needed)
            if needed:
                live.update(op.reads)
        return used[::-1]


class TokenCheck:
    """Runs of one model with few and many tokens.

    Args:
        source: The model and its inputs.
        length: Tokens of a sample.
        opaque: Modules that are known to treat tokens one by one (experts).
    """

    def __init__(self, source: Source, length: int, opaque: Collection[str]) -> None:
        even = length % 2 == 0 and length >= 4
        self._lengths = (length // 2, length) if even else (length, 2 * length)
        self._source, self._length = source, length
        self._opaque = opaque
        self._known: dict[tuple[int, bool], _Run] = {}

    def context(self) -> str | None:
        """Return the reason why context parallelism would change results, or None."""
        try:
            own = self._run(self._lengths[0], told=False)
            short, long = self._runs(told=True)
        except Exception as error:  # whatever a model's code raises
            return f"could not be tried with other lengths ({type(error).__name__})"
        found = self._first(short, long, range(len(short.ops)))
        if found is not None:
            return found
        if not _equal_values(own, short):
            return "positions that it is told are not those that it counts itself"
        return None

    def stream(self, styles: Mapping[str, str], units: Sequence[str]) -> str | None:
        """Return the reason why the stream cannot be divided by tokens, or None.

        Args:
            styles: Pattern to tensor-parallel style.
            units: Units of the model, in order.
        """
        try:
            short, long = self._runs(told=False)
        except Exception as error:  # whatever a model's code raises
            return f"could not be tried with other lengths ({type(error).__name__})"
        rows = _stream_rows(short.ops, styles, units)
        for row in rows:
            op = short.ops[row]
            if op.name == "meshwright::attention":
                return f"{op.module} attends with heads that tp leaves whole"
        return self._first(short, long, rows)

    def _first(self, short: _Run, long: _Run, rows: Iterable[int]) -> str | None:
        """Return the first violation among ops that matter."""
        if [op.name for op in short.ops] != [op.name for op in long.ops]:
            return "it runs other ops where there are more tokens"
        used = short.used()
        for row in rows:
            if used[row]:
                one, two = short.ops[row], long.ops[row]
                reason = _op_violation(one, two, self._lengths[0])
                if reason is not None:
                    return f"{one.module or 'its forward'} {reason} ({one.name})"
        return None

    def _runs(self, *, told: bool) -> tuple[_Run, _Run]:
        short, long = (self._run(length, told=told) for length in self._lengths)
        return short, long

    def _run(self, length: int, *, told: bool) -> _Run:
        """Return a run, made once."""
        if (length, told) not in self._known:
            self._known[length, told] = self._run_anew(length, told=told)
        return self._known[length, told]

    def _run_anew(self, length: int, *, told: bool) -> _Run:
        source, inputs = self._source, self._source.inputs
        with quiet_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, mode = source.fake()
            if source.dtype is not None:
                torch.set_default_dtype(source.dtype)
            recorder = _Recorder(module, mode, source.op_budget, self._opaque)
            drawn = torch.Generator().manual_seed(0)
            values: list[tuple[torch.Tensor, torch.Tensor]] = []

            def make(shape: InputShape) -> torch.Tensor:
                sizes = list(shape.shape)
                if len(sizes) > 1 and sizes[1] == self._length:
                    sizes[1] = length
                dtype: torch.dtype = getattr(torch, shape.dtype)
                if dtype.is_floating_point and source.dtype is not None:
                    dtype = source.dtype
                fake = torch.zeros(sizes, dtype=dtype)
                if shape.high is not None:
                    with modes_off():
                        value = torch.randint(
                            max(1, shape.high), sizes, generator=drawn
                        ).to(dtype)
                    values.append((fake, value))
                return fake

            with (
                mode,
                torch.no_grad(),
                fused_attention_patched(set()),
                unpacked_sequences(),
                without_fused_rnn(),
            ):
                args, kwargs = inputs.materialise(make)
                if told and "position_ids" not in kwargs:
                    shape = (inputs.batch, length)
                    fake = torch.zeros(shape, dtype=torch.int64)
                    with modes_off():
                        values.append((fake, torch.arange(length).expand(shape)))
                    kwargs["position_ids"] = fake
                for fake, value in (*values, *_known_buffers(source.module, module)):
                    recorder.know(fake, value)
                with recorder, repeats_traced_once(source.repeats(), recorder):
                    output = module(*args, **kwargs)
                scores = scores_of(output, _integers(inputs, self._length, length))
                results = _tensors(output if scores is None else scores)
        held = {recorder.storages(buffer)[0] for buffer in module.buffers()}
        return _Run(
            ops=recorder.ops,
            results=frozenset({*recorder.storages(results), *held}),
        )


def _stream_rows(
    ops: Sequence[_Op], styles: Mapping[str, str], units: Sequence[str]
) -> list[int]:
    """Ops that would see a rank's own tokens alone, in order.

    They lie between the first unit that tp splits and the last, not between a colwise
    and a rowwise layer. What is made of no activation is left out until an op that sees
    a rank's tokens reads it.
    """
    style_of = {op.module: _style(op.module, styles) for op in ops}
    touched = {_unit(op.module, units) for op in ops if style_of[op.module]} - {None}
    places = [
        row
        for row, op in enumerate(ops)
        if op.name == "repeat" or _unit(op.module, units) in touched
    ]
    split: set[int] = set()
    apart: set[int] = set()
    rows: list[int] = []
    waiting: list[int] = []
    for row in range(min(places, default=0), max(places, default=-1) + 1):
        op, style = ops[row], style_of[ops[row].module]
        inside = not split.isdisjoint(op.reads)
        if style == "colwise" or (inside and style != "rowwise"):
            split.update(op.writes)
        elif style is None:
            if all(storage < 0 or storage in apart for storage in op.reads):
                apart.update(op.writes)
                waiting.append(row)
                continue
            if not apart.isdisjoint(op.reads):
                rows += waiting
                waiting = []
            rows.append(row)
    return sorted(rows)


def _integers(inputs: ExampleInputs, before: int, length: int) -> list[_Shape]:
    found = [shape.shape for _, shape in inputs.shapes if shape.high is not None]
    return [
        (s[0], length, *s[2:]) if len(s) > 1 and s[1] == before else s for s in found
    ]


def _known_buffers(
    whole: torch.nn.Module, fake: torch.nn.Module
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Small integer buffers and their values.

    A model that was built without memory has no values; ``position_ids`` and
    ``token_type_ids`` of transformers are then taken to be what they always are.
    """
    found = []
    known = dict(whole.named_buffers())
    for name, buffer in fake.named_buffers():
        if buffer.is_floating_point() or buffer.numel() > _MOST_VALUES:
            continue
        value = known[name]
        plain = type(value) is torch.Tensor and value.device.type == "cpu"
        with modes_off():
            if plain:
                found.append((buffer, value.detach().clone()))
            elif name.rpartition(".")[2] == "position_ids":
                count = torch.arange(buffer.shape[-1])
                found.append((buffer, count.expand(buffer.shape).clone()))
            elif name.rpartition(".")[2] == "token_type_ids":
                found.append((buffer, torch.zeros(buffer.shape, dtype=torch.int64)))
    return found


def _equal_values(one: _Run, two: _Run) -> bool:
    """True if the same known values meet unknown ones in two runs."""

    def frontier(run: _Run) -> list[torch.Tensor]:
        return [
            value
            for op, used in zip(run.ops, run.used(), strict=True)
            if used and any(value is None for value in op.values)
            for value in op.values
            if value is not None and value.dim()
        ]

    ours, theirs = frontier(one), frontier(two)
    return len(ours) == len(theirs) and all(
        a.expand(b.shape).equal(b) if a.dim() == b.dim() else False
        for a, b in (_wider(a, b) for a, b in zip(ours, theirs, strict=True))
    )


def _wider(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Broadcast two tensors to the same dimensions, if they can be."""
    try:
        wide = torch.broadcast_shapes(a.shape, b.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return a, b.new_empty((*b.shape, 0))
    return a.expand(wide), b.expand(wide)


def _style(module: str, styles: Mapping[str, str]) -> str | None:
    for pattern, style in styles.items():
        if style in {"colwise", "rowwise"} and matches_pattern(pattern, module):
            return style
    return None


def _unit(module: str, units: Sequence[str]) -> str | None:
    return next((unit for unit in units if unit and _inside(module, unit)), None)
