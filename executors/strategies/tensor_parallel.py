"""Tensor and sequence parallelism from patterns alone, with no model's code known.

A *region* is what lies between colwise layers and the rowwise layers that they feed:
there each tp rank has its own heads or features. It is entered at the colwise layers
and left at the rowwise one, so that whatever else a module does (residuals, gates,
norms after the sum) is computed alike by every rank. Parameters inside of a region
that are whole on every rank have the style ``replicated``: each rank finds a part of
their gradient. A module of style ``region`` is entered as a whole instead: all that it
computes before it is left is partial. The first forward checks that no parameter is
forgotten.

With sequence parallelism the residual stream between regions is sharded along the
sequence, dimension 1, from the first block that has a region to the last one, across
pipeline stages too. Regions are then entered at the module around the colwise layers,
so that modules that read shapes see whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from executors.names import inside, unit_of
from executors.strategies.collectives import (
    copy_to_region,
    gather,
    gather_to_region,
    is_copy_to_region,
    reduce_from_region,
    reduce_scatter,
    scatter,
)
from executors.strategies.sharded import Memo, shard_embedding, shard_linear
from planner.errors import ExecutionError, StrategyError
from planner.schema import TensorSharding
from planner.schema.strategy_parts import matches_pattern

__all__ = ["apply_tensor_parallel", "styles_of_model"]

#: Dimension of the residual stream that sequence parallelism shards.
_SEQUENCE = 1
#: Styles that split a module's parameters over tp.
_SPLITS = frozenset({"colwise", "rowwise", "vocab"})


@dataclass(kw_only=True)
class _Stream:
    """State that the hooks of one model part share.

    Attributes:
        mesh: The tp axis.
        sharded: Whether the residual stream is sharded along the sequence.
        batch: Samples of the stream, as last seen.
        sequence: Its whole length, as last seen; kept after a forward, because
            recomputation in backward runs regions again.
        entered: Tensors that layers of one module took into a region, until that
            module is done.
    """

    mesh: DeviceMesh
    sharded: bool
    batch: int = 0
    sequence: int = 0
    entered: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def enter_all(self, values: Any) -> Any:
        """Take all arguments of a call into a region."""
        leaves = (v for v in tree_leaves(values) if isinstance(v, torch.Tensor))
        flat = not any(map(self.is_shard, leaves))
        return tree_map(partial(self.enter, flat=flat), values)

    def enter(self, value: Any, *, flat: bool = True) -> Any:
        """Take one value into a region; what needs no gradient passes unchanged.

        Args:
            value: Any argument.
            flat: Whether it may have a rank's tokens as its rows. Where another
                argument is a shard, a matrix with as many rows is something else.
        """
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        group = self.mesh.get_group()
        if self.is_shard(value):
            return gather_to_region(value, group, _SEQUENCE)
        if flat and self.is_flat(value, self.mesh.size()):
            rows = value.reshape(self.batch, -1, value.shape[-1])
            return gather_to_region(rows, group, _SEQUENCE).flatten(0, 1)
        return self.copy(value)

    def copy(self, value: Any) -> Any:
        """Enter with a tensor that is never a shard."""
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return copy_to_region(value, self.mesh.get_group())
        return value

    def enter_once(self, value: Any) -> Any:
        """Enter like :meth:`enter`; layers that read one tensor share a collective."""
        if not isinstance(value, torch.Tensor):
            return value
        known = self.entered.get(id(value))
        if known is None:
            known = self.entered[id(value)] = (value, self.enter(value))
        return known[1]

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Leave a region: the sum over ranks, sharded if the stream is."""
        group = self.mesh.get_group()
        if not self.sharded:
            return reduce_from_region(tensor, group)
        if self.is_flat(tensor, 1):
            rows = tensor.reshape(self.batch, -1, tensor.shape[-1])
            return reduce_scatter(rows, group, _SEQUENCE).flatten(0, 1)
        return reduce_scatter(tensor, group, _SEQUENCE)

    def is_shard(self, value: torch.Tensor) -> bool:
        """Return True if a tensor is a shard of the residual stream."""
        local = self.sequence // self.mesh.size()
        return bool(self.sharded and value.ndim >= 3 and value.shape[1] == local)

    def is_flat(self, value: torch.Tensor, ways: int) -> bool:
        """Return True if a tensor has the tokens of all samples as its rows.

        Args:
            value: Any tensor.
            ways: Ranks over which each sequence is dealt out; 1 if it is whole.
        """
        rows = self.batch * (self.sequence // ways)
        return bool(self.sharded and value.ndim == 2 and value.shape[0] == rows)


def styles_of_model(model: nn.Module, sharding: TensorSharding) -> dict[str, str]:
    """Style of every module that a pattern matches, in the model's order.

    Raises:
        StrategyError: If two patterns give one module different styles.
    """
    styles: dict[str, str] = {}
    for fqn, _ in model.named_modules():
        found = {s for p, s in sharding.patterns.items() if matches_pattern(p, fqn)}
        if len(found) > 1:
            raise StrategyError(
                f"{fqn} matches patterns of styles {' and '.join(sorted(found))}; "
                f"a module has one style, remove all but one"
            )
        if found:
            styles[fqn] = found.pop()
    return styles


def apply_tensor_parallel(
    model: nn.Module,
    sharding: TensorSharding,
    mesh: DeviceMesh,
    units: Sequence[str],
    *,
    head: str | None = None,
    input_sharded: bool = False,
    output_sharded: bool = False,
) -> frozenset[str]:
    """Split a model, or one stage of it, over the tp axis, in place.

    Args:
        model: Parameters still whole, equal on all ranks.
        sharding: Patterns to styles.
        mesh: The tp axis.
        units: FQNs of its pipeline units, in order of execution.
        head: Unit whose output features stay dealt out over the ranks, for a loss
            that is computed so.
        input_sharded: Whether the stage before sends a shard of the residual stream.
        output_sharded: Whether the stage after takes one.

    Returns:
        FQNs of parameters that are whole on each rank but whose gradients are not:
        their sum over tp is the gradient. Under sequence parallelism these are all
        parameters that tp does not split.

    Raises:
        StrategyError: If a module cannot be split in its style.
    """
    every = styles_of_model(model, sharding)
    styles = {fqn: style for fqn, style in every.items() if style in _SPLITS}
    rowwise = {
        unit_of(fqn, units) for fqn, style in styles.items() if style == "rowwise"
    }
    blocks = [unit for unit in units if unit in rowwise]
    stream = _Stream(mesh=mesh, sharded=sharding.sequence_parallel)
    regions = [fqn for fqn, style in every.items() if style == "region"]
    partial_units = _shard_layers(model, styles, units, blocks, stream, head, regions)
    if sharding.sequence_parallel and (blocks or input_sharded):
        _shard_stream(model, blocks, stream, input_sharded, output_sharded)
        first = 0 if input_sharded else units.index(blocks[0])
        last = len(units) - 1 if output_sharded else units.index(blocks[-1])
        partial_units += units[first : last + 1]
    split = {f"{fqn}." for fqn, style in styles.items() if style != "rowwise"}
    split |= {f"{fqn}.weight" for fqn, style in styles.items() if style == "rowwise"}
    replicated = [p for p, style in sharding.patterns.items() if style == "replicated"]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = frozenset(
        name
        for name in names
        if any(matches_pattern(pattern, name) for pattern in replicated)
        or (
            any(inside(name, unit) for unit in partial_units)
            and not any(name.startswith(prefix) for prefix in split)
        )
    )
    if not sharding.sequence_parallel:
        for fqn, style in styles.items():
            if style == "rowwise":
                _check_first_call(model, fqn, found)
    return found


def _check_first_call(model: nn.Module, fqn: str, partial: frozenset[str]) -> None:
    """Check, the first time that gradients flow, which parameters a region holds.

    Autograd knows: those that lie between a rowwise layer's input and the copies by
    which its region was entered.

    Args:
        model: Holds the layer.
        fqn: The rowwise layer.
        partial: Parameters whose gradients are summed over tp.
    """

    def check(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch.compiler.is_compiling() or args[0].grad_fn is None:
            return
        handle.remove()
        inside_region = {id(p) for p in _parameters_before(args[0])}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if (
                id(parameter) in inside_region
                and name not in partial
                and not _is_split(parameter)
            ):
                raise StrategyError(
                    f"{name} is whole on every tp rank, but computes with split "
                    f"features that {fqn} sums: each rank has a part of its "
                    f'gradient; add "{name}": "replicated" to sharding.patterns'
                )

    handle = model.get_submodule(fqn).register_forward_pre_hook(check)


def _parameters_before(tensor: torch.Tensor) -> Iterator[nn.Parameter]:
    """Parameters that a tensor depends on, back to where its region was entered."""
    front, seen = [tensor.grad_fn], set()
    while front:
        node = front.pop()
        if node is None or node in seen or is_copy_to_region(node):
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        front.extend(before for before, _ in node.next_functions)


def _is_split(parameter: nn.Parameter) -> bool:
    """Return True if tp ranks hold parts of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    return any(not placement.is_replicate() for placement in parameter.placements)


def _shard_layers(
    model: nn.Module,
    styles: dict[str, str],
    units: Sequence[str],
    blocks: Sequence[str],
    stream: _Stream,
    head: str | None,
    regions: Sequence[str],
) -> list[str]:
    """Split every layer and hook the entries; return the modules entered whole."""
    group = stream.mesh.get_group()
    memo: Memo = {}
    entries: list[str] = []
    for fqn, style in styles.items():
        layer = model.get_submodule(fqn)
        if style == "vocab":
            shard_embedding(layer, fqn, stream.mesh, memo)
            continue
        if style == "rowwise":
            shard_linear(layer, fqn, style, stream.mesh, leave=stream.leave, memo=memo)
            continue
        if unit_of(fqn, units) not in blocks:
            # Without a rowwise layer after it, the output would stay a part.
            whole = partial(gather, group=group, dim=-1)
            leave = _keep if head is not None and inside(fqn, head) else whole
            shard_linear(layer, fqn, style, stream.mesh, leave=leave, memo=memo)
            _hook_inputs(layer, partial(tree_map, stream.copy))
            continue
        shard_linear(layer, fqn, style, stream.mesh, leave=_keep, memo=memo)
        around = _around(model, fqn)
        entry = next((region for region in regions if inside(fqn, region)), None)
        if stream.sharded and entry is None:
            entry = None if any(inside(unit, around) for unit in units) else around
        if entry is None:
            _hook_inputs(layer, partial(tree_map, stream.enter_once))
            model.get_submodule(around).register_forward_hook(
                partial(_forget, stream), always_call=True
            )
        elif entry not in entries:
            entries.append(entry)
            _hook_inputs(model.get_submodule(entry), stream.enter_all)
    return entries


def _around(model: nn.Module, fqn: str) -> str:
    """FQN of the module that calls a layer; of an adapted layer, what calls that."""
    around = fqn.rpartition(".")[0]
    # A list of adapters is never called itself.
    if isinstance(model.get_submodule(around), nn.ModuleDict):
        around = around.rpartition(".")[0]
    if hasattr(model.get_submodule(around), "base_layer"):
        around = around.rpartition(".")[0]
    return around


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _forget(stream: _Stream, *_: Any) -> None:
    stream.entered.clear()


def _hook_inputs(module: nn.Module, change: Callable[[Any], Any]) -> None:
    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        changed: tuple[Any, Any] = change((args, kwargs))
        return changed

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _shard_stream(
    model: nn.Module,
    blocks: Sequence[str],
    stream: _Stream,
    input_sharded: bool,
    output_sharded: bool,
) -> None:
    """Scatter the residual stream before the first block, gather it after the last.

    Unless another stage does: then what comes, or leaves, is a shard already.
    """
    group, degree = stream.mesh.get_group(), stream.mesh.size()

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                stream.batch, stream.sequence = leaf.shape[:2]
                if input_sharded:
                    stream.sequence *= degree
                    break
                if stream.sequence % degree:
                    raise ExecutionError(
                        f"sequence parallelism over tp={degree} needs a sequence that "
                        f"tp divides, this one has {stream.sequence} tokens; change "
                        f"the sequence length or plan without sequence_parallel"
                    )
                leaves[index] = scatter(leaf, group, _SEQUENCE)
                break
        changed: tuple[Any, Any] = tree_unflatten(leaves, spec)
        return changed

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        leaves, spec = tree_flatten(output)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and stream.is_shard(leaf):
                leaves[index] = gather(leaf, group, _SEQUENCE)
                break
        return tree_unflatten(leaves, spec)

    if not blocks:
        return
    model.get_submodule(blocks[0]).register_forward_pre_hook(before, with_kwargs=True)
    if not output_sharded:
        model.get_submodule(blocks[-1]).register_forward_hook(after)
