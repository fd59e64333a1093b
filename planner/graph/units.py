"""Pipeline units and blocks: the runs of ops that a model is divided into.

A pipeline stage holds whole units. A unit is an element of a list of modules
(``model.layers.3``) or a module beside such lists (``model.embed_tokens``). Units and
blocks are runs of program order, so that the graph between them has no cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.graph.ops import Flow, OpGraph, read_flow

__all__ = ["MAX_UNITS", "Structure", "find_structure", "prefixes", "run_bounds"]

#: Most units of a model that has no list of modules.
MAX_UNITS = 256
#: A module without lists is split into its children while it holds more than this
#: share of the work.
_SPLIT_SHARE = 1 / 16


def prefixes(name: str) -> list[str]:
    """Return ``["a", "a.b", "a.b.c"]`` for ``a.b.c``, and nothing for the root."""
    if not name:
        return []
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def run_bounds(labels: Sequence[str]) -> list[tuple[int, int]]:
    """Return the half-open ranges of equal neighbours."""
    starts = [i for i in range(len(labels)) if not i or labels[i] != labels[i - 1]]
    return list(zip(starts, [*starts[1:], len(labels)], strict=True))


def _contiguous(labels: list[str], work: np.ndarray) -> list[str]:
    """Give every op a label such that equal labels are neighbours.

    Ops without a label ("") join the run before them, leading ones the run after. Where
    a label has several runs, the run with most work keeps it; the others join the run
    that follows if that one is kept, else the one before.
    """
    filled: list[str] = []
    first = next((label for label in labels if label), "")
    for label in labels:
        filled.append(label or (filled[-1] if filled else first))
    runs = run_bounds(filled)
    total = np.concatenate([[0.0], np.cumsum(work)])
    best: dict[str, int] = {}
    for index, (start, stop) in enumerate(runs):
        name, size = filled[start], total[stop] - total[start]
        if name not in best or size > np.diff(total[list(runs[best[name]])])[0]:
            best[name] = index
    kept = [best[filled[start]] == index for index, (start, _) in enumerate(runs)]
    if all(kept):
        return filled
    owner = ""
    for index, (start, stop) in enumerate(runs):
        if kept[index]:
            owner = filled[start]
            continue
        follows = index + 1 < len(runs) and kept[index + 1]
        name = filled[runs[index + 1][0]] if follows or not owner else owner
        filled[start:stop] = [name] * (stop - start)
    return filled if filled == labels else _contiguous(filled, work)


class _Tree:
    """Tree of module names, with the parameters below each."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.executed = {p for name in set(graph.modules) for p in prefixes(name)}
        self.has_parameters = {
            p
            for tensor in graph.parameters
            for name in (tensor.name, *tensor.aliases)
            for p in prefixes(name.rpartition(".")[0])
        }
        self.shapes: dict[str, list[tuple[int, ...]]] = {}
        for tensor in graph.parameters:
            for prefix in prefixes(tensor.name.rpartition(".")[0]):
                self.shapes.setdefault(prefix, []).append(tensor.shape)
        self.read_around = _read_around(graph)
        self.called = graph.called - self.read_around - _called_around(graph)

    def elements(self, name: str) -> list[str]:
        """Return the executed elements of a list of modules.

        Where an element is not called itself, as a list in a list is not, the
        outermost modules in it that are stand for it: hooks run on no other.
        """
        found: list[str] = []
        for child in self.graph.children.get(name, ()):
            if child in self.executed and child not in self.read_around:
                found += [child] if self.is_called(child) else self.elements(child)
        return found

    def is_called(self, name: str) -> bool:
        """Return True if hooks on a module run whenever its parameters are read."""
        return name in self.called

    def is_composite(self, name: str) -> bool:
        """Return True if a module holds more than a single layer or a row of layers."""
        children = self.graph.children.get(name, ())
        if self.graph.module_types.get(name) != "Sequential":
            return bool(children)
        return any(self.graph.children.get(child) for child in children)

    def is_list(self, name: str) -> bool:
        return name in self.graph.module_lists and len(self.elements(name)) > 1

    def _inner_lists(self, name: str) -> bool:
        """Return True if a list of modules with children is executed below ``name``."""
        for child in self.graph.children.get(name, ()):
            if self.is_list(child) and any(
                self.graph.children.get(element) for element in self.elements(child)
            ):
                return True
            if self._inner_lists(child):
                return True
        return False

    def list_elements(self, name: str = "") -> list[str]:
        """Return the outermost elements of lists of modules.

        A short list of unequal stages that hold lists themselves is entered, so that
        the units are the layers and not the stages.
        """
        found: list[str] = []
        if self.is_list(name):
            elements = self.elements(name)
            shapes = [tuple(self.shapes.get(element, ())) for element in elements]
            unequal = len(set(shapes)) == len(shapes)
            if not (unequal and any(self._inner_lists(e) for e in elements)):
                return elements
        for child in self.graph.children.get(name, ()):
            if child in self.executed:
                found.extend(self.list_elements(child))
        return found


