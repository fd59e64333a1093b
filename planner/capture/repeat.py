"""Tracing equal blocks once, and writing their repetitions out again.

Sibling modules of equal structure are found before tracing. The first two calls with a
given input signature run; every later one is replaced by a single autograd function
that makes outputs of the right shapes, and is recorded as a repetition of the second
call. (The second: the first may meet tensors that are saved for the first time.)

Modules are equal if their type, scalar attributes, parameter and buffer shapes and
children are. A layer's own number is left out of the comparison: a forward that
branches on it must be read with ``repeat=False``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from planner.capture.private_apis import (
    in_backward,
    names_of_modules,
    storage_key,
    tree_flatten,
    tree_unflatten,
)
from planner.capture.trace import Call, Trace, Tracer
from planner.graph.ops import OpGraph, ParameterTensor

__all__ = ["expand", "repeated_modules", "repeats_traced_once"]

_OWN_NUMBER = re.compile(
    r"^_?(layer|block|stage)?_?(idx|index|id|number|layer_idx|layer_number)$"
)
_SCALARS = (int, float, str, bool, type(None), torch.dtype, torch.device)
_WARM_CALLS = 2
_LEAST_COPIES = _WARM_CALLS + 1
_LEAST_MODULES = 4


def _plain(value: object) -> object:
    """Return a comparable form of an attribute; objects stand for themselves."""
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(_plain(item) for item in value))
    if isinstance(value, dict):
        return tuple((repr(key), _plain(item)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype))
    return (type(value).__qualname__, id(value))


_MACHINERY = frozenset(vars(torch.nn.Module()))


def _attributes(module: torch.nn.Module) -> tuple[object, ...]:
    picture = [("training", module.training)]
    for name, value in sorted(vars(module).items()):
        if name in _MACHINERY or _OWN_NUMBER.match(name):
            continue
        picture.append((name, _plain(value)))  # type: ignore[arg-type]
    hooked = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return (*picture, *(tuple(id(hook) for hook in h.values()) for h in hooked))


def _structure(module: torch.nn.Module, seen: dict[torch.nn.Module, int]) -> int:
    """Hash of type, attributes, tensors and children."""
    if module not in seen:
        seen[module] = hash(
            (
                type(module),
                _attributes(module),
                tuple(
                    (name, tuple(p.shape), p.dtype, p.requires_grad)
                    for name, p in module._parameters.items()
                    if p is not None
                ),
                tuple(
                    (name, tuple(b.shape), b.dtype)
                    for name, b in module._buffers.items()
                    if b is not None
                ),
                tuple(
                    (name, _structure(child, seen))
                    for name, child in module._modules.items()
                    if child is not None
                ),
            )
        )
    return seen[module]


def repeated_modules(module: torch.nn.Module) -> list[list[torch.nn.Module]]:
    """Groups of equal siblings, outermost ones only.

    A group has at least three members (two are always run) of at least four modules
    each: below that nothing is gained.
    """
    seen: dict[torch.nn.Module, int] = {}
    groups: dict[int, list[torch.nn.Module]] = {}

    def walk(parent: torch.nn.Module) -> None:
        children = [child for child in parent._modules.values() if child is not None]
        count = Counter(_structure(child, seen) for child in children)
        for child in children:
            size = sum(1 for _ in child.modules())
            shape = _structure(child, seen)
            if count[shape] >= _LEAST_COPIES and size >= _LEAST_MODULES:
                groups.setdefault(shape, []).append(child)
            else:
                walk(child)

    walk(module)
    return list(groups.values())


class _Stub(torch.autograd.Function):
    """Empty outputs of given shapes, and empty gradients for its inputs."""

    @staticmethod
    def forward(
        ctx: Any, tracer: Tracer, shapes: list[Any], *inputs: torch.Tensor
    ) -> Any:
        ctx.tracer = tracer
        ctx.like = [
            (tuple(t.shape), t.dtype) if t.requires_grad else None for t in inputs
        ]
        return tuple(tracer.empty(*shape) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        paused, ctx.tracer.paused = ctx.tracer.paused, True
        try:
            made = [None if like is None else _gradient(ctx, like) for like in ctx.like]
        finally:
            ctx.tracer.paused = paused
        return (None, None, *made)


def _gradient(ctx: Any, like: tuple[Any, ...]) -> torch.Tensor:
    """Return the one tensor of a shape that all gradients without data share."""
    known: dict[tuple[Any, ...], torch.Tensor] = ctx.tracer.gradients
    if like not in known:
        known[like] = torch.empty(like[0], dtype=like[1])
    return known[like]


@dataclass(slots=True)
class _Seen:
    """Calls with one input signature, and the form of their outputs."""

    calls: int = 0
    template: int = -1
    #: One entry for each output leaf: ("input", i), ("view", i, size, stride, offset),
    #: ("new", j) or ("constant", value).
    outputs: tuple[tuple[Any, ...], ...] = ()
    shapes: tuple[Any, ...] = ()
    spec: Any = None


def _signature(flat: list[Any]) -> tuple[Any, ...] | None:
    """Key that is equal for calls that do equal work; None if there is none."""
    picture: list[Any] = [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
    first: dict[int, int] = {}
    for position, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            alias = first.setdefault(storage_key(leaf), position)
            picture.append(
                (
                    alias,
                    tuple(leaf.shape),
                    leaf.stride(),
                    leaf.dtype,
                    leaf.requires_grad,
                )
            )
        elif isinstance(leaf, _SCALARS):
            picture.append(repr(leaf))
        else:
            return None
    return tuple(picture)


def _describe(
    outs: list[Any], ins: list[Any]
) -> tuple[tuple[tuple[Any, ...], ...], tuple[Any, ...]] | None:
    """Describe the way each output can be made again; None if one cannot."""
    same = {id(leaf): i for i, leaf in enumerate(ins) if isinstance(leaf, torch.Tensor)}
    held = {
        storage_key(leaf): i
        for i, leaf in enumerate(ins)
        if isinstance(leaf, torch.Tensor)
    }
    made: list[tuple[Any, ...]] = []
    shapes: list[Any] = []
    fresh: set[int] = set()
    for leaf in outs:
        if not isinstance(leaf, torch.Tensor):
            if not isinstance(leaf, _SCALARS):
                return None
            made.append(("constant", leaf))
        elif id(leaf) in same:
            made.append(("input", same[id(leaf)]))
        elif storage_key(leaf) in held:
            view = (tuple(leaf.shape), leaf.stride(), leaf.storage_offset())
            made.append(("view", held[storage_key(leaf)], *view))
        else:
            if storage_key(leaf) in fresh:
                return None
            fresh.add(storage_key(leaf))
            made.append(("new", len(shapes)))
            shapes.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
    return tuple(made), tuple(shapes)


class _Repeater:
    """The ``forward`` of the members of one group."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._seen: dict[Any, _Seen] = {}

    def call(
        self,
        name: str,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        # In backward, a checkpoint runs again what ran, and nothing else.
        signature = None if in_backward() else _signature(flat)
        if signature is None:
            return forward(*args, **kwargs)
        known = self._seen.setdefault((signature, spec), _Seen())
        if known.calls >= _WARM_CALLS and known.template >= 0:
            return self._stand_in(name, known, flat)
        return self._traced(name, known, forward, call=(args, kwargs), flat=flat)

    def _traced(
        self,
        name: str,
        known: _Seen,
        forward: Callable[..., Any],
        *,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        flat: list[Any],
    ) -> Any:
        trace = self._tracer.trace
        row, save, inner = len(trace.names), len(trace.saves), len(trace.calls)
        inputs = self._tracer.storages(flat)
        args, kwargs = call
        output = forward(*args, **kwargs)
        outs, spec = tree_flatten(output)
        known.calls += 1
        known.template = -1
        described = _describe(outs, flat)
        if described is None or len(trace.calls) > inner:
            return output
        known.template = len(trace.calls)
        known.outputs, known.shapes = described
        known.spec = spec
        trace.calls.append(
            Call(
                module=name,
                template=-1,
                rows=(row, len(trace.names)),
                saves=(save, len(trace.saves)),
                inputs=inputs,
                outputs=self._tracer.storages(outs),
            )
        )
        return output

    def _stand_in(self, name: str, known: _Seen, flat: list[Any]) -> Any:
        tracer = self._tracer
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        inputs = tracer.storages(flat)
        tracer.paused = True
        try:
            made: Sequence[torch.Tensor] = ()
            if not torch.is_grad_enabled():
                made = [tracer.empty(*shape) for shape in known.shapes]
            elif known.shapes:
                made = _Stub.apply(tracer, list(known.shapes), *tensors)  # type: ignore[no-untyped-call]
        finally:
            tracer.paused = False
        outs: list[Any] = []
        for how, what, *view in known.outputs:
            if how == "input":
                outs.append(flat[what])
            elif how == "view":
                outs.append(torch.as_strided(flat[what], *view))
            else:
                outs.append(made[what] if how == "new" else what)
        row = len(tracer.trace.names)
        tracer.stand_for(
            Call(
                module=name,
                template=known.template,
                rows=(row, row + 1),
                saves=(0, 0),
                inputs=inputs,
                outputs=tracer.storages(outs),
            )
        )
        return tree_unflatten(outs, known.spec)


@contextlib.contextmanager
def repeats_traced_once(
    groups: Sequence[Sequence[torch.nn.Module]], tracer: Tracer
) -> Iterator[None]:
    """While open, replace repeated calls of the members of groups of equal blocks."""
    patched: list[torch.nn.Module] = []
    try:
        for group in groups:
            repeater = _Repeater(tracer)
            for member in group:
                if "forward" in vars(member):
                    continue
                name = tracer.name_of(member)
                if name is None:
                    continue
                vars(member)["forward"] = _forward(repeater, name, member.forward)
                patched.append(member)
        yield
    finally:
        for member in patched:
            del vars(member)["forward"]


def _forward(
    repeater: _Repeater, name: str, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return repeater.call(name, forward, args, kwargs)

    return call


# -- Writing repeated calls out again --------------------------------------------


class _Expansion:
    """Rows of a trace, with each repeated call replaced by the rows it repeats."""

    def __init__(self, trace: Trace, owners: dict[str, int]) -> None:
        self.trace = trace
        self.owners = owners
        self.names_of: dict[int, list[str]] = {}
        for name, index in owners.items():
            self.names_of.setdefault(index, []).append(name)
        self.rows: list[int] = []
        self.modules: list[str] = []
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.saves: list[tuple[int, int]] = []
        self.storages: list[int] = list(range(len(trace.storage_tensor)))
        self._saves_at = self._by_row()

    def _by_row(self) -> dict[int, list[int]]:
        """Storages saved at each row, moved to the module that saved them."""
        trace = self.trace
        found: dict[int, list[int]] = {}
        last = len(trace.names) - 1
        for row, storage, module in trace.saves:
            place = min(row, last)
            if trace.modules[place] != module and place:
                before = trace.modules[place - 1]
                place -= before == module or before.startswith(module + ".")
            found.setdefault(place, []).append(storage)
        return found

    def run(self) -> None:
        repeated = {
            call.rows[0]: call for call in self.trace.calls if call.template >= 0
        }
        for row in range(len(self.trace.names)):
            call = repeated.get(row)
            if call is None:
                self._append(row, self.trace.modules[row])
            else:
                self._repeat(call)

    def _append(self, row: int, module: str) -> None:
        trace = self.trace
        for storage in self._saves_at.get(row, ()):
            self.saves.append((len(self.rows), storage))
        self.rows.append(row)
        self.modules.append(module)
        self.inputs.append(trace.inputs[row])
        self.outputs.append(trace.outputs[row])

    def _repeat(self, call: Call) -> None:
        trace = self.trace
        template = trace.calls[call.template]
        cut = len(template.module)
        start, stop = template.rows
        renamed = dict(zip(template.inputs, call.inputs, strict=True))
        renamed.update(zip(template.outputs, call.outputs, strict=True))
        for row in range(start, stop):
            for storage in trace.outputs[row]:
                if storage not in renamed:
                    renamed[storage] = len(self.storages)
                    self.storages.append(storage)
        for i in {i for row in range(start, stop) for i in trace.inputs[row] if i < 0}:
            renamed[i] = self._parameter(i, template.module, call.module)
        for row in range(start, stop):
            for storage in self._saves_at.get(row, ()):
                self.saves.append((len(self.rows), renamed.get(storage, storage)))
            self.rows.append(row)
            module = trace.modules[row]
            inside = module.startswith(template.module)
            self.modules.append(call.module + module[cut:] if inside else module)
            self.inputs.append(tuple(renamed.get(i, i) for i in trace.inputs[row]))
            self.outputs.append(tuple(renamed.get(i, i) for i in trace.outputs[row]))

    def _parameter(self, key: int, template: str, module: str) -> int:
        """Return the parameter that takes the place of another in a repeated call."""
        for name in self.names_of.get(-1 - key, ()):
            if name.startswith(template + "."):
                twin = self.owners.get(module + name[len(template) :])
                if twin is not None:
                    return -1 - twin
        return key


def _parameters(
    module: torch.nn.Module, dtype: torch.dtype | None
) -> tuple[list[ParameterTensor], dict[str, int]]:
    """Distinct parameters, and the index of each under all of its names."""
    index_of: dict[int, int] = {}
    names: list[list[str]] = []
    tensors: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        index = index_of.setdefault(id(parameter), len(tensors))
        if index == len(tensors):
            tensors.append(parameter)
            names.append([])
        names[index].append(name)
    made = [
        ParameterTensor(
            name=aliases[0],
            aliases=tuple(aliases[1:]),
            shape=tuple(tensor.shape),
            dtype=str(
                dtype
                if dtype is not None and tensor.is_floating_point()
                else tensor.dtype
            ).removeprefix("torch."),
            trainable=tensor.requires_grad,
        )
        for tensor, aliases in zip(tensors, names, strict=True)
    ]
    return made, {name: i for i, group in enumerate(names) for name in group}


def _lists(module: torch.nn.Module) -> Iterator[str]:
    """Containers of modules that run one after another."""
    kinds = (torch.nn.ModuleList, torch.nn.Sequential)
    for child, name in names_of_modules(module).items():
        if isinstance(child, kinds) and len(child) > 1:
            yield name


def _called(trace: Trace) -> Iterator[str]:
    """Modules that were called, those within repeated calls too."""
    for again in _repeated(trace):
        yield from filter(None, map(again, trace.called))


def _around(trace: Trace) -> Iterator[tuple[str, str]]:
    """Modules with those that hold them and were not called, repeated ones too."""
    for again in _repeated(trace):
        pairs = ((again(one), again(holder)) for one, holder in trace.around)
        yield from ((one, holder) for one, holder in pairs if one and holder)


def _repeated(trace: Trace) -> Iterator[Callable[[str], str | None]]:
    """Names of modules to themselves, then to those of each repeated call, or None."""
    yield lambda name: name
    for call in trace.calls:
        if call.template >= 0:
            yield partial(_renamed, trace.calls[call.template].module, call.module)


def _renamed(first: str, module: str, name: str) -> str | None:
    """Name of what is within a module by that of the same within an equal one."""
    inside = name == first or name.startswith(f"{first}.")
    return module + name[len(first) :] if inside else None


def _splittable(module: torch.nn.Module) -> dict[str, str]:
    """FQN to ``linear``, ``transposed`` or ``embedding``."""
    # transformers' linear layer with a weight [in, out]; no model without it has it.
    library = sys.modules.get("transformers.pytorch_utils")
    transposed = getattr(library, "Conv1D", ())
    found = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, torch.nn.Linear):
            found[name] = "linear"
        elif isinstance(child, transposed):
            found[name] = "transposed"
        elif isinstance(child, torch.nn.Embedding):
            found[name] = "embedding"
    return found


def expand(trace: Trace, module: torch.nn.Module, dtype: torch.dtype | None) -> OpGraph:
    """Write a trace out in full.

    Args:
        trace: As the tracer left it.
        module: The module that was traced, or the one it was copied from.
        dtype: Dtype that floating parameters had in the trace; None for their own.

    Returns:
        All forward ops, each with the cost of its backward.
    """
    parameters, owners = _parameters(module, dtype)
    full = _Expansion(trace, owners)
    full.run()
    rows = np.asarray(full.rows, dtype=np.int64)
    names = names_of_modules(module)

    def column(values: object) -> np.ndarray:
        return np.asarray(values, dtype=np.float64)[rows]

    sizes = np.asarray(trace.storage_bytes, dtype=np.float64)
    return OpGraph(
        origin=full.rows,
        names=[trace.names[row] for row in full.rows],
        modules=full.modules,
        kernels=[trace.kernels[row] for row in full.rows],
        inputs=full.inputs,
        outputs=full.outputs,
        random=[trace.random[row] for row in full.rows],
        fusible=[trace.fusible[row] for row in full.rows],
        forward_bytes=column(trace.forward_bytes),
        weight_bytes=column(trace.weight_bytes),
        backward_flops=column(trace.backward_flops),
        backward_bytes=column(trace.backward_bytes),
        recompute_flops=column(trace.recompute_flops),
        transient=column(trace.transient),
        storage_bytes=sizes[np.asarray(full.storages, dtype=np.int64)],
        storage_tensor=[trace.storage_tensor[i] for i in full.storages],
        sources=trace.sources,
        constants=trace.constants,
        saves=full.saves,
        parameters=parameters,
        module_types={name: type(m).__name__ for m, name in names.items()},
        children={
            name: tuple(f"{name}.{key}" if name else key for key in child._modules)
            for child, name in names.items()
        },
        linear=_splittable(module),
        module_lists=frozenset(_lists(module)),
        called=frozenset(_called(trace)),
        around=frozenset(_around(trace)),
        aliases=_aliases(module, names),
    )


def _aliases(
    module: torch.nn.Module, names: Mapping[torch.nn.Module, str]
) -> dict[str, tuple[str, ...]]:
    """Other FQNs of modules that several hold, by the first."""
    found: dict[str, tuple[str, ...]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        if name != names[part]:
            found[names[part]] = (*found.get(names[part], ()), name)
    return found
