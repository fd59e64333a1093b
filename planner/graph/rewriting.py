"""Rewriting of the ops of a graph: runs of ops give way to a few new ones.

A recogniser reads an :class:`OpIndex` and describes each place that it knows as a
:class:`Rewrite`; :func:`rewrite_ops` carries all of them out at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from planner.graph.ops import KernelCost, OpGraph, read_flow
from planner.graph.sharding import OpStyle, Roles
from planner.graph.units import Structure, run_bounds
from planner.schema.fused_kernels import KernelKind
from planner.units import dtype_bytes

__all__ = ["NewOp", "OpIndex", "Rewrite", "rewrite_ops"]

#: Cost of an op that only moves bytes.
_MEMORY = KernelCost()
_Tensor = tuple[tuple[int, ...], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOp:
    """An op that takes the place of others; attributes as in :class:`OpGraph`."""

    name: str
    kernel: KernelCost = _MEMORY
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    weight_bytes: float = 0.0
    backward_flops: float = 0.0
    recompute_flops: float = 0.0
    transient: float = 0.0
    fusible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Ops that give way to new ones, in the place of their last.

    Attributes:
        kind: Kernel that the new ops stand for.
        rows: Ops that go, in order.
        ops: Ops that come.
        unread: Storages that ``rows`` read and ``ops`` do not: what made them goes,
            too, if nothing else reads it and it follows from inputs alone.
        less_backward: Op to bytes that its backward no longer moves.
        causal: Whether it is attention with a causal mask and nothing else.
    """

    kind: KernelKind
    rows: tuple[int, ...]
    ops: tuple[NewOp, ...]
    unread: tuple[int, ...] = ()
    less_backward: Mapping[int, float] = field(default_factory=dict)
    causal: bool = False


class OpIndex:
    """Ops of a graph by what they read and write; new storages are made here.

    Args:
        graph: All forward ops with the cost of their backward.
        structure: Units and blocks of the ops.
        dims: Sizes that the model's config gives.
        samples: Of the traced batch.
    """

    def __init__(
        self,
        graph: OpGraph,
        structure: Structure,
        dims: Mapping[str, int],
        samples: int,
    ) -> None:
        self.graph = graph
        self.structure = structure
        self.dims = dims
        self.samples = samples
        self.bytes: list[float] = graph.storage_bytes.tolist()
        self.tensors: list[_Tensor] = list(graph.storage_tensor)
        self.makers: dict[int, list[int]] = {}
        self.readers: dict[int, list[int]] = {}
        for row, (reads, writes) in enumerate(
            zip(graph.inputs, graph.outputs, strict=True)
        ):
            for storage in reads:
                self.readers.setdefault(storage, []).append(row)
            for storage in writes:
                self.makers.setdefault(storage, []).append(row)
        self.saves: dict[int, list[int]] = {}
        for row, storage in graph.saves:
            self.saves.setdefault(row, []).append(storage)

    def new(self, shape: Sequence[int], dtype: str, size: float | None = None) -> int:
        """Make a storage, of as many bytes as its shape has if not said otherwise."""
        self.tensors.append((tuple(shape), dtype))
        count = float(np.prod(shape, dtype=np.int64)) * dtype_bytes(dtype)
        self.bytes.append(count if size is None else size)
        return len(self.bytes) - 1

    def element(self, storage: int) -> float:
        """Bytes of an element of a storage."""
        return dtype_bytes(self.tensors[storage][1])

    def numel(self, storage: int) -> float:
        """Elements of a storage."""
        return self.bytes[storage] / self.element(storage)

    def maker(self, storage: int) -> int | None:
        """Return the only op that writes a storage; None if there are several."""
        found = self.makers.get(storage, [])
        return found[0] if len(found) == 1 else None

    def is_product(self, row: int, *, weighted: bool) -> bool:
        """Return True for a matrix product, with or without a weight."""
        kernel, reads = self.graph.kernels[row], self.graph.inputs[row]
        product = kernel.kind == "matmul" and kernel.flops > 0
        return product and (min(reads, default=0) < 0) == weighted

    def is_read_in(self, row: int, rows: Set[int]) -> bool:
        """Return True if what an op makes is read by some of ``rows``, and no other."""
        found = {r for i in self.graph.outputs[row] for r in self.readers.get(i, ())}
        return bool(found - {row}) and found - {row} <= rows

    def is_closed(self, rows: Set[int], outputs: Set[int]) -> bool:
        """Return True if all that ``rows`` make, but ``outputs``, is read in there."""
        return all(
            reader in rows
            for row in rows
            for storage in self.graph.outputs[row]
            if storage not in outputs
            for reader in self.readers.get(storage, ())
        )

    def entering(self, rows: Iterable[int]) -> list[int]:
        """Return the storages that ``rows`` read and do not make, each once."""
        order = sorted(rows)
        made = {i for row in order for i in self.graph.outputs[row]}
        reads = (i for row in order for i in self.graph.inputs[row] if i >= 0)
        return list(dict.fromkeys(i for i in reads if i not in made))