def _read_around(graph: OpGraph) -> set[str]:
    """Modules with a parameter that code reads which is not called through them."""
    owners = [
        [name.rpartition(".")[0] for name in (tensor.name, *tensor.aliases)]
        for tensor in graph.parameters
    ]
    found: set[str] = set()
    for module, read in {
        (module, storage)
        for module, storages in zip(graph.modules, graph.inputs, strict=True)
        for storage in storages
        # Scalars are whole on every rank.
        if storage < 0 and graph.parameters[-1 - storage].shape
    }:
        within = {"", *prefixes(module)}
        held = owners[-1 - read]
        if not within & set(held):
            found.update(
                p for owner in held for p in prefixes(owner) if p not in within
            )
    return found


def _called_around(graph: OpGraph) -> set[str]:
    """Modules of which a part with weights is called by others."""
    held = {p for t in graph.parameters for p in prefixes(t.name.rpartition(".")[0])}
    return {holder for part, holder in graph.around if part in held}


def _work(graph: OpGraph) -> np.ndarray:
    """Return a measure of each op's cost: FLOPs, and a little for bytes. [ops]."""
    flops = np.array([kernel.flops for kernel in graph.kernels])
    work: np.ndarray = flops + graph.backward_flops + 1e-3 * graph.forward_bytes
    return work


def _by_lists(tree: _Tree, elements: list[str]) -> Callable[[str], str]:
    """Return a function from module to unit, for models with lists of modules."""
    inside = set(elements)
    above = {p for element in elements for p in prefixes(element)[:-1]}

    def unit(name: str) -> str:
        for prefix in prefixes(name):
            if prefix in inside:
                return prefix if prefix in tree.has_parameters else ""
            if prefix in above:
                continue
            if prefix in tree.read_around:
                return ""
            if prefix in tree.has_parameters and tree.is_called(prefix):
                return prefix
        return ""

    return unit


def _by_work(tree: _Tree, work: np.ndarray) -> Callable[[str], str]:
    """Return a function from module to unit, for models without lists of modules.

    Units are modules with a bounded share of the work.
    """
    share: dict[str, float] = {}
    for name, cost in zip(tree.graph.modules, work.tolist(), strict=True):
        for prefix in prefixes(name):
            share[prefix] = share.get(prefix, 0.0) + cost
    limit = _SPLIT_SHARE * float(work.sum())

    def unit(name: str) -> str:
        best = ""
        for prefix in prefixes(name):
            if prefix not in tree.has_parameters:
                break
            best = prefix if tree.is_called(prefix) else best
            children = tree.graph.children.get(prefix, ())
            splits = any(child in tree.has_parameters for child in children)
            if share.get(prefix, 0.0) <= limit or not splits:
                break
        return best

    return unit


