"""Adapter to torch.export: a model's graph in which chosen modules stay modules.

The only file that knows how ``torch.export`` marks which op came from which module
(``nn_module_stack``, ``module_call_graph``). Seen to work with torch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves, tree_unflatten

from executors.deferred.model import held_tensors
from executors.exception_chain import explain
from executors.losses import LossKind, select_output
from executors.strategies.context import whole_sequences
from planner.checkpointing import checkpoints_in_place
from planner.errors import ExecutionError

__all__ = ["ExportedModel", "export_model", "fixed_shapes"]

#: Most ops of a unit that are computed again outside of it.
_MOST_REPEATED = 16
#: Name of the model within the wrapper that is exported, and its prefix in names.
_INNER = "inner"
_PREFIX = f"{_INNER}."


#: Looks at the values of masks of ``torch.nn.Transformer``, which a trace has not.
_CAUSAL = "_detect_is_causal_mask"


def _as_hinted(_: Any, is_causal: bool | None = None, __: int | None = None) -> bool:
    """Return the caller's hint; a causal mask without one is applied as any other."""
    return is_causal is True


class _Selected(nn.Module):
    """A model whose forward returns the one tensor that its loss is made from."""

    def __init__(self, model: nn.Module, kind: LossKind) -> None:
        super().__init__()
        self.inner = model
        self.kind = kind

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return select_output(self.inner(**inputs), self.kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A graph of aten ops and of calls to the model's own units.

    Attributes:
        graph: Its placeholders are the model's keywords; modules and parameters have
            their FQNs in the model.
        attributes: What ``get_attr`` and ``call_module`` nodes refer to, by target.
        output: Fake tensor like the one that the model returns.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    output: torch.Tensor


def export_model(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    units: Sequence[str],
    kind: LossKind,
    device: torch.device,
) -> ExportedModel:
    """Trace a model's forward, keeping its units as the modules they are.

    Nothing is computed: parameters and inputs are stood in for by fake tensors. A unit
    that forward calls twice is two calls of one module.

    Args:
        model: On the CPU.
        inputs: Keywords of forward, one microbatch.
        units: FQNs of modules to keep whole; none lies within another.
        kind: Which output is kept; see :func:`executors.losses.select_output`.
        device: Where the stages will run; ops in the graph make tensors there.

    Raises:
        ExecutionError: If torch cannot export the model, forward never calls one of
            the units, a value leaves a unit but by its return, or forward changes
            gradients outside of the units.
    """
    wrapper = _Selected(model, kind)
    modules = {model.get_submodule(unit): unit for unit in units}
    paths = _paths(wrapper, modules)
    fakes = (t for t in held_tensors(model) if isinstance(t, FakeTensor))
    # Deferred tensors have no values: all that forward makes of them is as fake.
    fake = next((tensor.fake_mode for tensor in fakes), nullcontext())
    try:
        # Positions that are not given are counted from 0 in each row.
        rows = nullcontext() if "position_ids" in inputs else whole_sequences()
        with (
            fixed_shapes(),
            checkpoints_in_place(),
            rows,
            fake,
            _pre_hooks_within(modules),
            _backwards_of_ones_own(modules) as own,
            mock.patch.object(nn.modules.transformer, _CAUSAL, _as_hinted),
        ):
            program = torch.export.export(
                wrapper,
                (),
                dict(inputs),
                strict=False,
                preserve_module_call_signature=tuple(paths),
            )
    except Exception as error:  # export raises what the model's own code raises, too
        raise ExecutionError(
            f"torch.export cannot trace {type(model).__name__}, which pipeline stages "
            f"need: {type(error).__name__}: {explain(error, model)}; plan with pp=1"
        ) from error
    if own:
        raise ExecutionError(
            f"{type(model).__name__} calls {own[0]} outside of the units of the plan, "
            f"where a pipeline's graph keeps forward alone and not what it does to "
            f"gradients; call it within one of {', '.join(units[:3])}, or plan with "
            f"pp=1"
        )
    rebuilt = _Rebuilt(program, model, paths, device)
    missing = [unit for unit in units if unit not in rebuilt.called]
    if missing:
        raise ExecutionError(
            f"the plan puts {missing[0]!r} on a stage, but the model's forward never "
            f"calls it (of {len(missing)} such), or only within no_grad or autocast; "
            f"plan again for this model, or with pp=1"
        )
    return ExportedModel(
        graph=rebuilt.graph, attributes=rebuilt.attributes, output=rebuilt.output
    )


@contextmanager
def _pre_hooks_within(units: Collection[nn.Module]) -> Iterator[None]:
    """Make forward pre-hooks of units part of their forward, as they are in a stage.

    ``torch.export`` takes what a unit is called with behind them, and a stage, which
    calls the unit, would apply them twice.
    """
    with ExitStack() as stack:
        for unit in units:
            if unit._forward_pre_hooks:
                none: OrderedDict[int, Any] = OrderedDict()
                forward = mock.patch.object(unit, "forward", _hooked(unit))
                stack.enter_context(forward)
                stack.enter_context(mock.patch.object(unit, "_forward_pre_hooks", none))
        yield


def _hooked(unit: nn.Module) -> Callable[..., Any]:
    """Return a unit's forward with its pre-hooks before it, as torch applies them."""
    hooks, forward = dict(unit._forward_pre_hooks), unit.forward
    with_keywords = frozenset(unit._forward_pre_hooks_with_kwargs)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        for number, hook in hooks.items():
            if number in with_keywords:
                args, kwargs = hook(unit, args, kwargs) or (args, kwargs)
            elif (given := hook(unit, args)) is not None:
                args = given if isinstance(given, tuple) else (given,)
        return forward(*args, **kwargs)

    return hooked


@contextmanager
def _backwards_of_ones_own(units: Collection[nn.Module]) -> Iterator[list[str]]:
    """Note what is called outside of units that changes gradients by the user's code.

    Yields:
        Names of classes derived from ``torch.autograd.Function``, but for torch's own
        and this package's, and of ``Tensor.register_hook``.
    """
    found: list[str] = []
    within = 0
    apply: Any = vars(torch.autograd.Function)["apply"]
    hook: Any = torch.Tensor.register_hook

    def enter(module: nn.Module, _: Any) -> None:
        nonlocal within
        within += module in units

    def leave(module: nn.Module, *_: Any) -> None:
        nonlocal within
        within -= module in units

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        known = cls.__module__.partition(".")[0] in {"torch", "executors"}
        if not within and not known:
            found.append(f"{cls.__qualname__}.apply")
        return apply.__func__(cls, *args, **kwargs)

    def hooked(tensor: torch.Tensor, *args: Any) -> Any:
        if not within:
            found.append("Tensor.register_hook")
        return hook(tensor, *args)

    of_modules = nn.modules.module
    with (
        of_modules.register_module_forward_pre_hook(enter),
        of_modules.register_module_forward_hook(leave, always_call=True),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(applied)),
        mock.patch.object(torch.Tensor, "register_hook", hooked),
    ):
        yield found


