"""Record one forward and backward, op by op, at the dispatcher.

The module runs eagerly on tensors without memory. A dispatch mode sees every op of
both passes, below autograd and above the kernels, so that nothing of the model's code
must be understood: loops, branches and custom autograd functions are simply run.

A backward op is charged to the forward op whose autograd node it belongs to, found by
the node's sequence number.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from planner.capture.kernels import FUSIBLE, KernelCost, kernel_cost, tensor_bytes
from planner.capture.private_apis import (
    DispatchMode,
    backward_sequence,
    in_backward,
    is_view,
    last_sequence,
    names_of_modules,
    pin_storage,
    storage_key,
)
from planner.capture.shapes import ShapeCache
from planner.capture.stand_ins import read_of, run_or_assume
from planner.errors import CaptureError, OpBudgetError

__all__ = ["Call", "Trace", "Tracer"]

#: Ops that leave values as they are once they were applied.
_LIMITS = frozenset({"aten::clamp_", "aten::clamp_max_", "aten::clamp_min_"})
_UNWRITTEN = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)


# -- The record ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a repeated module.

    Attributes:
        module: FQN of the module called.
        template: Index of the traced call that this one repeats; -1 for a traced one.
        rows: Half-open range of ops traced; of a repeated call the one op that
            stands for it.
        saves: Half-open range of ``Trace.saves`` made by it.
        inputs: Storage of each tensor that went in.
        outputs: Storage of each tensor that came out.
    """

    module: str
    template: int
    rows: tuple[int, int]
    saves: tuple[int, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """Forward ops in program order, as columns; views are left out.

    A backward op adds its cost to the forward op it belongs to. Storages have ids in
    order of appearance; parameters have negative ones, ``-1 - index``.

    Attributes:
        names: Schema name of each op, ``aten::mm``.
        modules: FQN of the module in whose forward it ran; "" outside any.
        kernels: Class and arithmetic of the forward op.
        inputs: Storages that it reads.
        outputs: Storages that it writes.
        random: True if it draws random numbers.
        fusible: True if it is pointwise or a reduction, which kernels may take in.
        weight_bytes: Parameter bytes that it reads.
        transient: Bytes of the largest working set among its backward ops beyond
            what is saved.
        storage_bytes: Bytes of each storage.
        storage_tensor: (shape, dtype) under which each storage was seen first.
        sources: Storages that hold inputs, buffers and constants.
        constants: Storages of registered buffers.
        saves: (op, storage, module) of each tensor kept for backward, as kept.
        calls: Calls of repeated modules, in order of their return.
        called: FQNs of modules that were called, and not by their forward.
        around: (module, one that holds it) where the second was not being called when
            the first was.
        operations: Ops seen, backward and repeated ones included.
    """

    names: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    kernels: list[KernelCost] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    random: list[bool] = field(default_factory=list)
    fusible: list[bool] = field(default_factory=list)
    forward_bytes: array[float] = field(default_factory=lambda: array("d"))
    weight_bytes: array[float] = field(default_factory=lambda: array("d"))
    backward_flops: array[float] = field(default_factory=lambda: array("d"))
    backward_bytes: array[float] = field(default_factory=lambda: array("d"))
    recompute_flops: array[float] = field(default_factory=lambda: array("d"))
    transient: array[float] = field(default_factory=lambda: array("d"))
    storage_bytes: array[float] = field(default_factory=lambda: array("d"))
    storage_tensor: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    around: set[tuple[str, str]] = field(default_factory=set)
    sources: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    saves: list[tuple[int, int, str]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    operations: int = 0


def _shared(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Module]:
    """Modules that more than one other holds, with all that they hold."""
    held = Counter(child for part in modules for child in part._modules.values())
    found = (part for part, times in held.items() if part is not None and times > 1)
    return {inner for part in found for inner in part.modules()}


# -- The tracer ------------------------------------------------------------------


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, list | tuple | dict):
                yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _distinct(
    tables: Iterable[Mapping[str, torch.Tensor | None]],
) -> list[torch.Tensor]:
    """Return the tensors of many modules, each once, in order."""
    found = [tensor for table in tables for tensor in table.values()]
    return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


class Tracer(DispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fills a :class:`Trace`.

    Args:
        module: The module that will run; its names give the FQNs.
        op_budget: Most ops that may be seen.
        hooks: Watch what autograd saves; ``torch.func`` transforms do not allow it.
        shapes: Made with the mode of the module's fake weights; None for real ones.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        op_budget: int,
        hooks: bool = True,
        shapes: ShapeCache | None = None,
    ) -> None:
        super().__init__()
        self.trace = Trace()
        self.assumptions: dict[str, None] = {}
        self.known_reads: set[str] = set()
        self.paused = False
        self.gradients: dict[Any, torch.Tensor] = {}
        self.current: tuple[object, str] = ("", "")
        self._budget = op_budget
        self._shapes = shapes
        self._names = names_of_modules(module)
        self._shared = _shared(self._names)
        self._stack = [""]
        self._ids: dict[int, int] = {}
        self._pins: list[object] = []
        self._writer: dict[int, int] = {}
        self._row_of_node: dict[int, int] = {}
        self._saved: set[int] = set()
        self._last_row = 0
        self._sizes: list[int] = []
        tables = [part._parameters for part in self._names]
        for index, parameter in enumerate(_distinct(tables)):
            self._ids[storage_key(parameter)] = -1 - index
            self._sizes.append(parameter.numel())
        self.trace.constants.update(self.buffers())
        self.trace.sources.update(self.trace.constants)
        self._hooks: list[Any] = []
        self._saved_hooks = (
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)
            if hooks
            else None
        )

    def __enter__(self) -> Self:
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        if self._saved_hooks is not None:
            self._saved_hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        if self._saved_hooks is not None:
            self._saved_hooks.__exit__(*exc)
        for hook in self._hooks:
            hook.remove()

    @property
    def module(self) -> str:
        """FQN of the module whose forward runs now."""
        return self._stack[-1]

    def name_of(self, module: torch.nn.Module) -> str | None:
        """FQN of a module; None if it is not part of the traced one."""
        return self._names.get(module)

    def buffers(self) -> tuple[int, ...]:
        """Storages of the buffers that the module has now."""
        return self.storages(_distinct([part._buffers for part in self._names]))

    def empty(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Make a tensor whose values nobody reads."""
        if self._shapes is not None:
            return self._shapes.empty(shape, stride, dtype)
        return torch.empty_strided(shape, stride, dtype=dtype)

    def storages(self, value: Any) -> tuple[int, ...]:
        """Storage id of each tensor in nested containers."""
        return tuple(self._id(tensor) for tensor in _tensors(value))

    def assume(self, op: str, what: str) -> None:
        """Record something that was guessed."""
        where = self.module or "the model's forward"
        self.assumptions[f"{where}: {what} ({op})"] = None

    def stand_for(self, call: Call) -> None:
        """Record one op that stands for a whole call that was not run."""
        row = len(self.trace.names)
        made = tuple(i for i in call.outputs if i not in call.inputs)
        self._append("copy", KernelCost(), call.inputs, made)
        self.trace.calls.append(call)
        self._row_of_node.setdefault(last_sequence(), row)

    def _enter_module(self, module: torch.nn.Module, args: Any) -> None:
        name = self._names.get(module, self._stack[-1])
        self.trace.called.add(name)
        # What several modules hold is called by each, under one of its names.
        holder = "" if module in self._shared else name.rpartition(".")[0]
        while holder and holder not in self._stack:
            self.trace.around.add((name, holder))
            holder = holder.rpartition(".")[0]
        self._stack.append(name)

    def _leave_module(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        self._stack.pop()

    def _id(self, tensor: torch.Tensor) -> int:
        key = storage_key(tensor)
        found = self._ids.get(key)
        if found is not None:
            return found
        self._pins.append(pin_storage(tensor))
        fresh = len(self.trace.storage_tensor)
        self._ids[key] = fresh
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.trace.storage_tensor.append((tuple(tensor.shape), dtype))
        self.trace.storage_bytes.append(
            tensor.numel() * tensor.element_size()
            if key < 0
            else tensor.untyped_storage().nbytes()
        )
        return fresh

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.paused:
            return tensor
        storage = self._id(tensor)
        if storage < 0 or storage in self.trace.constants:
            return tensor
        row, module = len(self.trace.names), self._stack[-1]
        if (
            row
            and self._writer.get(storage) == row - 1
            and self.trace.modules[row - 1] == module
        ):
            row -= 1
        self.trace.saves.append((row, storage, module))
        self._saved.add(storage)
        return tensor

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op and record it; see :class:`DispatchMode`.

        Raises:
            OpBudgetError: If it is one op too many.
        """
        if self.paused:
            return self._run(func, args, kwargs)[0]
        self.trace.operations += 1
        self.current = (func, self._stack[-1])
        if self.trace.operations > self._budget:
            raise OpBudgetError(
                f"tracing reached op_budget={self._budget:,} ops in module "
                f"{self._stack[-1] or 'root'!r}; a loop may not end on stand-in "
                f"values, or the sequence is long: raise op_budget or trace a shorter "
                f"one"
            )
        found = read_of(func, args)
        if found is not None:
            self.known_reads.add(found)
        out, args = self._run(func, args, kwargs)
        self._record(func, args, kwargs, out)
        return out

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Any, ...]]:
        """Return the result of an op, remembered if possible, and its arguments."""
        if self._shapes is not None:
            return self._shapes.run(func, args, kwargs, self.assume)
        return run_or_assume(func, args, kwargs, fake=False, record=self.assume)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        ins = list(_tensors(args))
        if kwargs:
            ins.extend(_tensors(kwargs))
        outs = list(_tensors(out))
        reads = tuple(dict.fromkeys(self._id(tensor) for tensor in ins))
        writes = tuple(dict.fromkeys(self._id(tensor) for tensor in outs))
        schema = func._schema
        free = not outs or is_view(func)
        free = free or (not schema.is_mutable and all(i in reads for i in writes))
        if in_backward():
            if not free:
                cost = kernel_cost(func, args, kwargs, out)
                self._record_backward(schema.name, cost, (*ins, *outs))
            return
        if free:
            row = self._writer.get(reads[0], -1) if reads else -1
            row = row if row >= 0 else max(0, len(self.trace.names) - 1)
            self._row_of_node.setdefault(last_sequence(), row)
            return
        if schema.is_mutable:
            self._require_buffer(func, args)
        cost = kernel_cost(func, args, kwargs, out)
        self._row_of_node.setdefault(last_sequence(), len(self.trace.names))
        self._append(schema.name, cost, reads, writes)
        tags = getattr(func, "tags", ())
        self.trace.random[-1] = torch.Tag.nondeterministic_seeded in tags
        self.trace.fusible[-1] = torch.Tag.pointwise in tags or schema.name in FUSIBLE
        if schema.name in _UNWRITTEN:
            return
        moved = float(sum(tensor_bytes(tensor) for tensor in outs))
        weights = 0.0
        for tensor in ins:
            if self._id(tensor) >= 0:
                moved += tensor_bytes(tensor)
            elif cost.kind == "embedding":
                weights += tensor_bytes(outs[0])
            else:
                weights += tensor_bytes(tensor)
        self.trace.forward_bytes[-1] = moved
        self.trace.weight_bytes[-1] = weights

    def _require_buffer(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse an op that writes to a parameter, and tell of limits on its values.

        Each copy of the weights can be limited; shards are not, while gathered copies
        are, before each use.

        Raises:
            CaptureError: Naming the module and the op.
        """
        pairs = zip(func._schema.arguments, args, strict=False)
        written = [x for argument, x in pairs if argument.is_write]
        if all(self._id(tensor) >= 0 for tensor in _tensors(written)):
            return
        if func._schema.name in _LIMITS:
            what = "limits a parameter in place, which ZeRO 3 does not do to its shards"
            self.assume(func._schema.name, what)
        else:
            raise CaptureError(
                f"{self._stack[-1] or 'forward'} changes a parameter in place "
                f"({func._schema.name}), which copies, shards and microbatches would "
                f"each do otherwise; change it after the optimizer's step, or make it "
                f"a buffer if it is not trained"
            )

    def _append(
        self,
        name: str,
        cost: KernelCost,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
    ) -> None:
        trace, row = self.trace, len(self.trace.names)
        for storage in writes:
            self._writer[storage] = row
        for storage in reads:
            if storage >= 0 and storage not in self._writer:
                trace.sources.add(storage)
        trace.names.append(name)
        trace.modules.append(self._stack[-1])
        trace.kernels.append(cost)
        trace.inputs.append(reads)
        trace.outputs.append(writes)
        trace.random.append(False)
        trace.fusible.append(False)
        for column in (
            trace.forward_bytes,
            trace.weight_bytes,
            trace.backward_flops,
            trace.backward_bytes,
            trace.recompute_flops,
            trace.transient,
        ):
            column.append(0.0)

    def _record_backward(
        self, name: str, cost: KernelCost, touched: tuple[torch.Tensor, ...]
    ) -> None:
        """Charge a backward op to its forward op; gradient sums to the one before."""
        trace = self.trace
        if not trace.names:
            return
        row = self._row_of_node.get(backward_sequence(), -1)
        row = self._last_row if row < 0 else row
        row = min(row, len(trace.names) - 1)
        self._last_row = row
        trace.backward_flops[row] += cost.flops
        trace.recompute_flops[row] += cost.recompute_flops
        if name in _UNWRITTEN:
            return
        weights = {self._sizes[-1 - i] for i in trace.inputs[row] if i < 0}
        moved = working = 0.0
        for tensor in touched:
            storage = self._id(tensor)
            if storage < 0:
                continue
            size = tensor_bytes(tensor)
            moved += size
            if storage not in self._saved and tensor.numel() not in weights:
                working += size
        trace.backward_bytes[row] += moved
        trace.transient[row] = max(trace.transient[row], working)
