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

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from planner.capture.fakes import quiet_state
from planner.capture.inputs import ExampleInputs, InputShape
from planner.capture.private_apis import (
    has_fakes,
    known_tensor,
    modes_off,
    names_of_modules,
    quiet_forward,
    tree_flatten,
    tree_unflatten,
)
from planner.capture.repeat import repeats_traced_once
from planner.capture.run import Source, own_loss_of, scores_of
from planner.capture.stand_ins import fused_attention_patched
from planner.capture.token_rules import (
    BATCH_NORMS,
    READS_VALUES,
    Op,
    Shape,
    drawn_storages,
    mixes_samples,
    sums_of_losses,
    token_violation,
)
from planner.capture.trace import Call, Tracer
from planner.errors import CaptureError
from planner.model_output import parts_of
from planner.random_draws import DRAWS, host_state
from planner.schema.strategy_parts import matches_pattern

__all__ = ["TokenCheck"]

#: Largest tensor of which values are computed.
_MOST_VALUES = 1 << 18


def _repeated(shape: InputShape, sizes: Sequence[int]) -> torch.Tensor:
    """Repeat an input's known values until it has the sizes."""
    times = [now // max(1, was) for now, was in zip(sizes, shape.shape, strict=True)]
    with modes_off():
        return shape.known().repeat(times)


def _has_rows(shape: InputShape, batch: int) -> bool:
    """Return True if each sample may own as many rows of an input."""
    return bool(shape.shape and shape.shape[0]) and shape.shape[0] % batch == 0


class _Recorder(Tracer):  # type: ignore[no-untyped-call]
    """Tracer that keeps every forward op, views too, with shapes and known values.

    Args:
        source: The model, whose fake copy will run.
        opaque: Modules of which only what goes in and comes out is kept.
    """

    def __init__(self, source: Source, opaque: Collection[str]) -> None:
        super().__init__(
            source.fake()[0],
            op_budget=source.op_budget,
            hooks=False,
            shapes=source.shapes(),
        )
        self.ops: list[Op] = []
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
            Op(
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
        flat, spec = tree_flatten((args, kwargs))
        ins = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        shapes = tuple(tuple(t.shape) for t in ins)
        values = tuple(self._values.get(id(tensor)) for tensor in ins)
        out, _ = self._run(func, args, kwargs)
        outs = _tensors(out)
        self._value(func, (flat, spec), ins, outs)
        self.trace.names.append(func._schema.name)
        name = func._schema.name.removeprefix("aten::")
        inside = any(_inside(self.module, one) for one in self._opaque)
        self.ops.append(
            Op(
                name="opaque" if inside else name,
                module=self.module,
                reads=tuple(self._id(tensor) for tensor in ins),
                writes=tuple(self._id(tensor) for tensor in outs),
                inputs=shapes,
                outputs=tuple(tuple(tensor.shape) for tensor in outs),
                dims=_dims(func, args, kwargs),
                others=tuple(
                    repr(leaf) for leaf in flat if not isinstance(leaf, torch.Tensor)
                ),
                pointwise=torch.Tag.pointwise in func.tags,
                values=values,
                made=tuple(self._values.get(id(tensor)) for tensor in outs),
            )
        )
        return out

    def _value(
        self,
        func: Any,
        given: tuple[list[Any], Any],
        ins: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> None:
        """Compute the values of what an op makes, where those it reads are known.

        Args:
            func: The op overload.
            given: Its arguments, flat, and their nesting.
            ins: Tensors among them.
            outs: Tensors that it made.
        """
        known = all(id(tensor) in self._values for tensor in ins)
        small = sum(tensor.numel() for tensor in outs) <= _MOST_VALUES
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not (known and small and outs) or random:
            if func._schema.is_mutable:
                for tensor in ins:
                    self._values.pop(id(tensor), None)
            return
        flat, spec = given
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


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# -- Runs ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Ops of one forward, and the storages that hold its results and its own loss."""

    ops: list[Op]
    results: frozenset[int]
    losses: frozenset[int]

    def used(self) -> list[bool]:
        """True for each op from which results, or a choice of the code, follow."""
        live = set(self.results)
        used = []
        for op in reversed(self.ops):
            needed = op.name in READS_VALUES or not live.isdisjoint(op.writes)
            used.append(needed)
            if needed:
                live.update(op.reads)
        return used[::-1]


class TokenCheck:
    """Runs of one model with few and many tokens.

    Args:
        source: The model and its inputs.
        length: Tokens of a sample; None for a model without a sequence, whose samples
            alone can be checked.
        opaque: Modules that are known to treat tokens one by one (experts).
    """

    def __init__(
        self, source: Source, length: int | None, opaque: Collection[str]
    ) -> None:
        #: Whether samples are sequences.
        self.has_tokens = length is not None
        length = length or 0
        # Known values are of the whole length.
        even = length % 2 == 0 and length >= 4 and not source.valued
        self._lengths = (length // 2, length) if even else (length, 2 * length)
        self._source, self._length = source, length
        self._opaque = opaque
        self._draws_on_host = False
        #: Draws that all samples of a batch share, after :meth:`samples`.
        self.shared_draws: tuple[str, ...] = ()
        #: True if samples are known to meet in sums of random numbers alone.
        self.sums_draws = False
        self._known: dict[tuple[int, bool, int, bool], _Run] = {}

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

    def samples(self) -> str | None:
        """Return how samples of a batch meet in forward; None if none are known to.

        Raises:
            CaptureError: If that cannot be looked at.
        """
        try:
            few = self._run(self._lengths[0], told=False)
            many, sizes = self._doubled()
        except Exception as error:  # whatever a model's code raises
            raise CaptureError(
                f"forward could not be run with twice the samples "
                f"({type(error).__name__})"
            ) from error
        if [op.name for op in few.ops] != [op.name for op in many.ops]:
            return None
        rows = zip(few.ops, many.ops, few.used(), strict=True)
        pairs = [(one, two) for one, two, used in rows if used]
        drawn = drawn_storages(few.ops)
        sums = sums_of_losses(pairs, few.losses, drawn)
        meetings = [
            one
            for row, (one, two) in enumerate(pairs)
            if row not in sums
            and not self._synchronised(one)
            and mixes_samples(one, two, sizes)
        ]
        self.shared_draws = tuple(
            dict.fromkeys(
                one.name
                for one, two in pairs
                if one.name in DRAWS and one.outputs == two.outputs
            )
        )
        sure = [one for one in meetings if not drawn.issuperset(one.reads)]
        self.sums_draws = bool(meetings) and not sure
        return next(
            (
                f"{one.module or 'its forward'} brings samples together ({one.name})"
                for one in sure or meetings
            ),
            None,
        )

    def frozen(self) -> str | None:
        """Return what forward changes or draws in Python; None if nothing is known."""
        if not has_fakes():
            return None
        whole, (fake, _) = self._source.module, self._source.fake()
        if _plain_values(fake) != _plain_values(whole):
            # What is kept of sizes stays as it is in runs of equal sizes.
            for _ in range(2):
                values = _plain_values(fake)
                try:
                    self._run_anew(self._lengths[0], False, 1, False)
                except Exception:  # whatever a model's code raises
                    return None
            now = _plain_values(fake)
            names = [name for name in now if now[name] != values.get(name)]
            if names:
                return f"changes {names[0]}"
        return "draws numbers of Python's or NumPy's" if self._draws_on_host else None

    def _doubled(self) -> tuple[_Run, frozenset[int]]:
        """Return a run with twice the samples, and dim 0 of inputs that had them.

        Inputs with several rows a sample are doubled where the model needs it: others
        may be tables, which no sample owns.
        """
        inputs = self._source.inputs
        try:
            run = self._run(self._lengths[0], told=False, times=2)
            return run, frozenset({inputs.batch})
        except Exception:  # whatever a model's code raises
            rows = {s.shape[0] for _, s in inputs.shapes if _has_rows(s, inputs.batch)}
            if rows <= {inputs.batch}:
                raise
            run = self._run(self._lengths[0], told=False, times=2, every=True)
            return run, frozenset(rows)

    def _synchronised(self, op: Op) -> bool:
        """True for batch norms that executors know by their module."""
        return op.name in BATCH_NORMS and isinstance(
            self._source.module.get_submodule(op.module), _BatchNorm
        )

    def _first(self, short: _Run, long: _Run, rows: Iterable[int]) -> str | None:
        """Return the first violation among ops that matter."""
        if [op.name for op in short.ops] != [op.name for op in long.ops]:
            return "it runs other ops where there are more tokens"
        used = short.used()
        for row in rows:
            if used[row]:
                one, two = short.ops[row], long.ops[row]
                reason = token_violation(one, two, self._lengths[0])
                if reason is not None:
                    return f"{one.module or 'its forward'} {reason} ({one.name})"
        return None

    def _runs(self, *, told: bool) -> tuple[_Run, _Run]:
        short, long = (self._run(length, told=told) for length in self._lengths)
        return short, long

    def _run(
        self, length: int, *, told: bool, times: int = 1, every: bool = False
    ) -> _Run:
        """Return a run with so many times the samples, made once.

        Args:
            length: Tokens of a sample.
            told: Give forward positions.
            times: How many times the samples.
            every: Also of inputs with several rows a sample.
        """
        key = length, told, times, every
        if key not in self._known:
            self._known[key] = self._run_anew(*key)
        return self._known[key]

    def _run_anew(self, length: int, told: bool, times: int, every: bool) -> _Run:
        source, inputs = self._source, self._source.inputs
        with quiet_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, mode = source.fake()
            if source.dtype is not None:
                torch.set_default_dtype(source.dtype)
            recorder = _Recorder(source, self._opaque)
            drawn = torch.Generator().manual_seed(0)
            values: list[tuple[torch.Tensor, torch.Tensor]] = []

            def make(shape: InputShape) -> torch.Tensor:
                sizes = list(shape.shape)
                if len(sizes) > 1 and sizes[1] == self._length:
                    sizes[1] = length
                owned = every and _has_rows(shape, inputs.batch)
                if sizes and (sizes[0] == inputs.batch or source.valued or owned):
                    sizes[0] *= times
                if source.valued and shape.values is not None:
                    value = _repeated(shape, sizes)
                    values.append((known_tensor(mode, lambda: value), value))
                    return values[-1][0]
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
                quiet_forward(),
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
                host = host_state()
                with recorder, repeats_traced_once(source.repeats(), recorder):
                    output = module(*args, **kwargs)
                self._draws_on_host |= host_state() != host
                loss = own_loss_of(output, source.loss, inputs)
                scores = scores_of(
                    output, _integers(inputs, self._length, length, times)
                )
                trained = loss if loss is not None else scores
                results = _tensors(parts_of(output) if trained is None else trained)
        held = recorder.buffers()
        return _Run(
            ops=recorder.ops,
            results=frozenset({*recorder.storages(results), *held}),
            losses=frozenset(recorder.storages(loss)),
        )


def _plain_values(module: torch.nn.Module) -> dict[str, Any]:
    """Numbers and words among the attributes of a model's parts."""
    return {
        f"{name}.{key}" if name else key: value
        for part, name in names_of_modules(module).items()
        for key, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and key != "training"
    }


def _stream_rows(
    ops: Sequence[Op], styles: Mapping[str, str], units: Sequence[str]
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


def _integers(
    inputs: ExampleInputs, before: int, length: int, times: int
) -> list[Shape]:
    found = [shape.shape for _, shape in inputs.shapes if shape.high is not None]
    found = [(s[0] * times, *s[1:]) for s in found]
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
    known = _buffers(whole)
    for name, buffer in _buffers(fake).items():
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


def _buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{key}" if name else key: buffer
        for part, name in names_of_modules(module).items()
        for key, buffer in part._buffers.items()
        if buffer is not None
    }


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
