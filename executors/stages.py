"""Lowering: a model and a plan's stages become modules that run one after another.

The exported graph is cut by unit names. What a later stage reads of an earlier one is
relayed through all stages between. What depends on inputs and constants alone (masks,
position tables, token ids) is computed anew in each stage that reads it, because every
rank has the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx._pytree import tree_flatten_spec
from torch.utils._pytree import tree_flatten, tree_unflatten

from executors.export import ExportedModel, export_model
from executors.losses import LossKind
from executors.names import unit_of, units_of_model
from executors.relay import Rebuild, Relay, leaf_of, receive, send
from planner.schema import Stage

__all__ = ["LoweredStage", "lower"]


@dataclass(frozen=True, kw_only=True)
class LoweredStage:
    """One pipeline stage as a module.

    Its forward takes the relayed tensors in order, then the model's own inputs as
    keywords, and returns the tensors for the next stage.

    Attributes:
        index: Position in the pipeline.
        module: Holds the units under their FQNs in the model.
        units: FQNs of those units.
        receives: Empty tensors like those that it receives, for static metadata.
        sends: Empty tensors like those that it returns.
    """

    index: int
    module: nn.Module
    units: tuple[str, ...]
    receives: tuple[torch.Tensor, ...]
    sends: tuple[torch.Tensor, ...]


def _unpacks(node: fx.Node) -> bool:
    """Whether a node only takes a unit's output apart."""
    if node.target is operator.getitem:
        return True
    return _is_list(node)


def _is_list(node: fx.Node) -> bool:
    return node.target is tree_flatten_spec


def _random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _attribute(root: nn.Module, node: fx.Node) -> Any:
    value: Any = root
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def lower(
    model: nn.Module,
    stages: Sequence[Stage],
    inputs: Mapping[str, torch.Tensor],
    *,
    kind: LossKind,
    device: torch.device,
    wire: tuple[torch.dtype, torch.dtype],
) -> list[LoweredStage]:
    """Cut a model into the stages of a plan.

    Stages are cheap: they share the model's modules until the caller lets go of those
    that other ranks hold.

    Args:
        model: On the CPU; its modules become part of the stages, unchanged.
        stages: All stages, in order; units of each in order of execution.
        inputs: Keywords of forward, one microbatch.
        kind: Which loss will be made from the output.
        device: Where the stages will run.
        wire: Parameter dtype and compute dtype: relayed floats of the first are sent
            as the second.

    Raises:
        FingerprintError: If the model lacks a unit.
        ExecutionError: If the model cannot be exported.
    """
    named = [name for stage in stages for name in stage.modules]
    # What has no parameters is traced through: much of it (position tables) depends
    # on inputs alone and then need not be sent.
    units = tuple(
        unit
        for unit in units_of_model(model, named)
        if any(True for _ in model.get_submodule(unit).parameters())
    )
    exported = export_model(model, inputs, units, kind, device)
    cutter = _Cutter(exported, stages, units, wire)
    return [cutter.build(index) for index in range(len(stages))]


