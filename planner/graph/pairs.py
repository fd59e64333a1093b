"""Pairs of linear layers that tensor parallelism splits without messages in between.

Within one unit: a linear layer whose output reaches other linear layers, and nothing
else that needs all of it, is ``colwise``; the layers reached are ``rowwise``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from planner.graph.ops import Flow, OpGraph

__all__ = ["PairStyle", "chain_linears", "linear_module", "pair_linears"]

PairStyle = Literal["colwise", "rowwise"]

#: Ops that need whole rows of features.
_NEEDS_ALL = frozenset(
    {
        "aten::native_layer_norm",
        "aten::native_group_norm",
        "aten::native_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::cudnn_batch_norm",
        "aten::_fused_rms_norm",
        "aten::rsqrt",
        "aten::mean",
        "aten::_log_softmax",
        "aten::topk",
    }
)
#: Ops that need all features, or all of a head's.
_MIXES = frozenset({"aten::_softmax", "aten::_safe_softmax"})
_ADDS = frozenset({"aten::add", "aten::add_"})
_PRODUCTS = frozenset({"linear", "transposed"})


def linear_module(graph: OpGraph, row: int) -> str | None:
    """Return the splittable module whose product or lookup an op is; None for none."""
    name = graph.modules[row]
    kind = graph.linear.get(name)
    if kind in _PRODUCTS and graph.kernels[row].kind == "matmul":
        return name
    if kind == "embedding" and graph.kernels[row].kind == "embedding":
        return name
    return None


class _Walk:
    """Ops that one linear layer's output reaches in its unit."""

    def __init__(
        self,
        graph: OpGraph,
        flow: Flow,
        readers: dict[int, list[int]],
        start: int,
        stop: int,
        norms_end: bool,
    ) -> None:
        self.graph = graph
        self.flow = flow
        self.readers = readers
        self.start = start
        self.stop = stop
        self.norms_end = norms_end

    def reach(self, row: int) -> tuple[set[int], bool]:
        """Return the linear layers reached, and True if an op needs all of it."""
        below = self._descendants(row)
        hits: set[int] = set()
        whole = False
        for other in below:
            if other == row:
                continue
            if other >= self.stop or self._needs_all(other, below):
                whole = True
            elif self._is_product_with_weights(other):
                whole = whole or linear_module(self.graph, other) is None
                hits.add(other)
        return hits, whole

    def between(self, row: int, features: int) -> list[int] | None:
        """Return the ops up to the layers reached; None if one mixes features."""
        found = sorted(
            other
            for other in self._descendants(row) - {row}
            if not self._is_product_with_weights(other)
        )
        for other in found:
            made = (self.graph.storage_tensor[i][0] for i in self.graph.outputs[other])
            weights = any(i < 0 for i in self.graph.inputs[other])
            mixes = weights or self.graph.names[other] in _MIXES
            if mixes or any(shape[-1:] != (features,) for shape in made):
                return None
        return found

    def _descendants(self, row: int) -> set[int]:
        """Return ops that depend on ``row``, up to products with weights."""
        seen, front = {row}, [row]
        while front:
            current = front.pop()
            for reader in self.readers.get(current, ()):
                if reader in seen:
                    continue
                seen.add(reader)
                if reader < self.stop and not self._is_product_with_weights(reader):
                    front.append(reader)
        return seen

    def _is_product_with_weights(self, row: int) -> bool:
        kernel = self.graph.kernels[row]
        return kernel.flops > 0 and any(i < 0 for i in self.graph.inputs[row])

    def _needs_all(self, row: int, below: set[int]) -> bool:
        name = self.graph.names[row]
        if name in _NEEDS_ALL:
            return self.norms_end
        if name not in _ADDS:
            return False
        # A residual, or a learned bias for each head, which every rank would add whole.
        made = {storage: writer for writer, storage in self.flow.reads[row]}
        return any(
            storage >= 0
            and made.get(storage, -1) not in below
            and storage not in self.flow.recomputable
            and not self._is_made_by_layers(made.get(storage, -1))
            for storage in self.graph.inputs[row]
        )

    def _is_made_by_layers(self, row: int) -> bool:
        """Return True if an op's inputs are other layers' features and nothing else.

        These are split with those that they are added to, or none are: the layers that
        both reach see to that.
        """
        front = [row]
        while front:
            current = front.pop()
            if current < self.start:
                return False
            if self._is_product_with_weights(current):
                if linear_module(self.graph, current) is None:
                    return False
                continue
            if self.graph.names[current] in _NEEDS_ALL:
                return False
            front.extend(writer for writer, _ in self.flow.reads[current])
            if not self.flow.reads[current]:
                return False
        return True


