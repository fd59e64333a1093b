"""A loop over experts, and the grouped products that stand in for it.

Recognised is transformers' loop over experts whose weights are stacked: of each expert
the tokens that chose it are gathered, go through its layers, are weighted and added to
the output. Grouped products sort tokens by expert once, and each layer is one kernel
over all experts. All choices of all tokens are computed, however many experts a loop
met on stand-in values.
Source: transformers 5, integrations/moe.py, grouped_mm_experts_forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.block_sums import EXPERTS
from planner.graph.ops import KernelCost
from planner.graph.rewriting import NewOp, OpIndex, Rewrite

__all__ = ["grouped_experts"]

#: Bytes of an index.
_INDEX = 8.0
_GATHERS = frozenset({"aten::index", "aten::index_select"})
_ADDS = frozenset({"aten::index_add_", "aten::index_add"})


def grouped_experts(index: OpIndex) -> Iterator[Rewrite]:
    """Yield a rewrite for each loop over experts."""
    graph = index.graph
    for start, stop in index.structure.bounds:
        modules: dict[str, list[int]] = {}
        for row in range(start, stop):
            found = EXPERTS.search(graph.modules[row])
            if found:
                name = graph.modules[row][: found.end()].rstrip(".")
                modules.setdefault(name, []).append(row)
        for rows in modules.values():
            loop = _Loop.of(index, rows)
            if loop is not None:
                yield loop.rewrite()


@dataclass(slots=True)
class _Loop:
    """The loop over the experts of a layer.

    Attributes:
        index: Of the graph.
        rows: All ops of the module.
        first: Those of one expert, from the gathering of its tokens on.
        products: Those of them that are products with experts' weights.
        hidden: Storage that tokens are gathered from.
        chosen: Storage of the experts' numbers that the router chose.
        weights: Storage of the router's weights.
        out: Storage of the output.
        experts: Number of experts.
    """

    index: OpIndex
    rows: list[int]
    first: list[int]
    products: list[int]
    hidden: int
    chosen: int
    weights: int
    out: int
    experts: int
    ops: list[NewOp] = field(default_factory=list)

    @classmethod
    def of(cls, index: OpIndex, rows: list[int]) -> _Loop | None:
        """Return the loop that ops of a module are; None if they are none."""
        graph = index.graph
        products = [row for row in rows if index.is_product(row, weighted=True)]
        read = [min(graph.inputs[row]) for row in products]
        again = [at for at, weight in enumerate(read) if weight == read[0]]
        if len(again) < 2:
            return None
        products = products[: again[1]]
        start = index.maker(max(graph.inputs[products[0]]))
        end = next(
            (r for r in rows if r > products[-1] and graph.names[r] in _ADDS), None
        )
        shape = graph.parameters[-1 - read[0]].shape
        if start is None or end is None or len(shape) != 3:
            return None
        if graph.names[start] not in _GATHERS or start not in rows:
            return None
        weights = _weights(index, [r for r in rows if start < r < end])
        chosen = _chosen(index, rows[0])
        (out,) = graph.outputs[end]
        if weights is None or chosen is None or not index.is_closed(set(rows), {out}):
            return None
        return cls(
            index=index,
            rows=rows,
            first=[r for r in rows if start <= r < end],
            products=products,
            hidden=graph.inputs[start][0],
            chosen=chosen,
            weights=weights,
            out=out,
            experts=shape[0],
        )

    def rewrite(self) -> Rewrite:
        """Return what grouped products change."""
        gathered, order, places = self._sorted()
        last = self._layers(gathered, order, places)
        self._summed(last, order)
        entering = self.index.entering(self.rows)
        return Rewrite(
            kind="experts",
            rows=tuple(self.rows),
            ops=tuple(self.ops),
            unread=tuple(entering),
        )

    def _add(self, name: str, forward: float, **more: object) -> None:
        op = NewOp(name=f"aten::{name}", forward_bytes=forward)
        self.ops.append(replace(op, **more))  # type: ignore[arg-type]

    @property
    def choices(self) -> int:
        """Choices of all tokens."""
        return int(self.index.numel(self.chosen))

    def _sorted(self) -> tuple[int, int, int]:
        """Add what sorts and gathers tokens; return them, their order, and offsets."""
        index, count = self.index, self.choices
        shape, dtype = index.tensors[self.hidden]
        wide = shape[-1] * index.element(self.hidden)
        numbers = index.new((count,), "int64")
        order = index.new((count,), "int64")
        tokens = index.new((count,), "int64")
        gathered = index.new((count, shape[-1]), dtype)
        offsets = index.new((self.experts,), "int32")
        self._add(
            "sort", 3 * _INDEX * count, inputs=(self.chosen,), outputs=(numbers, order)
        )
        self._add(
            "floor_divide",
            2 * _INDEX * count,
            inputs=(order,),
            outputs=(tokens,),
            saves=(tokens,),
        )
        whole, rows = index.bytes[self.hidden], count * wide
        self._add(
            "index",
            whole + rows + _INDEX * count,
            inputs=(self.hidden, tokens),
            outputs=(gathered,),
            # Gradients are added up in zeros, and to those of the router.
            backward_bytes=rows + 2 * whole + _INDEX * count + 3 * whole,
            transient=rows + 2 * whole,
        )
        counted = index.new((count,), "float32")
        self._add(
            "_to_copy",
            (_INDEX + 4) * count,
            inputs=(numbers,),
            outputs=(counted,),
            fusible=True,
        )
        groups = index.new((self.experts,), "float32")
        self._add(
            "histc", 4.0 * (count + self.experts), inputs=(counted,), outputs=(groups,)
        )
        self._add(
            "cumsum",
            _INDEX * self.experts,
            inputs=(groups,),
            outputs=(offsets,),
            saves=(offsets,),
        )
        return gathered, order, offsets

    def _layers(self, gathered: int, order: int, offsets: int) -> int:
        """Add each op of one expert for all of them; return the weighted result."""
        index, graph = self.index, self.index.graph
        first, *others = self.first
        ratio = self.choices / graph.kernels[self.products[0]].m
        place = {graph.outputs[first][0]: gathered}
        saved = self._saved(self.first)
        last = gathered
        for row in others:
            made = graph.outputs[row]
            if graph.names[row] in _GATHERS and self.weights in graph.inputs[row]:
                place[made[0]] = self._weighting(order)
                continue
            if self._is_last_cast(row):
                continue
            for storage in made:
                shape, dtype = index.tensors[storage]
                size = index.bytes[storage] * ratio
                place[storage] = index.new((self.choices, shape[-1]), dtype, size)
            saves = tuple(place[storage] for storage in made if storage in saved)
            if row == self.products[0]:
                saves = (*saves, gathered)
            reads = tuple(place.get(i, i) for i in graph.inputs[row])
            outputs = tuple(place[i] for i in made)
            self._append(row, reads, outputs, saves, ratio, offsets)
            last = outputs[0] if outputs else last
        return last

    def _weighting(self, order: int) -> int:
        """Add what brings the router's weights into the order of sorted tokens."""
        index, whole = self.index, self.index.bytes[self.weights]
        dtype = index.tensors[self.weights][1]
        made = index.new((self.choices,), dtype)
        moved = whole + _INDEX * self.choices + index.bytes[made]
        self._add(
            "index",
            moved,
            inputs=(self.weights, order),
            outputs=(made,),
            saves=(made, order),
            backward_bytes=moved + 3 * whole,
            transient=index.bytes[made] + 2 * whole,
        )
        return made

    def _saved(self, rows: Sequence[int]) -> set[int]:
        """Return storages that one expert's ops keep for backward.

        What is added to the output is kept by the addition alone, which goes.
        """
        inside = {i for row in rows for i in self.index.graph.outputs[row]}
        inside -= set(self.index.graph.inputs[rows[-1] + 1])
        near = range(rows[0], rows[-1] + 2)
        return {i for row in near for i in self.index.saves.get(row, ()) if i in inside}

    def _is_last_cast(self, row: int) -> bool:
        """Return True for the cast of weighted outputs to what they are added to."""
        return row == self.first[-1] and self.index.graph.names[row] == "aten::_to_copy"

    def _append(
        self,
        row: int,
        reads: tuple[int, ...],
        made: tuple[int, ...],
        saves: tuple[int, ...],
        ratio: float,
        offsets: int,
    ) -> None:
        """Add an op of one expert, done for all choices."""
        graph, index = self.index.graph, self.index
        forward = float(graph.forward_bytes[row]) * ratio
        backward = float(graph.backward_bytes[row]) * ratio
        working = float(graph.transient[row]) * ratio
        if row <= self.products[-1]:
            # A loop's backward also adds up gradients of all experts' weights.
            backward = min(backward, 2 * forward)
            working = min(working, 2 * sum(index.bytes[i] for i in made))
        plain = NewOp(
            name=graph.names[row],
            inputs=reads,
            outputs=made,
            saves=saves,
            forward_bytes=forward,
            backward_bytes=backward,
            transient=working,
            fusible=graph.fusible[row],
        )
        if row not in self.products:
            self.ops.append(plain)
            return
        kernel, weight = graph.kernels[row], min(graph.inputs[row])
        size = index.bytes[made[0]]
        taken = self.choices * kernel.k * size / (self.choices * kernel.n)
        halves = 2 * size if self._is_read_in_parts(row) else 0.0
        shape = graph.parameters[-1 - weight].shape
        stacked = shape[0] * shape[1] * shape[2] * size / (self.choices * kernel.n)
        back = float(graph.backward_flops[row]) * ratio
        trained = graph.parameters[-1 - weight].trainable
        self.ops.append(
            replace(
                plain,
                name="aten::_grouped_mm",
                kernel=KernelCost(
                    kind="matmul",
                    batch=self.experts,
                    m=max(1, self.choices // self.experts),
                    n=kernel.n,
                    k=kernel.k,
                    flops=2.0 * self.choices * kernel.n * kernel.k,
                    selective=True,
                ),
                inputs=(*reads, offsets),
                forward_bytes=size + taken + 4 * self.experts,
                weight_bytes=stacked,
                backward_bytes=2 * (size + taken) + trained * stacked + halves,
                backward_flops=back,
                transient=max(halves, size + taken if not halves else 0.0),
            )
        )

    def _is_read_in_parts(self, row: int) -> bool:
        """Return True if gate and value are halves of what a product makes."""
        graph = self.index.graph
        (out,) = graph.outputs[row]
        return any(
            self.index.bytes[made] < self.index.bytes[out]
            for reader in self.index.readers.get(out, ())
            if reader not in self.products
            for made in graph.outputs[reader]
        )

    def _summed(self, last: int, order: int) -> None:
        """Add what brings choices back into the order of tokens, and adds them up."""
        index, count = self.index, self.choices
        shape, dtype = index.tensors[last]
        rows, indices = index.bytes[last], _INDEX * count
        tokens = index.numel(self.hidden) / shape[-1]
        whole = rows / count * tokens
        steps = index.new((count,), "int64")
        inverse = index.new((count,), "int64")
        back = index.new(shape, dtype, rows)
        self._add("arange", indices, outputs=(steps,))
        self._add(
            "index_put_",
            4 * indices,
            inputs=(order, steps),
            outputs=(inverse,),
            saves=(inverse,),
        )
        self._add(
            "index",
            2 * rows + indices,
            inputs=(last, inverse),
            outputs=(back,),
            backward_bytes=6 * rows + whole + indices,
            transient=3 * rows,
        )
        if dtype == index.tensors[self.out][1]:
            self._add(
                "sum", rows + whole, inputs=(back,), outputs=(self.out,), fusible=True
            )
            return
        total = index.new((int(tokens), shape[-1]), dtype)
        self._add("sum", rows + whole, inputs=(back,), outputs=(total,), fusible=True)
        cast = whole + index.bytes[self.out]
        self._add(
            "_to_copy",
            cast,
            inputs=(total,),
            outputs=(self.out,),
            backward_bytes=cast,
            transient=cast,
            fusible=True,
        )


def _weights(index: OpIndex, rows: Sequence[int]) -> int | None:
    """Return the storage of the router's weights, which one op of an expert gathers."""
    graph = index.graph
    found = [
        graph.inputs[row][0]
        for row in rows
        if graph.names[row] in _GATHERS
        and graph.inputs[row][0] >= 0
        and "float" in index.tensors[graph.inputs[row][0]][1]
    ]
    return found[0] if found else None


def _chosen(index: OpIndex, before: int) -> int | None:
    """Return the storage of the experts that the router chose last."""
    graph = index.graph
    for row in range(before - 1, -1, -1):
        if index.structure.units[row] != index.structure.units[before]:
            return None
        if graph.names[row] == "aten::topk":
            return graph.outputs[row][1]
    return None