class _Cutter:
    """Assigns nodes to stages and copies each stage into a graph of its own."""

    def __init__(
        self,
        exported: ExportedModel,
        stages: Sequence[Stage],
        units: Sequence[str],
        wire: tuple[torch.dtype, torch.dtype],
    ) -> None:
        self.exported = exported
        self.stages = stages
        self.units = units
        self.wire = wire
        self.nodes = [n for n in exported.root.graph.nodes if n.op != "output"]
        self.output = next(n for n in exported.root.graph.nodes if n.op == "output")
        self.free = self._free_nodes()
        self.stage_of = self._assign()
        self.cuts = [self._crossing(index) for index in range(len(stages) - 1)]

    def _free_nodes(self) -> set[fx.Node]:
        """Nodes that depend on inputs and constants alone, and may be repeated."""
        free: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "get_attr":
                parameter = isinstance(
                    _attribute(self.exported.root, node), nn.Parameter
                )
                ok = not parameter
            elif node.op == "call_function":
                ok = all(n in free for n in node.all_input_nodes) and not _random(node)
            else:
                ok = node.op == "placeholder"
            if ok:
                free.add(node)
        return free

    def _assign(self) -> dict[fx.Node, int]:
        """Stage of every other node: that of its unit, or of what came before it."""
        home = {
            name: index
            for index, stage in enumerate(self.stages)
            for name in stage.modules
            if name in self.units
        }
        stage_of: dict[fx.Node, int] = {}
        current = 0
        for node in self.nodes:
            if node in self.free or node.op == "get_attr" or self._packs(node):
                continue
            if node.op == "call_module":
                unit = unit_of(self.exported.fqn(str(node.target)), home)
                # Never back: a stage reads only stages before it.
                current = max(current, home[unit] if unit is not None else current)
            elif _unpacks(node):
                stage_of[node] = stage_of[node.all_input_nodes[0]]
                continue
            stage_of[node] = current
        return stage_of

    def _packs(self, node: fx.Node) -> bool:
        """Whether a node only puts a unit's arguments together, out of tensors."""
        if node in self.free or node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return self._packs(node.all_input_nodes[0])
        return node.target is tree_unflatten

    def _crossing(self, cut: int) -> list[Relay]:
        """Values made up to stage ``cut`` that a later stage reads, in order."""
        relays = []
        for node in self.nodes:
            if self.stage_of.get(node, cut + 1) > cut or _is_list(node):
                continue
            if self._last_reader(node) > cut:
                leaves, spec = tree_flatten(self._value(node))
                relays.append(Relay(node=node, leaves=tuple(leaves), spec=spec))
        return relays

    def _last_reader(self, node: fx.Node) -> int:
        last = -1
        for user in node.users:
            if user is self.output:
                last = max(last, len(self.stages) - 1)
            elif self._packs(user):
                last = max(last, self._last_reader(user))
            else:
                last = max(last, self.stage_of[user])
        return last

    def _value(self, node: fx.Node) -> Any:
        if node.name in self.exported.unit_outputs:
            return self.exported.unit_outputs[node.name]
        return node.meta["val"]

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.wire[1] if tensor.dtype == self.wire[0] else tensor.dtype

    def _metadata(self, cut: int) -> tuple[torch.Tensor, ...]:
        relays = self.cuts[cut] if cut < len(self.cuts) else []
        tensors = [tensor for relay in relays for _, tensor in relay.tensors]
        if cut == len(self.cuts):
            tensors = [self.exported.output]
        return tuple(
            torch.empty(
                tensor.shape,
                dtype=self._wire_dtype(tensor),
                device="meta",
                requires_grad=tensor.is_floating_point(),
            )
            for tensor in tensors
        )

    def build(self, index: int) -> LoweredStage:
        """The module of one stage."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        root: dict[str, Any] = {}
        self._place_inputs(graph, env, index, root)

        def copy(node: fx.Node) -> fx.Node:
            if node not in env:
                assert self.stage_of.get(node, index) == index, f"{node} not relayed"
                new = graph.node_copy(node, copy)
                if node.op in ("get_attr", "call_module"):
                    target = self.exported.fqn(str(node.target))
                    root[target] = _attribute(self.exported.root, node)
                    new.target = target
                env[node] = new
            return env[node]

        for node in self.nodes:
            if self.stage_of.get(node) == index:
                copy(node)
        if index == len(self.stages) - 1:
            graph.output(fx.map_arg(self.output.args[0], copy))
        else:
            graph.output(tuple(self._send_nodes(graph, env, index)))
        module = fx.GraphModule(root, graph)
        mine = {name for name in self.stages[index].modules if name in self.units}
        return LoweredStage(
            index=index,
            module=module,
            units=tuple(name for name in self.units if name in mine),
            receives=self._metadata(index - 1) if index else (),
            sends=self._metadata(index),
        )

    def _place_inputs(
        self,
        graph: fx.Graph,
        env: dict[fx.Node, fx.Node],
        index: int,
        root: dict[str, Any],
    ) -> None:
        relays = self.cuts[index - 1] if index else []
        slots = [
            [graph.placeholder(f"relay_{n}_{i}") for i, _ in relay.tensors]
            for n, relay in enumerate(relays)
        ]
        for node in self.nodes:
            if node.op == "placeholder":
                env[node] = graph.placeholder(str(node.target))
        flat = tuple(slot for group in slots for slot in group)
        if not flat:
            return
        received = graph.call_function(receive, flat)
        position = 0
        for relay, group in zip(relays, slots, strict=True):
            picked = []
            for _ in group:
                picked.append(
                    graph.call_function(operator.getitem, (received, position))
                )
                position += 1
            if relay.spec.is_leaf():
                env[relay.node] = picked[0]
                continue
            name = f"rebuild_{relay.node.name}"
            root[name] = Rebuild(relay)
            env[relay.node] = graph.call_module(name, tuple(picked))

    def _send_nodes(
        self, graph: fx.Graph, env: dict[fx.Node, fx.Node], index: int
    ) -> list[fx.Node]:
        sent = []
        for relay in self.cuts[index]:
            for position, tensor in relay.tensors:
                leaf = env[relay.node]
                if not relay.spec.is_leaf():
                    leaf = graph.call_function(leaf_of, (leaf, position))
                sent.append(graph.call_function(send, (leaf, self._wire_dtype(tensor))))
        return sent
