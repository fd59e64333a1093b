"""Modules that tensor parallelism may divide.

Styles come from the model's Hugging Face plan where its config has one, otherwise
from the traced dataflow: a linear layer whose output reaches other linear layers of
its unit, without crossing a norm or a residual add, is ``colwise``, the reached ones
are ``rowwise`` (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Only linear layers
(``nn.Linear``, and transformers' ``Conv1D`` with its transposed weight) and
``nn.Embedding`` are given a style, and only if a rehearsal finds that the ops between a
pair work with any number of features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.graph.model import Block, Parameter
from planner.graph.ops import OpGraph
from planner.graph.pairs import (
    PairStyle,
    chain_linears,
    linear_module,
    pair_linears,
)
from planner.graph.regions import Region, read_region
from planner.graph.units import Structure, run_bounds

__all__ = [
    "Roles",
    "Trial",
    "chain_roles",
    "infer_roles",
    "parallel_dims",
    "with_config_heads",
]

Style = Literal["colwise", "rowwise", "vocab", "replicated", "region"]
OpStyle = Literal["colwise", "rowwise", "local", "stream", "none", "both"]
ParameterStyle = Literal["colwise", "rowwise", "vocab", "none", "both"]
#: Layers that are split together, each with its style.
_Group = dict[str, PairStyle]
#: Function from groups of paired layers to the reason why each cannot be divided, None
#: if it can.
Trial = Callable[[Sequence[Mapping[str, PairStyle]]], Sequence[str | None]]

_PARAMETER_STYLES: dict[str, ParameterStyle] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "vocab": "vocab",
}
#: Styles of Hugging Face by their name here; the others are left out.
_FROM_HUGGING_FACE: dict[str, Style] = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "vocab",
    "vocab": "vocab",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Tensor-parallel roles of the ops and parameters of a model.

    Attributes:
        ops: Style of each op; see :class:`planner.graph.Kernel`.
        parameters: Style of each parameter, by index.
        divided: Storages that tp divides.
        gathered: Storages that colwise layers read, whole on every rank.
        collectives: Op to the bytes of the all-reduce that its output needs.
        patterns: Pattern of module names to style.
        whole: Pattern of the names of paired layers that cannot be split, to the
            reason.
        open: Patterns of modules around colwise layers that sequence parallelism may
            not enter as a whole: activations pass their sums by.
    """

    ops: list[OpStyle]
    parameters: list[ParameterStyle]
    divided: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    collectives: Mapping[int, float] = field(default_factory=dict)
    patterns: Mapping[str, Style] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()


@dataclass(slots=True)
class _UnitRoles:
    """Roles within one unit, by position, so that equal units share them."""

    ops: list[OpStyle]
    divided: list[tuple[int, int]] = field(default_factory=list)
    gathered: list[tuple[int, int]] = field(default_factory=list)
    collectives: dict[int, float] = field(default_factory=dict)


def _expression(pattern: str) -> re.Pattern[str]:
    """Return an expression for dotted names in which ``*`` is one component."""
    parts = ("[^.]+" if p == "*" else re.escape(p) for p in pattern.split("."))
    return re.compile(r"\.".join(parts))


def _given_styles(graph: OpGraph, given: Mapping[str, str]) -> dict[str, Style]:
    """Return the style of each module by a Hugging Face plan."""
    found: dict[str, Style] = {}
    for pattern, style in given.items():
        mapped = _FROM_HUGGING_FACE.get(style)
        if mapped is None:
            continue
        expression = _expression(pattern)
        for name, kind in graph.linear.items():
            if not expression.fullmatch(name):
                continue
            if kind == "embedding":
                found[name] = "vocab"
            elif mapped != "vocab":
                found[name] = mapped
    return found


