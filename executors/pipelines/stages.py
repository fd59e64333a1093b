"""Lowering: a model and a plan's stages become modules that run one after another.

The exported graph is cut by unit names. What a later stage reads of an earlier one is
relayed through all stages between. What depends on inputs and constants alone (masks,
position tables, token ids) is computed anew in each stage that reads it, because every
rank has the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from executors.losses import LossKind
from executors.names import unit_of, units_of_model
from executors.pipelines.export import ExportedModel, export_model
from executors.pipelines.placement import Placement
from executors.strategies.tensor_parallel import styles_of_model
from planner.errors import ExecutionError
from planner.schema import Stage, Strategy

__all__ = ["LoweredStage", "cuts_inside_stream", "lower", "receive", "send"]


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
        input_sharded: Whether the residual stream that it receives will be a tp
            shard; the module itself still takes and returns what is whole.
        output_sharded: The same of what it returns.
    """

    index: int
    module: nn.Module
    units: tuple[str, ...]
    receives: tuple[torch.Tensor, ...]
    sends: tuple[torch.Tensor, ...]
    input_sharded: bool = False
    output_sharded: bool = False


def lower(
    model: nn.Module,
    stages: Sequence[Stage],
    inputs: Mapping[str, torch.Tensor],
    *,
    kind: LossKind,
    device: torch.device,
    wire: tuple[torch.dtype, torch.dtype],
    output_shards: int = 1,
    stream_shards: int = 1,
    inside_stream: Set[int] = frozenset(),
    computes_loss: bool = False,
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
        output_shards: Ranks over which the output's last dimension will be dealt out.
        stream_shards: Ranks over which sequence parallelism divides dimension 1 of the
            residual stream.
        inside_stream: Cuts, by the stage before each, at which the stream is divided.
            It crosses them in shards if it is all that crosses, else whole.
        computes_loss: Whether the last layer will put out a loss, not logits.

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
    output = exported.output
    if computes_loss:
        output = output.new_empty((), dtype=torch.float32)
    elif output_shards > 1:
        output = output.chunk(output_shards, -1)[0]
    cutter = _Cutter(exported, stages, units, wire, output)
    if cutter.crossed_by_stream_alone(inside_stream, stream_shards):
        cutter.sharded = dict.fromkeys(inside_stream, stream_shards)
    built = [cutter.build(index) for index in range(len(stages))]
    _keep_unused(model, built)
    return built


def _keep_unused(model: nn.Module, stages: Sequence[LoweredStage]) -> None:
    """Put parameters that forward never reads on the last stage: checkpoints have all.

    Args:
        model: The whole model.
        stages: All of its stages; the last one is changed.
    """
    held = {id(p) for stage in stages for p in stage.module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in held:
            *path, last = name.split(".")
            holder = stages[-1].module
            for part in path:
                if not hasattr(holder, part):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(last, parameter)


class _Cutter:
    """Copies each stage into a graph of its own, with what crosses the cuts."""

    def __init__(
        self,
        exported: ExportedModel,
        stages: Sequence[Stage],
        units: Sequence[str],
        wire: tuple[torch.dtype, torch.dtype],
        output_shard: torch.Tensor,
    ) -> None:
        self.exported = exported
        self.stages = stages
        self.units = units
        self.wire = wire
        self.output_shard = output_shard
        self.placement = Placement(exported, stages)
        self.nodes, self.stage_of = self.placement.nodes, self.placement.stage_of
        self.output = next(n for n in exported.graph.nodes if n.op == "output")
        self.cuts = [self._crossing(index) for index in range(len(stages) - 1)]
        #: Ranks over which dimension 1 of what crosses a cut is dealt out.
        self.sharded: dict[int, int] = {}

    def crossed_by_stream_alone(self, cuts: Set[int], shards: int) -> bool:
        """Return True if one float tensor crosses each cut, and tp can divide it."""
        for cut in cuts:
            crossing = [node.meta["val"] for node in self.cuts[cut]]
            if len(crossing) != 1 or not crossing[0].is_floating_point():
                return False
            if crossing[0].ndim < 3 or crossing[0].shape[1] % shards:
                return False
        return True

    def _crossing(self, cut: int) -> list[fx.Node]:
        """Tensors made up to stage ``cut`` that a later stage reads, in order."""
        crossing = []
        for node in self.nodes:
            if self.stage_of.get(node, cut + 1) <= cut < self._last_reader(node):
                if not isinstance(node.meta.get("val"), torch.Tensor):
                    raise ExecutionError(
                        f"{node.target} makes no tensor, but is read on both sides of "
                        f"the cut after stage {cut}; cut elsewhere or plan with pp=1"
                    )
                crossing.append(node)
        self._require_unsplit_views(crossing, cut)
        return crossing

    def _require_unsplit_views(self, crossing: Sequence[fx.Node], cut: int) -> None:
        """Refuse to send views of one memory apart if a later stage writes to it."""
        bases = [self.placement.aliases.base(node) for node in crossing]
        for node, written in self.placement.aliases.writes.items():
            if self.stage_of.get(node, 0) > cut and any(
                bases.count(base) > 1 for base in written
            ):
                raise ExecutionError(
                    f"{node.target} on stage {self.stage_of[node]} changes in place "
                    f"what earlier stages hold views of; write it out of place or "
                    f"plan with pp=1"
                )

    def _last_reader(self, node: fx.Node) -> int:
        last = -1
        for user in node.users:
            if user is self.output:
                last = max(last, len(self.stages) - 1)
            elif self.placement.packs(user):
                last = max(last, self._last_reader(user))
            else:
                last = max(last, self.stage_of[user])
        return last

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self.wire[1] if tensor.dtype == self.wire[0] else tensor.dtype

    def _metadata(self, cut: int) -> tuple[torch.Tensor, ...]:
        tensors = [self.output_shard]
        if cut < len(self.cuts):
            tensors = [node.meta["val"] for node in self.cuts[cut]]
        if cut in self.sharded:
            tensors = [tensors[0].chunk(self.sharded[cut], 1)[0]]
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
        """Build the module of one stage."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        root: dict[str, Any] = {}
        self._place_inputs(graph, env, index)

        needed = self._needed(index, env)
        for node in self.nodes:
            if node in needed:
                assert self.stage_of.get(node, index) == index, f"{node} not relayed"
                env[node] = graph.node_copy(node, env.__getitem__)
                if node.op in ("get_attr", "call_module"):
                    root[str(node.target)] = self.exported.attributes[str(node.target)]
        if index == len(self.stages) - 1:
            graph.output(fx.map_arg(self.output.args[0], env.__getitem__))
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
            input_sharded=index - 1 in self.sharded,
            output_sharded=index in self.sharded,
        )

    def _needed(self, index: int, given: Container[fx.Node]) -> set[fx.Node]:
        """Nodes of a stage and those that they depend on, but for given ones."""
        last = index == len(self.stages) - 1
        todo = [node for node in self.nodes if self.stage_of.get(node) == index]
        todo += self.output.all_input_nodes if last else []
        needed: set[fx.Node] = set()
        read: set[fx.Node] = set()
        while todo:
            node = todo.pop()
            read.add(self.placement.aliases.base(node))
            if node not in needed and node not in given:
                needed.add(node)
                todo += node.all_input_nodes
            if not todo:
                # Ops that fill what is read: nothing but its memory names them.
                todo += [
                    op
                    for op, written in self.placement.aliases.writes.items()
                    if op in self.placement.free and op not in needed and written & read
                ]
        return needed

    def _place_inputs(
        self, graph: fx.Graph, env: dict[fx.Node, fx.Node], index: int
    ) -> None:
        """Add placeholders: relayed tensors first, then the model's own inputs."""
        relayed = self.cuts[index - 1] if index else []
        taken = {str(node.target) for node in self.nodes if node.op == "placeholder"}
        names = (f"relay_{n}" for n in count() if f"relay_{n}" not in taken)
        slots = tuple(graph.placeholder(next(names)) for _ in relayed)
        for node in self.nodes:
            if node.op == "placeholder":
                env[node] = graph.placeholder(str(node.target))
        if slots:
            received = graph.call_function(receive, slots)
            for position, node in enumerate(relayed):
                env[node] = graph.call_function(operator.getitem, (received, position))

    def _send_nodes(
        self, graph: fx.Graph, env: dict[fx.Node, fx.Node], index: int
    ) -> list[fx.Node]:
        return [
            graph.call_function(send, (env[node], self._wire_dtype(node.meta["val"])))
            for node in self.cuts[index]
        ]


def cuts_inside_stream(model: nn.Module, strategy: Strategy) -> frozenset[int]:
    """Cuts between stages at which each tp rank has a shard of the residual stream.

    The stream is divided from the first block with a rowwise layer to the last one.
    Sent in shards, it takes the tp-th part of the messages and of their buffers, and
    no stage gathers what the next one would scatter again.

    Args:
        model: The whole model.
        strategy: With its stages.

    Returns:
        Each cut as the index of the stage before it; none without sequence parallelism.
    """
    if not strategy.sharding.sequence_parallel or strategy.mesh.tp == 1:
        return frozenset()
    styles = styles_of_model(model, strategy.sharding)
    units = [unit for stage in strategy.stages for unit in stage.modules]
    found = {unit_of(fqn, units) for fqn, how in styles.items() if how == "rowwise"}
    blocks = [index for index, unit in enumerate(units) if unit in found]
    inside, stop = set(), 0
    for cut, stage in enumerate(strategy.stages[:-1]):
        stop += len(stage.modules)
        if blocks and blocks[0] < stop <= blocks[-1]:
            inside.add(cut)
    return frozenset(inside)


class _Receive(torch.autograd.Function):
    """Passes relayed tensors; every one gets a gradient, contiguous, if only zeros.

    The sending stage waits for as many gradients as it sent floats.
    """

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not views to autograd, which refuses to let a unit change one in place.
        return tuple(tensor.data for tensor in tensors)

    @staticmethod
    def backward(_: Any, *grads: Any) -> Any:
        return tuple(grad.contiguous() for grad in grads)


def receive(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Take relayed tensors in: floats become inputs that surely get a gradient."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not floats:
        return tensors
    passed = iter(_Receive.apply(*floats))  # type: ignore[no-untyped-call]
    return tuple(next(passed) if t.is_floating_point() else t for t in tensors)


def send(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Prepare a tensor for a cut: contiguous, in its own storage, of a dtype."""
    # A clone, not a view: split backward detaches stage outputs in place.
    result = tensor.to(dtype)
    if result is tensor or not result.is_contiguous():
        result = result.clone(memory_format=torch.contiguous_format)
    return result