def pair_linears(
    graph: OpGraph,
    flow: Flow,
    start: int,
    stop: int,
    allowed: Mapping[str, str] | None = None,
) -> list[dict[int, PairStyle]]:
    """Find linear layers among the ops [start, stop) of one unit that can be split.

    Args:
        graph: All forward ops.
        flow: Data dependences.
        start: First op of the unit.
        stop: Op after its last.
        allowed: Style that each module may have, if any; None for either.

    Returns:
        Groups of layers that are split together or not at all, row of the product to
        style, in program order.
    """

    def may(row: int, style: PairStyle) -> bool:
        return allowed is None or allowed.get(graph.modules[row]) == style

    layers = [
        row
        for row in range(start, stop)
        if linear_module(graph, row) and graph.kernels[row].kind == "matmul"
    ]
    readers = _readers(graph, flow, start, stop)
    # A norm over the features of each head may stand where a model proposes a split.
    walk = _Walk(graph, flow, readers, start, stop, norms_end=allowed is None)
    reached = {row: walk.reach(row) for row in layers}
    into: dict[int, set[int]] = {}
    for row, (hits, _) in reached.items():
        for hit in hits:
            into.setdefault(hit, set()).add(row)
    columns: set[int] = set()
    rows: set[int] = set()
    for row in layers:
        hits, whole = reached[row]
        if not hits or whole or row in rows or not may(row, "colwise"):
            continue
        if not all(may(hit, "rowwise") for hit in hits):
            continue
        # Each layer reached must be fed by splittable layers alone.
        if all(hit not in columns and not into[hit] & rows for hit in hits):
            columns.add(row)
            rows |= hits
    rows = {hit for hit in rows if into[hit] <= columns}
    columns = {row for row in columns if reached[row][0] <= rows}
    rows = {hit for hit in rows if into[hit] <= columns}
    together = {row: reached[row][0] for row in layers if row in columns}
    return [
        {
            row: "colwise" if row in columns else "rowwise"
            for row in sorted(group)
            if row in columns or row in rows
        }
        for group in _joined(together)
    ]


def chain_linears(graph: OpGraph, flow: Flow) -> list[list[tuple[int, list[int]]]]:
    """Find chains of linear layers, each of which makes the features of the next.

    Nothing between two layers of a chain mixes features, reads weights or adds what
    comes from elsewhere; products with what has no weights, such as an adjacency
    matrix, may lie there. Layers of a chain are listed in their order by the model,
    and no layer of another chain lies between them there.

    Args:
        graph: All forward ops.
        flow: Data dependences.

    Returns:
        Chains of two layers or more: row of each product, and rows of the ops from it
        to the next one.
    """
    rows = [
        row
        for row in range(len(graph))
        if linear_module(graph, row) and graph.kernels[row].kind == "matmul"
    ]
    calls = Counter(graph.modules[row] for row in rows)
    readers = _readers(graph, flow, 0, len(graph))
    walk = _Walk(graph, flow, readers, 0, len(graph), norms_end=True)
    reached = {row: walk.reach(row) for row in rows}
    fed = Counter(hit for hits, _ in reached.values() for hit in hits)
    following: dict[int, tuple[int, list[int]]] = {}
    for row, (hits, whole) in reached.items():
        features = graph.kernels[row].n
        between = walk.between(row, features)
        for hit in hits if len(hits) == 1 and between is not None else ():
            once = calls[graph.modules[row]] == calls[graph.modules[hit]] == 1
            fits = graph.kernels[hit].k == features and fed[hit] == 1
            if once and fits and not whole and between is not None:
                following[row] = hit, between
    followers = {hit for hit, _ in following.values()}
    chains = []
    for row in following:
        if row not in followers:
            chain = []
            while row in following:
                chain.append((row, following[row][1]))
                row = following[row][0]
            chains.append([*chain, (row, [])])
    return _in_listed_order(graph, chains)


def _in_listed_order(
    graph: OpGraph, chains: list[list[tuple[int, list[int]]]]
) -> list[list[tuple[int, list[int]]]]:
    """Return chains whose layers the model lists one behind the other."""
    places = {
        tensor.name.rpartition(".")[0]: place
        for place, tensor in enumerate(graph.parameters)
    }
    found: list[list[tuple[int, list[int]]]] = []
    last = -1
    listed = [[places.get(graph.modules[r], -1) for r, _ in c] for c in chains]
    for at, chain in sorted(zip(listed, chains, strict=True), key=lambda one: one[0]):
        if at == sorted(at) and at[0] > last:
            found.append(chain)
            last = at[-1]
    return found


def _joined(together: Mapping[int, set[int]]) -> list[set[int]]:
    """Join sets of rows that share a row, so that each row is in one."""
    groups: list[set[int]] = []
    for row, others in together.items():
        fresh = {row, *others}
        apart = [group for group in groups if not group & fresh]
        for group in groups:
            if group & fresh:
                fresh |= group
        groups = [*apart, fresh]
    return sorted(groups, key=min)


def _readers(graph: OpGraph, flow: Flow, start: int, stop: int) -> dict[int, list[int]]:
    """Return the readers of each op of a unit; ``stop`` stands for later units."""
    found: dict[int, list[int]] = {}
    for row in range(start, stop):
        for writer, _ in flow.reads[row]:
            if writer >= start:
                found.setdefault(writer, []).append(row)
    inside = {storage for row in range(start, stop) for storage in graph.outputs[row]}
    for row in range(stop, len(graph)):
        for writer, storage in flow.reads[row]:
            if storage in inside and start <= writer < stop:
                found.setdefault(writer, []).append(stop)
    return found
