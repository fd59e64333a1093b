"""Stages as chains of linear layers, read off the graph of a lowered stage."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree

from executors.pipelines.stages import receive, send
from planner.errors import ExecutionError

__all__ = ["Layer", "read_chain"]

#: Ops of one tensor that treat each value by itself. Those that end in _ work in place.
_ELEMENTWISE = frozenset(
    {
        *("celu", "elu", "elu_", "gelu", "hardsigmoid", "hardswish", "hardtanh"),
        *("hardtanh_", "leaky_relu", "leaky_relu_", "mish", "relu", "relu_", "selu"),
        *("sigmoid", "sigmoid_", "silu", "silu_", "softplus", "tanh", "tanh_"),
    }
)
#: Ops that give a sample of another shape one vector.
_SHAPES = frozenset({"flatten", "reshape", "view", "_unsafe_view"})

_Op = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A linear layer, and the ops around it.

    Attributes:
        name: FQN in the model.
        module: h = W z + b.
        after: Elementwise ops that make z of its h.
        first: Ops that are done to what the stage is given, of its first layer.
        input: Name of the model's input, of the model's first layer.
    """

    name: str
    module: nn.Linear
    after: tuple[_Op, ...] = ()
    first: tuple[_Op, ...] = ()
    input: str | None = None

    def activation(self, made: torch.Tensor) -> torch.Tensor:
        """Return f(h), in memory of its own or h itself."""
        return _through(self.after, made)

    def before(self, given: torch.Tensor) -> torch.Tensor:
        """Return what the layer is given of what the stage is given."""
        return _through(self.first, given)


def _through(ops: Sequence[_Op], value: torch.Tensor) -> torch.Tensor:
    for op in ops:
        value = op(value)
    return value


@dataclass(slots=True)
class _Reader:
    """Walks from the output of a stage's graph to its input."""

    graph: fx.GraphModule
    input: str | None = None

    def steps(self) -> list[fx.Node]:
        """Nodes that compute something, in order."""
        output = next(n for n in self.graph.graph.nodes if n.op == "output")
        node, found = _only(output.args[0]), []
        while node.op != "placeholder":
            inner = _passed_by(node)
            if inner is None:
                found.append(node)
                inner = _input_of(node)
            node = inner
        self.input = str(node.target)
        return found[::-1]


def read_chain(stage: nn.Module, *, first: bool) -> list[Layer]:
    """Linear layers of a stage, in order.

    Args:
        stage: A lowered stage: a graph of units and ops between them.
        first: Whether it is the model's first, whose input may be reshaped.

    Raises:
        ExecutionError: If something else is computed.
    """
    assert isinstance(stage, fx.GraphModule)
    reader = _Reader(stage)
    before: list[_Op] = []
    layers: list[tuple[str, nn.Linear, list[_Op]]] = []
    for node in reader.steps():
        if node.op == "call_module":
            name = str(node.target)
            module = stage.get_submodule(name)
            if _own_class(module) is not nn.Linear:
                raise _refusal(f"{name} is {type(module).__name__}, no linear layer")
            assert isinstance(module, nn.Linear)
            layers.append((name, module, []))
            continue
        ops = layers[-1][2] if layers else before
        ops.append(_op_of(node, reshapes=first and not layers))
    if not layers:
        raise _refusal("a stage has no linear layer")
    if before and not first:
        raise _refusal("a stage begins with an op that belongs to the layer before it")
    return [
        Layer(
            name=name,
            module=module,
            after=tuple(after),
            first=tuple(before) if place == 0 else (),
            input=reader.input if place == 0 and first else None,
        )
        for place, (name, module, after) in enumerate(layers)
    ]


def _own_class(module: nn.Module) -> type:
    """Return the class that a module had before ``fully_shard``, which casts it."""
    kind = type(module)
    return kind.__bases__[-1] if isinstance(module, FSDPModule) else kind


def _refusal(reason: str) -> ExecutionError:
    return ExecutionError(
        f"learning=local_alignment follows chains of linear layers and elementwise "
        f"functions, but {reason}; use learning=backpropagation"
    )


def _only(value: Any) -> fx.Node:
    """Return the one node in a nest of arguments.

    Raises:
        ExecutionError: If there are several, or none.
    """
    nodes = [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, fx.Node)]
    # How arguments are packed is a node, too.
    nodes = [node for node in nodes if node.op != "get_attr"]
    if len(nodes) != 1:
        shown = ", ".join(map(str, nodes)) or "nothing"
        raise _refusal(f"{shown} are read together where one tensor is expected")
    return nodes[0]


def _passed_by(node: fx.Node) -> fx.Node | None:
    """Return what a node hands on as it is; None if it computes something."""
    if node.op != "call_function":
        return None
    if node.target in {send, receive, operator.getitem, _pytree.tree_unflatten}:
        return _only(node.args)
    return None


def _input_of(node: fx.Node) -> fx.Node:
    if node.op not in {"call_module", "call_function"}:
        raise _refusal(f"{node} ({node.op}) is read")
    return _only((node.args, node.kwargs))


def _op_of(node: fx.Node, *, reshapes: bool) -> _Op:
    """Make a function of one tensor of a node.

    Raises:
        ExecutionError: If it is more than an elementwise one.
    """
    name = getattr(node.target, "_opname", str(node.target))
    if name not in _ELEMENTWISE and not (reshapes and name in _SHAPES):
        raise _refusal(f"{node} ({name}) is not one")
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    assert callable(target)

    def op(value: torch.Tensor) -> torch.Tensor:
        given = [value if isinstance(one, fx.Node) else one for one in args]
        if name.endswith("_") and name in _ELEMENTWISE:
            given[0] = value.clone()
        result: torch.Tensor = target(*given, **kwargs)
        return result

    return op