def _paths(root: nn.Module, units: Mapping[nn.Module, str]) -> dict[str, str]:
    """Every name under which forward may call a unit, and the unit."""
    named = root.named_modules(remove_duplicate=False)
    return {name: units[module] for name, module in named if module in units}


class _Rebuilt:
    """Traced graph built anew, with parameters unlifted and units called.

    torch's own ``torch.export._swap`` finds values by names, some of which unlifting
    has changed (an input called ``input``); drops constants that a unit is given, and
    values that it is given but does not use; and mixes the outputs of a unit up.

    Args:
        program: What was traced.
        model: Within the wrapper.
        units: FQN of each unit by the names that it has in the trace.
        device: Where the graph will run.
    """

    def __init__(
        self,
        program: ExportedProgram,
        model: nn.Module,
        units: Mapping[str, str],
        device: torch.device,
    ) -> None:
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.called: set[str] = set()
        self._program, self._model, self._device = program, model, device
        self._units = units
        self._old = {node.name: node for node in program.graph.nodes}
        self._new: dict[fx.Node, fx.Node] = {}
        self._signatures = {e.fqn: e.signature for e in program.module_call_graph}
        self._calls: set[str] = set()
        self._parameters = set(program.graph_signature.inputs_to_parameters)
        self._place_inputs()
        self._place_state()
        for node in program.graph.nodes:
            self._add(node)
        output = self._old[program.graph_signature.user_outputs[0]]
        self.output: torch.Tensor = output.meta["val"]
        self.graph.output(self._value(output))
        self._sweep()
        if any(map(_is_of_vmap, self.graph.nodes)):
            raise ExecutionError(
                f"{type(model).__name__} calls torch.vmap outside of its units, which "
                f"cannot be cut into stages; plan with pp=1"
            )

    def _place_inputs(self) -> None:
        names = self._program.graph_signature.user_inputs
        spec = self._signatures[""].in_spec
        _, keywords = tree_unflatten(range(len(names)), spec)
        for keyword, position in keywords.items():
            old = self._old[str(names[position])]
            new = self.graph.placeholder(keyword)
            self._keep(old, new)

    def _place_state(self) -> None:
        """Parameters, buffers and constants: the model's own objects, not lifted."""
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT or spec.target is None:
                continue
            name = spec.target.removeprefix(_PREFIX)
            if spec.kind is InputKind.PARAMETER:
                value: Any = self._model.get_parameter(name)
            elif spec.kind is InputKind.BUFFER:
                value = self._model.get_buffer(name)
            else:
                value = self._program.constants[spec.target]
            self._keep(self._old[spec.arg.name], self._attribute(name, value))

    def _attribute(self, name: str, value: Any) -> fx.Node:
        self.attributes[name] = value
        return self.graph.get_attr(name)

    def _keep(self, old: fx.Node, new: fx.Node) -> None:
        new.meta = {"val": old.meta.get("val")}
        self._new[old] = new

    def _add(self, node: fx.Node) -> None:
        """Copy one traced node, or call its unit in place of the unit's first node."""
        if node.op in ("placeholder", "output") or _is_check(node):
            return
        call = self._call_of(node)
        if call is not None:
            if call not in self._calls:
                self._calls.add(call)
                self._call(call)
        elif node.op == "get_attr":
            part = getattr(self._program.graph_module, str(node.target))
            if isinstance(part, fx.GraphModule):
                _move(part, self._device)
            self._keep(node, self._attribute(str(node.target), part))
        else:
            new = self.graph.node_copy(node, self._value)
            _move_node(new, self._device)
            self._keep(node, new)

    def _call_of(self, node: fx.Node) -> str | None:
        """Call of a unit that a node belongs to: ``blocks.0``, ``blocks.0@1``."""
        for key, (path, _) in node.meta.get("nn_module_stack", {}).items():
            if path in self._units:
                again = key.rpartition("@")[2] if "@" in key else ""
                return f"{path}@{again}" if again else str(path)
        return None

    def _call(self, call: str) -> None:
        unit = self._units[call.partition("@")[0]]
        self.called.add(unit)
        signature = self._signatures[call]
        if len(signature.inputs) != signature.in_spec.num_leaves:
            raise ExecutionError(
                f"torch.export has not kept what {unit} is called with the "
                f"{call.partition('@')[2] or 'first'} time, as within no_grad; plan "
                f"with pp=1"
            )
        leaves = [self._argument(argument, unit) for argument in signature.inputs]
        name = f"_arguments_{len(self._calls)}"
        spec = self._attribute(name, signature.in_spec)
        graph = self.graph
        packed = graph.call_function(tree_unflatten, (leaves, spec))
        args, kwargs = (
            graph.call_function(operator.getitem, (packed, i)) for i in range(2)
        )
        shape, keywords = tree_unflatten(range(len(leaves)), signature.in_spec)
        self.attributes[unit] = self._model.get_submodule(unit)
        called = graph.call_module(
            unit,
            tuple(
                graph.call_function(operator.getitem, (args, position))
                for position in range(len(shape))
            ),
            {
                keyword: graph.call_function(operator.getitem, (kwargs, keyword))
                for keyword in keywords
            },
        )
        self._outputs(signature, called)

    def _argument(self, argument: Any, unit: str) -> Any:
        """A leaf of what a unit is called with: a value of the graph, or a constant."""
        if isinstance(argument, ConstantArgument):
            return argument.value
        old = self._old.get(argument.name)
        if not isinstance(argument, TensorArgument) or old is None:
            raise ExecutionError(
                f"{unit} is called with {argument.name}, which torch.export has not "
                f"kept; plan with pp=1"
            )
        return self._value(old)

    def _outputs(self, signature: Any, called: fx.Node) -> None:
        """Redirect readers of the unit's own tensors to the results of its call."""
        names = [getattr(leaf, "name", None) for leaf in signature.outputs]
        plain = signature.out_spec.is_leaf()
        values = called if plain else self.graph.call_function(tree_leaves, (called,))
        for position, name in enumerate(names):
            old = self._old.get(str(name))
            # What a unit hands through has a node already.
            if old is not None and old not in self._new:
                index = (values, position)
                new = (
                    called
                    if plain
                    else self.graph.call_function(operator.getitem, index)
                )
                self._keep(old, new)

    def _value(self, old: fx.Node) -> fx.Node:
        if old not in self._new:
            if not self._can_repeat(old):
                path = str(self._call_of(old)).partition("@")[0]
                unit = self._units.get(path, path)
                raise ExecutionError(
                    f"a value from within {unit} ({old.name}) is read outside of it, "
                    f"but is not returned; plan with pp=1"
                )
            self._keep(old, self.graph.node_copy(old, self._value))
            _move_node(self._new[old], self._device)
        return self._new[old]

    def _can_repeat(self, old: fx.Node) -> bool:
        """True if a value from within a unit can be computed outside of it again.

        Such as a table of rotations that each layer casts or moves to its device: of
        values that are at hand by a few ops, no random numbers and no weights.
        """
        waiting: list[fx.Node] = [old]
        seen: set[fx.Node] = set()
        while waiting and len(seen) < _MOST_REPEATED:
            node = waiting.pop()
            if node in seen:
                continue
            if node in self._new:
                if node.name in self._parameters:
                    return False
                continue
            seen.add(node)
            op = node.target
            if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
                return False
            if torch.Tag.nondeterministic_seeded in op.tags:
                return False
            waiting += node.all_input_nodes
        return all(node in self._new or node in seen for node in waiting)

    def _sweep(self) -> None:
        """Erase unread nodes, but for calls of units and ops with effects."""
        for node in reversed(self.graph.nodes):
            unread = not node.users
            pure = node.op == "call_function" and not self._has_effects(node)
            if unread and (pure or node.op == "get_attr"):
                self.graph.erase_node(node)

    def _has_effects(self, node: fx.Node) -> bool:
        """Return True for an op with effects, and a region (no_grad) that has one."""
        parts = [self.attributes.get(str(arg.target)) for arg in node.all_input_nodes]
        return node.is_impure() or any(
            inner.op == "call_function" and inner.is_impure()
            for part in parts
            if isinstance(part, fx.GraphModule)
            for inner in part.graph.nodes
        )


def _is_of_vmap(node: fx.Node) -> bool:
    """Return True for the begin and end of a vmap, and what it makes of tensors."""
    return "functorch" in str(getattr(node.target, "__module__", ""))


def _is_check(node: fx.Node) -> bool:
    """Return True for run-time guards: they name devices of the traced model."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def _move(module: fx.GraphModule, device: torch.device) -> None:
    """Make a region of the graph (one without gradients, say) use a device."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in list(part.graph.nodes):
                if _is_check(node):
                    part.graph.erase_node(node)
                else:
                    _move_node(node, device)
            part.recompile()


def _move_node(node: fx.Node, device: torch.device) -> None:
    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = map_aggregate(node.args, moved)
    node.kwargs = map_aggregate(node.kwargs, moved)


@contextmanager
def fixed_shapes() -> Iterator[None]:
    """Hide from a model's code, though not from torch's, that it is exported."""
    original = torch.compiler.is_exporting

    def is_exporting() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__", ""))
        return original() and asking.partition(".")[0] == "torch"

    with mock.patch.object(torch.compiler, "is_exporting", is_exporting):
        yield
