"""Layers cut to some of their neurons, which compute on their own.

A group is what tensor parallelism would cut: colwise layers and the rowwise layer that
they feed. An output feature of the former and the same input feature of the latter are
a neuron; in attention a head, with all that shares its keys and values, takes the place
of one. A cut layer is a plain layer with fewer features, and sends nothing: the rowwise
layer's bias, which belongs to no neuron, is added whole.

In chains each layer feeds the next: those between the first and the last are cut along
both dimensions. Of such a weight a copy also keeps an equal run of rows, as a buffer
beside it: of what a copy's neurons do not meet, others have as little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from executors.strategies.sharded import is_transposed
from executors.strategies.tensor_parallel import styles_of_model
from planner.errors import StrategyError
from planner.schema import TensorSharding

__all__ = [
    "KEPT_ROWS",
    "CutParameter",
    "NeuronGroup",
    "find_groups",
    "narrow_layers",
    "require_unshared",
]

#: Name of the buffer with a copy's rows of a layer's whole weight.
KEPT_ROWS = "kept_rows"
#: Attributes by which attention modules tell the features of a head.
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim")
#: What nn.Linear remembers of its weight's shape.
_SIZES = ("out_features", "in_features")
#: Layers that feed one rowwise layer without being attention: an MLP's, and its gate's.
_MOST_COLUMNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CutParameter:
    """A parameter that has a part for each neuron.

    Attributes:
        name: FQN.
        dim: Dimension along which its neurons lie.
    """

    name: str
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronGroup:
    """Neurons of layers that are cut together.

    Attributes:
        layer: FQN of the rowwise layer.
        neurons: Number of neurons, or of heads with keys and values of their own.
        parameters: All that have a part for each of them.
    """

    layer: str
    neurons: int
    parameters: tuple[CutParameter, ...]


def find_groups(
    model: nn.Module, sharding: TensorSharding, *, chains: bool = False
) -> tuple[NeuronGroup, ...]:
    """Find the neurons of a model, in the order of its modules.

    Args:
        model: Whole, or cut by :func:`narrow_layers`.
        sharding: Patterns to styles; colwise layers without a rowwise one behind them,
            and modules of other styles, stay whole.
        chains: Whether colwise layers feed each other, and the last of them the
            rowwise one.

    Raises:
        StrategyError: If there are none, or layers do not fit together.
    """
    columns: list[str] = []
    found: list[NeuronGroup] = []
    for fqn, style in styles_of_model(model, sharding).items():
        if style == "colwise":
            columns.append(fqn)
        elif style == "rowwise":
            if chains:
                _require_no_heads(model, columns)
                pairs = pairwise([*columns, fqn])
                found += [_group(model, [one], other) for one, other in pairs]
            else:
                found.append(_group(model, columns, fqn))
            columns = []
    if not found:
        raise StrategyError(
            f"sharding.patterns have no colwise layers with a rowwise one behind them "
            f"({len(sharding.patterns)} patterns), but copies train shares of the "
            f"neurons between such; give patterns, or use synchronisation=local_steps"
        )
    return tuple(found)


def _require_no_heads(model: nn.Module, columns: Sequence[str]) -> None:
    """Refuse layers of attention, none of which feeds the next."""
    for fqn in columns:
        around = model.get_submodule(fqn.rpartition(".")[0])
        if any(isinstance(getattr(around, name, None), int) for name in _HEAD_SIZES):
            raise StrategyError(
                f"{fqn} is a layer of attention, which is no chain; leave it out of "
                f"sharding.patterns, or use layers=pairs"
            )


def _group(model: nn.Module, columns: list[str], row: str) -> NeuronGroup:
    parameters = [part for fqn in columns for part in _cut(model, fqn, "colwise")]
    parameters += _cut(model, row, "rowwise")
    inner = _features(model, row, "rowwise")
    sizes = [_features(model, fqn, "colwise") for fqn in columns]
    around = model.get_submodule(columns[0].rpartition(".")[0]) if columns else model
    head = next(
        (size for name in _HEAD_SIZES if (size := getattr(around, name, None))), None
    )
    neurons = inner
    if isinstance(head, int) and not any(size % head for size in (*sizes, inner)):
        neurons = min(size // head for size in (*sizes, inner))
    elif len(columns) > _MOST_COLUMNS or set(sizes) != {inner}:
        raise StrategyError(
            f"{row} takes {inner} features, {', '.join(columns) or 'no layer'} make "
            f"{sizes}; neurons are features that one or two layers make one by one, or "
            f"heads of a module with head_dim; leave {row} out of sharding.patterns"
        )
    return NeuronGroup(layer=row, neurons=neurons, parameters=tuple(parameters))


def _features(model: nn.Module, fqn: str, style: str) -> int:
    weight = model.get_submodule(fqn).weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[_dim(model.get_submodule(fqn), fqn, style)]


def _dim(layer: nn.Module, fqn: str, style: str) -> int:
    """Dimension of a layer's weight along which neurons lie."""
    transposed = is_transposed(layer)
    if not transposed and not isinstance(layer, nn.Linear):
        raise StrategyError(
            f"{fqn} is {type(layer).__name__}, neurons are of nn.Linear and Conv1D "
            f"alone; leave it out of sharding.patterns"
        )
    return int((style == "rowwise") != transposed)