def _cut_sizes(graph: OpGraph) -> np.ndarray:
    """Return the bytes alive between each op and the next. Shape [ops - 1].

    A tensor is alive from the op that makes it to the last one that reads it.
    """
    steps = np.zeros(len(graph) + 1)
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for row, (reads, writes) in enumerate(
        zip(graph.inputs, graph.outputs, strict=True)
    ):
        for storage in reads:
            last[storage] = row
        for storage in writes:
            made.setdefault(storage, row)
    for storage, row in made.items():
        until = last.get(storage, row)
        steps[row] += graph.storage_bytes[storage]
        steps[until] -= graph.storage_bytes[storage]
    return np.cumsum(steps)[: max(0, len(graph) - 1)]


def _merged(labels: list[str], graph: OpGraph, most: int) -> list[str]:
    """Join neighbours at the most expensive cuts until ``most`` units are left."""
    runs = run_bounds(labels)
    if len(runs) <= most:
        return labels
    cuts = _cut_sizes(graph)
    inner = np.array([start - 1 for start, _ in runs[1:]])
    cheapest = set(inner[np.argsort(cuts[inner], kind="stable")[: most - 1]].tolist())
    merged, name = list(labels), labels[0]
    for row in range(1, len(labels)):
        if row - 1 in cheapest:
            name = labels[row]
        merged[row] = name
    return merged


def _assign_units(graph: OpGraph) -> tuple[list[str], frozenset[str]]:
    """Return the unit of every op.

    Ops that run outside any unit (the parent's own forward, the loss) join the unit
    before them, the first ones the unit after them.

    Returns:
        FQN of the unit of each op, contiguous; and the units that are elements of a
        list of modules.
    """
    tree = _Tree(graph)
    work = _work(graph)
    elements = tree.list_elements()
    unit = _by_lists(tree, elements) if elements else _by_work(tree, work)
    of_module = {name: unit(name) for name in set(graph.modules)}
    labels = _contiguous([of_module[name] for name in graph.modules], work)
    if not elements:
        labels = _merged(labels, graph, MAX_UNITS)
    return labels, frozenset(elements)


def _assign_blocks(graph: OpGraph, units: list[str]) -> list[str]:
    """Return the block of every op, by the children of its unit's module.

    A unit whose children are all single layers, or rows of them, is one block;
    otherwise each child with parameters is one, and ops in between join the block
    before them.
    """
    tree = _Tree(graph)
    work = _work(graph)
    blocks: list[str] = []
    for start, stop in run_bounds(units):
        name = units[start]
        children = _callable_children(tree, name)
        if not any(tree.is_composite(child) for child in children):
            blocks.extend([name] * (stop - start))
            continue
        chosen = set(children)
        labels = [
            next((p for p in prefixes(module) if p in chosen), "")
            for module in graph.modules[start:stop]
        ]
        blocks.extend(
            _contiguous(labels, work[start:stop])
            if any(labels)
            else [name] * len(labels)
        )
    return blocks


def _callable_children(tree: _Tree, name: str) -> list[str]:
    """Return executed children with parameters; elements, for a list of modules."""
    found: list[str] = []
    for child in tree.graph.children.get(name, ()):
        if child not in tree.executed or child not in tree.has_parameters:
            continue
        if tree.graph.module_types.get(child) == "ModuleList":
            found.extend(_callable_children(tree, child))
        else:
            found.append(child)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Units and blocks of a model, and the data dependences of its ops.

    Attributes:
        units: FQN of the unit of each op.
        blocks: FQN of the block of each op.
        bounds: Half-open range of ops of each block.
        elements: Units that are elements of a list of modules.
        flow: Data dependences between ops.
    """

    units: list[str]
    blocks: list[str]
    bounds: list[tuple[int, int]]
    elements: frozenset[str]
    flow: Flow


def find_structure(graph: OpGraph) -> Structure:
    """Divide a model's ops into units, and each unit into blocks."""
    units, elements = _assign_units(graph)
    blocks = _assign_blocks(graph, units)
    keys = [f"{unit}\0{block}" for unit, block in zip(units, blocks, strict=True)]
    return Structure(
        units=units,
        blocks=blocks,
        bounds=run_bounds(keys),
        elements=elements,
        flow=read_flow(graph),
    )