# -- Carrying it out -------------------------------------------------------------


def rewrite_ops(
    index: OpIndex, roles: Roles, rewrites: Sequence[Rewrite]
) -> tuple[OpGraph, Structure, Roles]:
    """Return a graph in which the new ops have taken their places.

    Equal rewrites of equal ops make equal blocks. A unit keeps at least one op.

    Args:
        index: Of the graph, with the storages that recognisers made.
        roles: Tensor-parallel role of each op; new ops take that of the last that goes.
        rewrites: Of ops that differ.
    """
    work = _Rewriter(index, roles, rewrites)
    graph = work.graph()
    units, blocks = work.labels()
    keys = [f"{unit}\0{block}" for unit, block in zip(units, blocks, strict=True)]
    structure = Structure(
        units=units,
        blocks=blocks,
        bounds=run_bounds(keys),
        elements=index.structure.elements,
        flow=read_flow(graph),
    )
    return graph, structure, work.roles()


class _Rewriter:
    """The rows of the new graph: ops of the old one by number, and new ops."""

    def __init__(
        self, index: OpIndex, roles: Roles, rewrites: Sequence[Rewrite]
    ) -> None:
        self.index = index
        self.old = index.graph
        self.old_roles = roles
        self.at = {one.rows[-1]: one for one in rewrites}
        self.gone = {row for one in rewrites for row in one.rows}
        self.less: dict[int, float] = {}
        for one in rewrites:
            for row, size in one.less_backward.items():
                self.less[row] = self.less.get(row, 0.0) + size
        self._drop_unread(rewrites)
        #: (op of the old graph whose place it has, the new op or None).
        self.rows: list[tuple[int, NewOp | None]] = list(self._rows())

    def _rows(self) -> Iterator[tuple[int, NewOp | None]]:
        for row in range(len(self.old)):
            if row in self.at:
                yield from ((row, op) for op in self.at[row].ops)
            elif row not in self.gone:
                yield row, None

    def _drop_unread(self, rewrites: Sequence[Rewrite]) -> None:
        """Add to what goes the ops that made inputs alone for it, such as masks."""
        index, flow = self.index, self.index.structure.flow
        kept = {i for one in rewrites for op in one.ops for i in op.inputs}
        left: dict[str, int] = {}
        for row, unit in enumerate(index.structure.units):
            left[unit] = left.get(unit, 0) + (row not in self.gone)
        waiting = [i for one in rewrites for i in one.unread]
        while waiting:
            storage = waiting.pop()
            if storage < 0 or storage in kept or storage not in flow.recomputable:
                continue
            if not self.gone.issuperset(index.readers.get(storage, ())):
                continue
            for row in index.makers.get(storage, ()):
                others = set(self.old.outputs[row]) - {storage}
                unit = index.structure.units[row]
                if row in self.gone or others or left[unit] < 2:
                    continue
                self._drop(row, left)
                waiting += self.old.inputs[row]

    def _drop(self, row: int, left: dict[str, int]) -> None:
        """Let an op go, with those before it that nothing reads at all."""
        index = self.index
        unit, flow = index.structure.units[row], index.structure.flow
        self.gone.add(row)
        left[unit] -= 1
        while row and left[unit] > 1 and index.structure.units[row - 1] == unit:
            row -= 1
            made = self.old.outputs[row]
            if row in self.gone:
                continue
            if not flow.recomputable.issuperset(made) or index.readers.keys() & made:
                return
            self.gone.add(row)
            left[unit] -= 1

    def _origin(self, numbers: dict[object, int], place: int, op: NewOp | None) -> int:
        """Return a number that equal ops share."""
        key: object = (self.old.origin[place], self.less.get(place, 0.0))
        if op is not None:
            plain = replace(op, inputs=(), outputs=(), saves=())
            rewrite = self.at[place]
            first = self.old.origin[rewrite.rows[0]]
            shape = (len(op.inputs), len(op.outputs), len(rewrite.rows))
            key = (plain, first, self.old.origin[place], shape, rewrite.ops.index(op))
        return numbers.setdefault(key, len(numbers))

    def graph(self) -> OpGraph:
        """Return the new graph."""
        old, rows = self.old, self.rows
        numbers: dict[object, int] = {}

        def column(name: str) -> np.ndarray:
            values = getattr(old, name)
            found = [values[p] if op is None else getattr(op, name) for p, op in rows]
            return np.array(found, dtype=np.float64)

        backward = column("backward_bytes")
        for at, (place, op) in enumerate(rows):
            if op is None and place in self.less:
                backward[at] = max(0.0, backward[at] - self.less[place])
        return replace(
            old,
            origin=[self._origin(numbers, place, op) for place, op in rows],
            names=[old.names[p] if op is None else op.name for p, op in rows],
            modules=[old.modules[place] for place, _ in rows],
            kernels=[old.kernels[p] if op is None else op.kernel for p, op in rows],
            inputs=[old.inputs[p] if op is None else op.inputs for p, op in rows],
            outputs=[old.outputs[p] if op is None else op.outputs for p, op in rows],
            random=[op is None and old.random[place] for place, op in rows],
            fusible=[old.fusible[p] if op is None else op.fusible for p, op in rows],
            forward_bytes=column("forward_bytes"),
            weight_bytes=column("weight_bytes"),
            backward_flops=column("backward_flops"),
            backward_bytes=backward,
            recompute_flops=column("recompute_flops"),
            transient=column("transient"),
            storage_bytes=np.array(self.index.bytes),
            storage_tensor=list(self.index.tensors),
            saves=self._saves(),
        )

    def _saves(self) -> list[tuple[int, int]]:
        """Return what is saved of what there still is."""
        lost = {
            storage
            for row in self.gone
            for storage in self.old.outputs[row]
            if self.gone.issuperset(self.index.makers[storage])
        }
        lost -= {i for _, op in self.rows if op is not None for i in op.outputs}
        found: list[tuple[int, int]] = []
        for at, (place, op) in enumerate(self.rows):
            kept = self.index.saves.get(place, ()) if op is None else op.saves
            found += [(at, storage) for storage in kept if storage not in lost]
        return found

    def labels(self) -> tuple[list[str], list[str]]:
        """Return unit and block of each op."""
        old = self.index.structure
        return (
            [old.units[place] for place, _ in self.rows],
            [old.blocks[place] for place, _ in self.rows],
        )

    def roles(self) -> Roles:
        """Return the roles of the new graph's ops."""
        old = self.old_roles
        divided = set(old.divided)
        sums: dict[int, float] = {}
        ops: list[OpStyle] = []
        for at, (place, op) in enumerate(self.rows):
            ops.append(old.ops[place])
            if op is None and place in old.collectives:
                sums[at] = old.collectives[place]
            if op is not None and divided.intersection(op.outputs):
                divided.update(op.outputs)
        return replace(old, ops=ops, collectives=sums, divided=frozenset(divided))