@dataclass(slots=True, kw_only=True)
class _Found:
    """Paired layers of all units.

    Attributes:
        styles: Module, or parameter that is whole within a region, to style.
        whole: Module to the reason why it cannot be split.
        open: Modules around layers that sequence parallelism may not enter.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)


def _paired_styles(
    graph: OpGraph,
    structure: Structure,
    given: Mapping[str, Style],
    trial: Trial | None,
) -> _Found:
    """Find the layers of each distinct unit that tp splits, from the dataflow.

    Args:
        graph: All forward ops.
        structure: Units and data dependences.
        given: Styles that the model proposes; empty to try all layers.
        trial: Rehearsal of each group.
    """
    known: dict[tuple[object, ...], tuple[str, list[_Group], list[Region]]] = {}
    units: list[tuple[str, tuple[object, ...]]] = []
    for start, stop in run_bounds(structure.units):
        key: tuple[object, ...] = (
            *graph.origin[start:stop],
            *_styles_inside(graph, given, start, stop),
        )
        if key not in known:
            made = pair_linears(graph, structure.flow, start, stop, given or None)
            named = [{graph.modules[r]: s for r, s in group.items()} for group in made]
            regions = [
                read_region(graph, structure.flow, group, start, stop) for group in made
            ]
            known[key] = (structure.units[start], named, regions)
        units.append((structure.units[start], key))
    groups = [group for _, named, _ in known.values() for group in named]
    answers = iter(trial(groups) if trial is not None else [None] * len(groups))
    reasons = {
        key: [next(answers) or region.violation for region in regions]
        for key, (_, _, regions) in known.items()
    }
    found = _Found()
    for name, key in units:
        first, named, regions = known[key]

        def twin(other: str, first: str = first, name: str = name) -> str:
            return name + other[len(first) :] if other.startswith(first) else other

        for group, region, reason in zip(named, regions, reasons[key], strict=True):
            if reason is not None:
                found.whole.update(dict.fromkeys(map(twin, group), reason))
                continue
            found.styles.update({twin(module): s for module, s in group.items()})
            for index in region.replicated:
                found.styles[twin(graph.parameters[index].name)] = "replicated"
            if region.module is not None:
                found.styles[twin(region.module)] = "region"
            columns = [m for m, style in group.items() if style == "colwise"]
            around = {twin(m).rpartition(".")[0] for m in columns}
            # Layers directly in a unit are entered one by one.
            if not region.closed and not any(_inside(name, m) for m in around):
                found.open.update(around)
    return found


def _unpaired_styles(
    graph: OpGraph,
    structure: Structure,
    given: Mapping[str, Style],
    found: _Found,
) -> dict[str, Style]:
    """Return proposed styles of layers without a partner: embeddings, and heads.

    A head's output is gathered, or stays split for the loss. A unit with pairs has no
    head: what its colwise layers make stays split.
    """
    unit_of = dict(zip(graph.modules, structure.units, strict=True))
    pairs = {*found.whole, *found.styles}
    taken = {unit_of.get(module) for module in pairs}
    return {
        module: style
        for module, style in given.items()
        if style == "vocab"
        or (style == "colwise" and unit_of.get(module, "") not in taken)
    }


def _inside(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _without_broken_ties(graph: OpGraph, styles: dict[str, Style]) -> dict[str, Style]:
    """Drop the styles of weights that are tied to a module without the same split."""
    kept = dict(styles)
    for tensor in graph.parameters:
        names = {name.rpartition(".")[0] for name in (tensor.name, *tensor.aliases)}
        rows = {styles.get(name) in {"colwise", "vocab"} for name in names}
        if len(names) > 1 and len(rows) > 1:
            for name in names:
                kept.pop(name, None)
    return kept


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _patterns(graph: OpGraph, styles: Mapping[str, Style]) -> dict[str, Style]:
    """Return patterns that match exactly the names that have a style."""
    groups: dict[str, list[str]] = {}
    parameters = (name for p in graph.parameters for name in (p.name, *p.aliases))
    for name in dict.fromkeys([*graph.linear, *graph.module_types, *parameters]):
        groups.setdefault(_pattern(name), []).append(name)
    made: dict[str, Style] = {}
    for pattern, names in groups.items():
        given = {styles.get(name) for name in names}
        only = given.pop()
        if not given:
            if only is not None:
                made[pattern] = only
        else:
            made.update({name: styles[name] for name in names if name in styles})
    return made


def infer_roles(
    graph: OpGraph,
    structure: Structure,
    given: Mapping[str, str],
    trial: Trial | None = None,
    *,
    trusted: bool = False,
) -> Roles:
    """Find the tensor-parallel role of every op and parameter.

    Args:
        graph: All forward ops.
        structure: Units, blocks and data dependences.
        given: Hugging Face's plan, pattern to style; empty if there is none.
        trial: Rehearsal of each group; None to take them without one.
        trusted: Take the given styles as they are.
    """
    proposed = _given_styles(graph, given)
    if trusted and proposed:
        found = _Found(styles=proposed)
    else:
        found = _paired_styles(graph, structure, proposed, trial)
    styles = _unpaired_styles(graph, structure, proposed, found) | found.styles
    styles = _without_broken_ties(graph, styles)
    ops: list[OpStyle] = []
    divided: set[int] = set()
    gathered: set[int] = set()
    collectives: dict[int, float] = {}
    known: dict[tuple[object, ...], _UnitRoles] = {}
    for start, stop in run_bounds(structure.units):
        key = (*graph.origin[start:stop], *_styles_inside(graph, styles, start, stop))
        if key not in known:
            known[key] = _unit_roles(graph, structure, styles, start, stop)
        roles = known[key]
        ops.extend(roles.ops)
        divided.update(graph.outputs[start + row][at] for row, at in roles.divided)
        gathered.update(graph.inputs[start + row][at] for row, at in roles.gathered)
        collectives.update(
            {start + row: size for row, size in roles.collectives.items()}
        )
    return Roles(
        ops=ops,
        parameters=_parameter_styles(graph, styles),
        divided=frozenset(divided),
        gathered=frozenset(gathered),
        collectives=collectives,
        patterns=_patterns(graph, styles),
        whole={_pattern(name): reason for name, reason in found.whole.items()},
        open=tuple(dict.fromkeys(map(_pattern, sorted(found.open)))),
    )


def chain_roles(graph: OpGraph, structure: Structure) -> Roles:
    """Find the roles of a model of which the features of hidden layers are divided.

    The first layer of a chain is divided along its outputs, the last along its inputs,
    those between along both: nothing is sent between them. Their pattern is
    ``colwise``.

    Args:
        graph: All forward ops.
        structure: Units, blocks and data dependences.
    """
    ops: list[OpStyle] = ["none"] * len(graph)
    divided: set[int] = set()
    styles: dict[str, Style] = {}
    inner: set[str] = set()
    for chain in chain_linears(graph, structure.flow):
        for at, (row, between) in enumerate(chain):
            last = at == len(chain) - 1
            ops[row] = "rowwise" if last else "both" if at else "colwise"
            styles[graph.modules[row]] = "rowwise" if last else "colwise"
            inner |= {graph.modules[row]} if at and not last else set()
            for other in between:
                ops[other] = "local"
            for one in () if last else (row, *between):
                made = graph.outputs[one]
                divided |= {s for s in made if graph.storage_tensor[s][0]}
    parameters = _parameter_styles(graph, styles)
    for index, tensor in enumerate(graph.parameters):
        module, _, leaf = tensor.name.rpartition(".")
        if module in inner and leaf == "weight":
            parameters[index] = "both"
    return Roles(
        ops=ops,
        parameters=parameters,
        divided=frozenset(divided),
        patterns=_patterns(graph, styles),
    )


def _styles_inside(
    graph: OpGraph, styles: Mapping[str, Style], start: int, stop: int
) -> tuple[Style | None, ...]:
    names = dict.fromkeys(graph.modules[start:stop])
    return tuple(styles.get(name) for name in names if name in graph.linear)


def _parameter_styles(
    graph: OpGraph, styles: Mapping[str, Style]
) -> list[ParameterStyle]:
    found: list[ParameterStyle] = []
    for tensor in graph.parameters:
        module, _, leaf = tensor.name.rpartition(".")
        style = styles.get(module)
        # The bias of a rowwise layer is added after the all-reduce, by every rank.
        whole = style is None or (style == "rowwise" and leaf == "bias")
        found.append("none" if whole else _PARAMETER_STYLES.get(style or "", "none"))
    return found


def _unit_roles(
    graph: OpGraph,
    structure: Structure,
    styles: Mapping[str, Style],
    start: int,
    stop: int,
) -> _UnitRoles:
    """Follow the outputs of colwise layers up to the rowwise layers that read them."""
    roles = _UnitRoles(ops=["none"] * (stop - start))
    divided: set[int] = set()
    active: set[str] = set()
    for row in range(start, stop):
        module = linear_module(graph, row)
        style = styles.get(module) if module else None
        at = row - start
        if style in {"rowwise", "vocab"}:
            roles.ops[at] = "rowwise"
            size = sum(graph.storage_bytes[i] for i in graph.outputs[row])
            roles.collectives[at] = float(size)
            active.add(structure.blocks[row])
            continue
        taken = any(i in divided for i in graph.inputs[row])
        if style != "colwise" and not taken:
            continue
        roles.ops[at] = "colwise" if style == "colwise" else "local"
        active.add(structure.blocks[row])
        if style == "colwise":
            roles.gathered += [
                (at, position)
                for position, storage in enumerate(graph.inputs[row])
                if storage >= 0 and storage not in divided
            ]
        for position, storage in enumerate(graph.outputs[row]):
            if graph.storage_tensor[storage][0]:
                divided.add(storage)
                roles.divided.append((at, position))
    _mark_stream(graph, structure, roles, active, start)
    return roles


def _mark_stream(
    graph: OpGraph,
    structure: Structure,
    roles: _UnitRoles,
    active: set[str],
    start: int,
) -> None:
    """Mark ops on the residual stream: in blocks that tp divides or without products.

    A block whose products tp leaves whole is computed whole by every rank.
    """
    whole = {
        structure.blocks[start + at]
        for at in range(len(roles.ops))
        if graph.kernels[start + at].flops
        and structure.blocks[start + at] not in active
    }
    for at, style in enumerate(roles.ops):
        row = start + at
        if style != "none" or structure.blocks[row] in whole:
            continue
        if graph.kernels[row].flops:
            continue
        made = graph.outputs[row]
        if any(storage not in structure.flow.recomputable for storage in made):
            roles.ops[at] = "stream"


def with_config_heads(
    blocks: Sequence[Block], dims: Mapping[str, int]
) -> tuple[Block, ...]:
    """Set the number of key and value heads before repetition, from the config."""
    heads, shared = dims.get("num_heads"), dims.get("num_key_value_heads")
    if not heads or not shared or shared >= heads:
        return tuple(blocks)
    return tuple(
        replace(
            block,
            kv_heads=shared,
            sequence_bytes=block.sequence_bytes * shared / heads,
        )
        if block.heads == block.kv_heads == heads
        else block
        for block in blocks
    )


def _common(values: Iterable[int]) -> int:
    """Return the largest number that divides all; 0 for none."""
    return math.gcd(*values)


def parallel_dims(
    blocks: Sequence[Block],
    parameters: Sequence[Parameter],
    transposed: Collection[str] = (),
) -> tuple[dict[str, int], int]:
    """Return the sizes that tp must divide, and the number of experts of a layer.

    Only modules that a style splits count: experts that every tp rank holds whole may
    have any size.

    Args:
        blocks: Blocks with heads and kernels' styles.
        parameters: Parameters with styles.
        transposed: FQNs of linear layers whose weight is [in, out].
    """
    found: dict[str, int] = {}
    split = [
        block
        for block in blocks
        if block.heads and any(k.style == "colwise" for k in block.kernels)
    ]
    if split:
        found["num_heads"] = _common(block.heads for block in split)
        found["num_key_value_heads"] = _common(block.kv_heads for block in split)
    attention = {block.index for block in split}
    # Rows of a weight are its outputs, columns its inputs, or the other way round.
    sides = {"colwise": (0,), "rowwise": (1,), "both": (0, 1)}
    products = [
        (p, p.shape[side ^ (p.name.rpartition(".")[0] in transposed)])
        for p in parameters
        if p.style in sides and len(p.shape) == 2 and p.block not in attention
        for side in sides[p.style]
    ]
    heads = [size for p, size in products if blocks[p.block].kind == "head"]
    inner = [(p, size) for p, size in products if blocks[p.block].kind != "head"]
    for name, expert in (("intermediate_size", False), ("moe_intermediate_size", True)):
        sizes = [size for p, size in inner if p.expert is expert]
        if sizes:
            found[name] = _common(sizes)
    rows = [p.shape[0] for p in parameters if p.style == "vocab"]
    if rows or heads:
        found["vocab_size"] = _common([*rows, *heads])
    stacked = {p.shape[0] for p in parameters if p.expert and len(p.shape) == 3}
    return found, max(stacked, default=0) or _numbered_experts(parameters)


def _numbered_experts(parameters: Sequence[Parameter]) -> int:
    """Return the number of experts of a layer that holds them as a list of modules."""
    numbers = [
        int(match.group(1))
        for p in parameters
        if p.expert and (match := re.search(r"experts\.(\d{1,9})\.", p.name))
    ]
    return max(numbers, default=-1) + 1
