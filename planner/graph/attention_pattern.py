"""Attention that writes its scores, and the fused kernel that stands in for it.

Recognised is a softmax between two products without weights, whatever scales, masks or
casts the scores on the way; a sink of each head, one more score that no value belongs
to, may join them. The kernel keeps queries, keys, values, its output and one
number of 32 bits a row, and computes scores again in its backward (Dao et al. 2022,
arXiv:2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from planner.graph.ops import KernelCost
from planner.graph.rewriting import NewOp, OpIndex, Rewrite

__all__ = ["fused_attention"]

_COPIES = frozenset({"aten::clone", "aten::contiguous"})
_DROPOUT = "aten::native_dropout"
_JOIN = "aten::cat"
#: Ops that find the largest score of a row, which may be taken from all of it.
_PEAKS = frozenset({"aten::max", "aten::amax"})
#: Ops that tell a causal mask by the positions of two tokens.
_COMPARES = frozenset(
    f"aten::{name}" for name in ("le", "lt", "ge", "gt", "tril", "triu")
)
#: Ops that may make the rest of such a mask.
_PLAIN = frozenset(
    f"aten::{name}"
    for name in (
        *("arange", "add", "sub", "mul", "neg", "zeros", "ones", "full", "where"),
        *("scalar_tensor", "_to_copy", "clone", "masked_fill", "logical_not"),
        *(
            "masked_fill_",
            "fill_",
            "full_like",
            "zeros_like",
            "ones_like",
            "lift_fresh",
        ),
    )
)


def fused_attention(index: OpIndex) -> Iterator[Rewrite]:
    """Yield a rewrite for each attention that writes its scores."""
    for row, name in enumerate(index.graph.names):
        if name == "aten::_softmax":
            found = _Attention.around(index, row)
            if found is not None:
                yield found.rewrite()


@dataclass(slots=True)
class _Attention:
    """Ops of one attention.

    Attributes:
        index: Of the graph.
        scores: Product of queries and keys; likewise mixed, that of scores and values.
        rows: All ops between them, and copies into another layout around.
        side: Storages that meet the scores: masks.
        sinks: Storages of sinks, joined by op ``join``; empty without.
        dropped: Whether scores are.
    """

    index: OpIndex
    scores: int
    mixed: int
    rows: set[int]
    side: list[int] = field(default_factory=list)
    sinks: tuple[int, ...] = ()
    join: int = -1
    dropped: bool = False

    @classmethod
    def around(cls, index: OpIndex, softmax: int) -> _Attention | None:
        """Return the attention of a softmax; None if no kernel computes the same."""
        ahead = _follow(index, softmax)
        if ahead is None:
            return None
        rows, mixed = ahead
        found = cls(index, -1, mixed, rows)
        storage = index.graph.inputs[softmax][0]
        if not found._lead(storage) or not found._has_plain_masks():
            return None
        names = index.graph.names
        found.dropped = any(names[row] == _DROPOUT for row in found.rows)
        outputs = set(index.graph.outputs[mixed])
        return found if index.is_closed(found.rows, outputs) else None

    def _lead(self, storage: int) -> bool:
        """Follow scores back to their product; take in what lies between."""
        index, graph = self.index, self.index.graph
        row, *again = index.makers.get(storage, [-1])
        for other in again:  # Scaled or masked in place.
            if not graph.fusible[other] or storage not in graph.inputs[other]:
                return False
        if row < 0:
            return False
        first, last = graph.kernels[row], graph.kernels[self.mixed]
        if index.is_product(row, weighted=False):
            leads = (first.batch, first.m, first.n) == (last.batch, last.m, last.k)
            self.scores = row
        else:
            size = last.batch * last.m * last.k
            wide = size + last.batch * last.m
            found = index.numel(storage)
            if not graph.fusible[row] or found not in (size, wide):
                return False
            if found == wide and graph.names[row] == _JOIN:
                return self._join(row, size)
            reads = self._without_peak(graph.inputs[row])
            before = [i for i in reads if self._lead(i)]
            leads = len(before) == 1
            self.side += [i for i in reads if i not in before]
        if leads:
            self.rows.update((row, *again))
            self.side += [i for r in again for i in graph.inputs[r] if i != storage]
        return leads

    def _join(self, row: int, size: int) -> bool:
        """Follow scores on through the op that joins sinks to them."""
        index, graph = self.index, self.index.graph
        joined = graph.inputs[row]
        scores = [i for i in joined if i >= 0 and index.numel(i) == size]
        sinks = tuple(i for i in joined if i not in scores)
        if len(scores) != 1 or len(sinks) != 1 or not self._is_weight(sinks[0]):
            return False
        self.sinks, self.join = sinks, row
        self.rows.add(row)
        return self._lead(scores[0])

    def _is_weight(self, storage: int) -> bool:
        """Return True for a weight, or one in another form."""
        row = self.index.maker(storage) if storage >= 0 else None
        reads = self.index.graph.inputs[row] if row is not None else (storage,)
        return bool(reads) and max(reads) < 0

    def _without_peak(self, reads: Sequence[int]) -> list[int]:
        """Return inputs of an op but for the largest of each row of another of them."""
        index, graph = self.index, self.index.graph
        left = []
        for storage in reads:
            row = index.maker(storage)
            peak = row is not None and graph.names[row] in _PEAKS
            if row is not None and peak and graph.inputs[row][0] in reads:
                self.rows.add(row)
            else:
                left.append(storage)
        return left

    def _has_plain_masks(self) -> bool:
        """Return True if no gradient goes to what meets the scores."""
        known = self.index.structure.flow.recomputable | self.index.graph.sources
        return all(storage in known for storage in self.side)

    # -- The kernel --------------------------------------------------------------

    def rewrite(self) -> Rewrite:
        """Return what the fused kernel changes."""
        index, graph = self.index, self.index.graph
        one, two = graph.kernels[self.scores], graph.kernels[self.mixed]
        batch, m, n, d, e = one.batch, one.m, one.n, one.k, two.n
        query, *rest = graph.inputs[self.scores]
        key = rest[0] if rest else query
        value = self._value()
        value = query if value is None else value
        element = index.element(graph.outputs[self.scores][0])
        whole = [batch * size * element for size in (m * d, n * d, n * e)]
        less: dict[int, float] = {}
        first, q = self._peeled(query, whole[0], less, "query")
        second, k = self._peeled(key, whole[1], less, "key")
        third, v = self._peeled(value, whole[2], less, "value")
        storages = (first, second, third)
        out = self._out()
        lse = index.new((batch, m), "float32")
        written, heads = float(batch * m * e * element), self._heads(batch)
        flops = 2.0 * batch * m * n * (d + e)
        moved = q + k + v + written + index.bytes[lse]
        # Parts of a model that nothing trains have no backward.
        trained = bool(graph.backward_flops[[self.scores, self.mixed]].sum())
        op = NewOp(
            name="meshwright::attention",
            kernel=KernelCost(
                kind="attention",
                batch=batch,
                m=m,
                n=n,
                k=max(1, (d + e) // 2),
                flops=flops,
                selective=True,
                heads=heads,
                kv_heads=max(1, round(heads * k / whole[1])),
                kv_bytes=k + v,
            ),
            inputs=tuple(dict.fromkeys((*storages, *self.sinks))),
            outputs=(out, lse),
            saves=(*storages, out, lse) if trained else (),
            forward_bytes=moved,
            weight_bytes=float(graph.weight_bytes[self.join]) if self.sinks else 0.0,
            # It also reads the gradient of its output, and writes three.
            backward_bytes=trained * (moved + written + q + k + v),
            backward_flops=trained * 2.0 * flops,
            recompute_flops=trained * flops * d / (d + e),
            transient=trained * (written + q + k + v),
        )
        masked = self._is_causal(m, n)
        return Rewrite(
            kind="attention",
            rows=tuple(sorted(self.rows)),
            ops=(op,),
            unread=tuple(self.side) if masked else (),
            less_backward=less,
            causal=masked and not self.dropped,
        )

    def _value(self) -> int | None:
        """Return the storage of the values, which no op on scores makes."""
        index = self.index
        for storage in index.graph.inputs[self.mixed]:
            if not self.rows.intersection(index.makers.get(storage, ())):
                return storage
        return None

    def _peeled(
        self,
        storage: int,
        whole: float,
        less: dict[int, float],
        role: Literal["query", "key", "value"],
    ) -> tuple[int, float]:
        """Return where an operand was before it was copied, and its bytes there.

        Kernels read any layout, and keys of several heads at once.

        Args:
            storage: Of the operand.
            whole: Its bytes with as many heads as queries have.
            less: Is given bytes that backwards before it no longer move.
            role: Of the operand.
        """
        index, graph, size = self.index, self.index.graph, whole
        copied = False
        while True:
            row = index.maker(storage)
            if row is None or graph.names[row] not in _COPIES:
                break
            if not index.is_read_in(row, self.rows):
                break
            size = min(size, graph.forward_bytes[row] - index.bytes[storage])
            self.rows.add(row)
            storage, copied = graph.inputs[row][0], True
        size = min(size, index.bytes[storage])
        shared = role != "query"
        names = ("num_heads", "num_key_value_heads")
        heads, few = (index.dims.get(name, 0) for name in names)
        if shared and 0 < few < heads == self._heads(graph.kernels[self.scores].batch):
            size = min(size, whole * few / heads)
        if row is not None:
            if shared and size < whole:
                # The sum of the gradients of equal keys reads all and writes one.
                less[row] = less.get(row, 0.0) + whole + size
            if copied and role != "key" and index.is_product(row, weighted=True):
                # Its gradient is copied into the layout that the product reads.
                less[row] = less.get(row, 0.0) + 2 * size
        return storage, float(size)

    def _heads(self, batch: int) -> int:
        """Return the heads of a sample."""
        known = self.index.dims.get("num_heads", 0)
        return known if known and batch % known == 0 else batch // self.index.samples

    def _out(self) -> int:
        """Return the output, in the layout in which it is read next."""
        index, graph = self.index, self.index.graph
        (out,) = graph.outputs[self.mixed]
        readers = index.readers.get(out, [])
        if len(readers) == 1 and graph.names[readers[0]] in _COPIES:
            made = graph.outputs[readers[0]]
            if index.bytes[made[0]] == index.bytes[out]:
                self.rows.add(readers[0])
                return made[0]
        return out

    def _is_causal(self, m: int, n: int) -> bool:
        """Return True if one comparison of positions alone masks scores."""
        index, graph = self.index, self.index.graph
        compared: set[int] = set()
        seen: set[int] = set()
        waiting = list(self.side)
        while waiting:
            storage = waiting.pop()
            if storage in graph.sources or storage < 0:
                return False
            for row in index.makers.get(storage, ()):
                if row in seen:
                    continue
                seen.add(row)
                if graph.names[row] in _COMPARES:
                    compared.add(row)
                elif graph.names[row] not in _PLAIN:
                    return False
                waiting += graph.inputs[row]
        return m == n and len(compared) == 1


def _follow(index: OpIndex, softmax: int) -> tuple[set[int], int] | None:
    """Return the ops from a softmax on, and the product that they lead to."""
    graph, rows, mixed = index.graph, {softmax}, set()
    waiting = [softmax]
    while waiting:
        row = waiting.pop()
        for storage in graph.outputs[row]:
            for reader in index.readers.get(storage, ()):
                if reader in rows:
                    continue
                rows.add(reader)
                if index.is_product(reader, weighted=False):
                    mixed.add(reader)
                elif graph.fusible[reader]:
                    waiting.append(reader)
                else:
                    return None
    return (rows, mixed.pop()) if len(mixed) == 1 else None