def _cut(model: nn.Module, fqn: str, style: str) -> Iterator[CutParameter]:
    layer = model.get_submodule(fqn)
    yield CutParameter(name=f"{fqn}.weight", dim=_dim(layer, fqn, style))
    if style == "colwise" and layer.bias is not None:
        yield CutParameter(name=f"{fqn}.bias", dim=0)


def narrow_layers(
    model: nn.Module,
    sharding: TensorSharding,
    copies: int,
    index: int,
    *,
    chains: bool = False,
) -> None:
    """Cut a model to one of equal runs of neurons of each group, in place.

    Args:
        model: Whole, equal on all ranks.
        sharding: Patterns to styles.
        copies: Number of runs.
        index: Which one to keep.
        chains: See :func:`find_groups`.

    Raises:
        StrategyError: If a number of neurons has not that divisor, or a parameter is
            another layer's, too.
    """
    if copies == 1:
        return
    groups = find_groups(model, sharding, chains=chains)
    require_unshared(model, groups)
    times = Counter(part.name for group in groups for part in group.parameters)
    for group in groups:
        if group.neurons % copies:
            divisors = [n for n in range(1, 65) if group.neurons % n == 0]
            raise StrategyError(
                f"dp_replicate={copies} does not divide the {group.neurons} neurons "
                f"before {group.layer}; use {', '.join(map(str, divisors))}"
            )
        for part in group.parameters:
            full = model.get_parameter(part.name)
            if times[part.name] > 1:
                holder = model.get_submodule(part.name.rpartition(".")[0])
                rows = full.detach().chunk(copies)[index].clone()
                holder.register_buffer(KEPT_ROWS, rows, persistent=False)
                times[part.name] = 0
            _keep(model, part, full, copies, index)


def require_unshared(model: nn.Module, groups: Sequence[NeuronGroup]) -> None:
    """Refuse groups of which a parameter is another layer's, too.

    Raises:
        StrategyError: If one is.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in groups:
        for part in group.parameters:
            shared = names[id(model.get_parameter(part.name))]
            if len(shared) > 1:
                raise StrategyError(
                    f"{' and '.join(shared)} are one parameter, of which a "
                    f"copy cannot hold a part; leave them out of sharding.patterns"
                )


def _keep(
    model: nn.Module, part: CutParameter, full: nn.Parameter, copies: int, index: int
) -> None:
    holder, _, leaf = part.name.rpartition(".")
    layer = model.get_submodule(holder)
    kept = full.detach().chunk(copies, part.dim)[index].clone()
    setattr(layer, leaf, nn.Parameter(kept, requires_grad=full.requires_grad))
    if leaf == "weight":
        # Conv1D shapes its output by what it remembers.
        sizes = ("nx", "nf") if is_transposed(layer) else _SIZES
        layer.__dict__.update(zip(sizes, kept.shape, strict=True))
