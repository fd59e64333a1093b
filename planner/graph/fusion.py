"""Kernels that a framework makes of the ops of a graph.

Eager torch launches a kernel for each op. Megatron-LM, Transformer Engine, Liger and
the like have one kernel for a norm, a rotation, a gated activation, a loss or the scan
of a state space model, and one product for queries, keys and values. ``torch.compile``
makes one of whatever pointwise ops and reductions are neighbours. Either moves what
enters and leaves a group of ops alone, and keeps for backward what enters it instead of
what it makes inside.

A fused graph is an :class:`OpGraph` like any other, with fewer ops.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from planner.graph.block_sums import SCAN
from planner.graph.coarsen import coarsen
from planner.graph.model import Block, Fusion
from planner.graph.ops import KernelCost, OpGraph, read_flow
from planner.graph.sharding import OpStyle, Roles, with_config_heads
from planner.graph.units import Structure, run_bounds

__all__ = ["OpFusions", "fuse"]

_NORM = re.compile(r"norm", re.IGNORECASE)
#: A tensor this much smaller than the largest of its group is kept, not made again.
_SMALL = 1 / 8
_LOSSES = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})
_MEMORY = KernelCost()
#: Bytes that the backward of a scan moves of its chunks' states, over those of forward,
#: which writes and reads them: it makes them again and passes gradients of each.
#: Source: state-spaces/mamba, ops/triton/ssd_combined.py,
#: _mamba_chunk_scan_combined_bwd.
_STATES_AGAIN = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFusions:
    """Blocks of a model by the kernels that a framework makes of their ops.

    Attributes:
        graph: All forward ops with the cost of their backward.
        structure: Units and blocks of the model.
        roles: Tensor-parallel role of each op.
        dims: Sizes that the model's config gives.
        order: Blocks in program order, by number; None as they are.
        made: What was asked for before.
    """

    graph: OpGraph
    structure: Structure
    roles: Roles
    dims: Mapping[str, int]
    order: tuple[int, ...] | None = None
    made: dict[tuple[Fusion, bool], tuple[Block, ...]] = field(default_factory=dict)

    def blocks(self, fusion: Fusion, *, loss: bool) -> tuple[Block, ...]:
        """Return the blocks under a fusion, with or without a fused loss."""
        if (fusion, loss) not in self.made:
            fused = fuse(self.graph, self.structure, self.roles, fusion, loss=loss)
            found = with_config_heads(coarsen(*fused).blocks, self.dims)
            if self.order is not None:
                found = tuple(
                    replace(found[old], index=new) for new, old in enumerate(self.order)
                )
            self.made[fusion, loss] = found
        return self.made[fusion, loss]

    def reordered(self, order: Sequence[int]) -> OpFusions:
        """Return the same for blocks in another order."""
        now = self.order or range(len(self.structure.bounds))
        return replace(self, order=tuple(now[old] for old in order), made={})


def fuse(
    graph: OpGraph, structure: Structure, roles: Roles, fusion: Fusion, *, loss: bool
) -> tuple[OpGraph, Structure, Roles]:
    """Return a graph of fused kernels, and what is known of them.

    Backward bytes of products are those of their two products, without the copies that
    views cause in eager torch. Ops that stay alone under ``none`` keep what was traced.

    Args:
        graph: All forward ops with the cost of their backward.
        structure: Units and blocks, which stay as they are.
        roles: Tensor-parallel role of each op; ops of unlike roles stay apart.
        fusion: Which ops become one kernel.
        loss: Whether softmax and cross entropy do, too.
    """
    groups = _all_groups(graph, structure, roles, fusion, loss=loss)
    kernels = _Kernels(graph, structure, groups, fusion)
    return kernels.graph(), kernels.structure(), kernels.roles(roles)


# -- Which ops become one kernel -------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Group:
    """Ops that become one kernel.

    Attributes:
        rows: In order.
        product: Whether they are products of one input with several weights.
        scan: Whether they are the scan of a state space model.
    """

    rows: tuple[int, ...]
    product: bool = False
    scan: bool = False

    @property
    def place(self) -> int:
        """Op in whose place the kernel runs: all inputs of products are there first."""
        return self.rows[0] if self.product else self.rows[-1]


def _all_groups(
    graph: OpGraph, structure: Structure, roles: Roles, fusion: Fusion, *, loss: bool
) -> list[_Group]:
    """Groups of all blocks in order of their place; equal blocks are grouped once."""
    known: dict[tuple[object, ...], list[_Group]] = {}
    readers: dict[int, list[int]] = {}
    for row, reads in enumerate(graph.inputs):
        for storage in reads:
            readers.setdefault(storage, []).append(row)
    found: list[_Group] = []
    scans = _scanning(graph)
    for start, stop in structure.bounds:
        key = (*graph.origin[start:stop], *roles.ops[start:stop])
        if key not in known:
            block = _Block(graph, structure, roles, readers, (start, stop), scans)
            known[key] = block.groups(fusion, loss=loss)
        found += [
            replace(group, rows=tuple(start + at for at in group.rows))
            for group in known[key]
        ]
    return found


def _scanning(graph: OpGraph) -> Set[str]:
    """Innermost modules of state space models, whose own ops are the scan."""
    names = {
        name
        for name, kind in graph.module_types.items()
        if SCAN.search(kind) and not _NORM.search(kind)
    }
    outer = {
        ".".join(parts[:count])
        for parts in (name.split(".") for name in names)
        for count in range(len(parts))
    }
    return names - outer


class _Block:
    """Ops of a block, to be grouped.

    Args:
        graph: All ops.
        structure: Units and blocks.
        roles: Of the ops.
        readers: Ops that read each storage.
        bounds: Half-open range of the block's ops.
        scans: Modules whose own ops are a scan.
    """

    def __init__(
        self,
        graph: OpGraph,
        structure: Structure,
        roles: Roles,
        readers: dict[int, list[int]],
        bounds: tuple[int, int],
        scans: Set[str],
    ) -> None:
        self.graph = graph
        self.scans = scans
        self.structure = structure
        self.roles = roles
        self.readers = readers
        self.start, self.stop = bounds
        self.group_of = {row: [row] for row in range(*bounds)}

    def groups(self, fusion: Fusion, *, loss: bool) -> list[_Group]:
        """Groups, rows as offsets from the block's first."""
        rows = range(self.start, self.stop)
        losses = self._losses()
        graph, flow = self.graph, self.structure.flow
        keys: dict[int, object] = {}
        for row in rows:
            made = graph.outputs[row]
            if fusion == "kernels" and self._scans(row):
                keys[row] = ("scan", graph.modules[row])
                continue
            if not graph.fusible[row] or all(i in flow.recomputable for i in made):
                continue
            if row in losses:
                keys[row] = "loss" if loss else row
            elif fusion == "none" or (fusion == "norms" and not self._is_norm(row)):
                continue
            elif fusion == "compiled":
                keys[row] = self.roles.ops[row]
            else:
                keys[row] = (self.roles.ops[row], self._region(row))
        for row, key in keys.items():
            for maker, _ in flow.reads[row]:
                if keys.get(maker) == key:
                    self._join(maker, row)
        distinct = {id(group): group for group in self.group_of.values()}.values()
        found = [
            _Group(
                tuple(row - self.start for row in rows),
                scan=len(rows) > 1 and self._scans(rows[0]) and fusion == "kernels",
            )
            for rows in distinct
        ]
        if fusion in {"norms", "kernels"}:
            found = self._siblings(found)
        return sorted(found, key=lambda group: group.place)

    def _join(self, maker: int, row: int) -> None:
        """Join two groups, if no other op needs a part of the result before its end."""
        first, second = self.group_of[maker], self.group_of[row]
        if first is second:
            return
        joined = sorted(first + second)
        inside, last = set(joined), joined[-1]
        for member in joined:
            for storage in self.graph.outputs[member]:
                for reader in self.readers.get(storage, ()):
                    if member < reader <= last and reader not in inside:
                        return
        for member in joined:
            self.group_of[member] = joined

    def _losses(self) -> set[int]:
        """Ops of the loss: it, and what leads to it alone."""
        found = {
            row
            for row in range(self.start, self.stop)
            if self.graph.names[row] in _LOSSES
        }
        for row in range(self.stop - 1, self.start - 1, -1):
            reading = [i for s in self.graph.outputs[row] for i in self._read(s)]
            if self.graph.fusible[row] and reading and found.issuperset(reading):
                found.add(row)
        return found

    def _read(self, storage: int) -> list[int]:
        return self.readers.get(storage, [])

    def _region(self, row: int) -> str:
        """Module that a hand-written kernel lies in: a norm, or what calls leaves."""
        graph, name = self.graph, self.graph.modules[row]
        whole = graph.children.get(name) or self._is_norm(row)
        return name if whole else name.rpartition(".")[0]

    def _is_norm(self, row: int) -> bool:
        kind = self.graph.module_types.get(self.graph.modules[row], "")
        return bool(_NORM.search(kind))

    def _scans(self, row: int) -> bool:
        """Return True if an op belongs to a scan itself, not to what surrounds it."""
        graph = self.graph
        weighted = min(graph.inputs[row], default=0) < 0
        product = weighted and graph.kernels[row].flops > 0
        return graph.modules[row] in self.scans and not product

    def _siblings(self, groups: Sequence[_Group]) -> list[_Group]:
        """Join products of one input with weights of the same module."""
        graph = self.graph
        found: dict[object, list[int]] = {}
        scans = [group for group in groups if group.scan]
        for group in groups:
            if group.scan:
                continue
            row = self.start + group.rows[0]
            reads = [i for i in graph.inputs[row] if i >= 0]
            weights = len(graph.inputs[row]) - len(reads)
            kernel = graph.kernels[row]
            alike: object = row
            if kernel.kind == "matmul" and len(reads) == 1 and weights:
                holder = graph.modules[row].rpartition(".")[0]
                alike = (*reads, holder, self.roles.ops[row], kernel.batch, weights)
            found.setdefault(alike, []).extend(group.rows)
        return scans + [
            _Group(tuple(rows), product=isinstance(alike, tuple) and len(rows) > 1)
            for alike, rows in found.items()
        ]


# -- What a kernel moves and keeps -----------------------------------------------


@dataclass(slots=True)
class _Kernel:
    """One kernel of the fused graph; storages as in the graph.

    Attributes:
        group: Its ops.
        inputs: Storages that enter it, parameters among them.
        outputs: Storages that leave it.
        saved: Storages that its backward wants.
        forward_bytes: Activation bytes that it moves; likewise backward_bytes.
        transient: Unsaved working set of its backward.
    """

    group: _Group
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    saved: dict[int, None] = field(default_factory=dict)
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    transient: float = 0.0


class _Kernels:
    """All kernels of a fused graph.

    Args:
        graph: Of ops.
        structure: Units and blocks of the ops.
        groups: Ops of each kernel, in order.
        fusion: As for :func:`fuse`.
    """

    def __init__(
        self,
        graph: OpGraph,
        structure: Structure,
        groups: Sequence[_Group],
        fusion: Fusion,
    ) -> None:
        self.source = graph
        self.old = structure
        self.bytes = graph.storage_bytes.tolist()
        self.fusion = fusion
        self.saves: dict[int, list[int]] = {}
        for row, storage in graph.saves:
            self.saves.setdefault(row, []).append(storage)
        self.row_of = {
            row: place for place, group in enumerate(groups) for row in group.rows
        }
        self.readers: dict[int, dict[int, None]] = {}
        for row, reads in enumerate(graph.inputs):
            for storage in reads:
                self.readers.setdefault(storage, {})[self.row_of[row]] = None
        self.kernels = [
            self._kernel(place, group) for place, group in enumerate(groups)
        ]
        if fusion in {"kernels", "compiled"}:
            self._add_up()

    def _kernel(self, place: int, group: _Group) -> _Kernel:
        graph, rows = self.source, group.rows
        reads: dict[int, None] = {}
        writes: dict[int, None] = {}
        saved: dict[int, None] = {}
        for row in rows:
            reads.update({i: None for i in graph.inputs[row] if i not in writes})
            writes.update(dict.fromkeys(graph.outputs[row]))
            saved.update(dict.fromkeys(self.saves.get(row, ())))
        made = _Kernel(
            group=group,
            inputs=tuple(reads),
            outputs=tuple(i for i in writes if self._leaves(i, place)),
            saved=saved,
            forward_bytes=float(graph.forward_bytes[list(rows)].sum()),
            backward_bytes=float(graph.backward_bytes[list(rows)].sum()),
            transient=float(graph.transient[list(rows)].max()),
        )
        if self.fusion in {"none", "norms"} and len(rows) == 1:
            return made
        if group.product:
            # The input is read once, and so is written its gradient.
            again = (len(rows) - 1) * self._sum(i for i in reads if i >= 0)
            made.forward_bytes -= again
        if group.scan:
            self._as_one(made, writes)
            states = 2 * self._states(rows)
            made.forward_bytes += states
            made.backward_bytes += _STATES_AGAIN * states
        elif graph.kernels[rows[0]].kind == "matmul":
            twice = 2 * made.forward_bytes + float(graph.weight_bytes[list(rows)].sum())
            made.backward_bytes = min(made.backward_bytes, twice)
        elif graph.fusible[rows[0]]:
            self._as_one(made, writes)
        return made

    def _as_one(self, kernel: _Kernel, writes: dict[int, None]) -> None:
        """Count what enters and leaves alone, and keep what enters."""
        rows = kernel.group.rows
        entering = [i for i in kernel.inputs if i >= 0]
        moved = self._read(rows, entering) + self._sum(kernel.outputs)
        kernel.forward_bytes = min(kernel.forward_bytes, moved)
        inside = writes.keys() - set(kernel.outputs)
        largest = max((self.bytes[i] for i in (*entering, *writes)), default=0.0)
        lost = [
            i for i in kernel.saved if i in inside and self.bytes[i] > _SMALL * largest
        ]
        kept = dict.fromkeys(i for i in kernel.saved if i not in lost)
        instead = dict.fromkeys(i for s in lost for i in self._origins(rows, s))
        if self._sum(lost) < self._sum(i for i in instead if i not in kept):
            # A sum of several tensors is written for backward.
            kernel.forward_bytes += self._sum(lost)
            instead = dict.fromkeys(lost)
        kept.update(instead)
        kernel.saved = kept
        if kernel.backward_bytes == 0:
            return
        given = self._sum(i for i in kernel.outputs if self._has_gradient(i))
        made = self._sum(self._gradients(rows, set(kernel.outputs)))
        moved = given + made + self._sum(kept)
        kernel.backward_bytes = min(kernel.backward_bytes, moved)
        kernel.transient = min(kernel.transient, given + made)

    def _read(self, rows: Sequence[int], entering: Sequence[int]) -> float:
        """Bytes that a group reads of what enters it: of views, their part."""
        graph, found = self.source, dict.fromkeys(entering, 0.0)
        for row in rows:
            for storage in found.keys() & graph.inputs[row]:
                found[storage] += float(graph.forward_bytes[row])
        return float(sum(min(moved, self.bytes[i]) for i, moved in found.items()))

    def _states(self, rows: Sequence[int]) -> float:
        """Bytes of the states between chunks that a scan writes.

        They are the results of products that further products read. Scores inside a
        chunk, which the next product sums over, stay in the kernel, as in attention.
        """
        graph, total = self.source, 0.0
        products = [row for row in rows if graph.kernels[row].flops > 0]
        for row in products:
            cost, reached = graph.kernels[row], set(graph.outputs[row])
            for later in rows:
                if later <= row or not reached.intersection(graph.inputs[later]):
                    continue
                other = graph.kernels[later]
                if later not in products:
                    reached.update(graph.outputs[later])
                elif (other.batch, other.m, other.k) != (cost.batch, cost.m, cost.n):
                    total += self._sum(graph.outputs[row])
                    break
        return total

    def _leaves(self, storage: int, place: int) -> bool:
        """Return True if another kernel reads it, or none at all."""
        readers = self.readers.get(storage, {})
        return not readers or any(reader != place for reader in readers)

    def _origins(self, rows: Sequence[int], storage: int) -> list[int]:
        """Storages that enter a group and lead to one that it makes."""
        graph, wanted = self.source, {storage}
        for row in reversed(rows):
            if wanted.intersection(graph.outputs[row]):
                wanted.update(graph.inputs[row])
        made = {i for row in rows for i in graph.outputs[row]}
        return sorted(i for i in wanted - made - graph.constants if i >= 0)

    def _has_gradient(self, storage: int) -> bool:
        """Return True if a tensor may want a gradient."""
        if storage < 0 or storage in self.source.sources:
            return False
        if storage in self.old.flow.recomputable:
            return False
        return "float" in self.source.storage_tensor[storage][1]

    def _gradients(self, rows: Sequence[int], outputs: set[int]) -> set[int]:
        """Storages whose gradients a group writes.

        The gradient of a sum is that of each summand, and no kernel's work: ops without
        a backward of their own hand it on.
        """
        graph = self.source
        handed: set[int] = set()
        written: set[int] = set()
        made: set[int] = set()
        for row in rows:
            entering = [i for i in graph.inputs[row] if self._has_gradient(i)]
            outside = [i for i in entering if i not in made or i in handed]
            if graph.backward_bytes[row] > 0:
                written.update(outside)
            elif outside:
                handed.update(graph.outputs[row])
            made.update(graph.outputs[row])
        return written

    def _sum(self, storages: Iterable[int]) -> float:
        return float(sum(self.bytes[i] for i in storages))

    def _add_up(self) -> None:
        """Charge sums of the gradients of a tensor that several kernels read.

        A kernel of its own reads two and writes one; a compiled one reads all.
        """
        for kernel in self.kernels:
            row = kernel.group.rows[0]
            product = self.source.kernels[row].kind == "matmul"
            if not product and not self.source.fusible[row]:
                continue
            each = 1.0 if self.fusion == "compiled" and not product else 3.0
            for storage in kernel.outputs:
                readers = [
                    place
                    for place in self.readers.get(storage, {})
                    if any(map(self._has_gradient, self.kernels[place].outputs))
                ]
                if self._has_gradient(storage) and len(readers) > 1:
                    sums = each * (len(readers) - 1)
                    kernel.backward_bytes += sums * self.bytes[storage]

    # -- The fused graph ---------------------------------------------------------

    def graph(self) -> OpGraph:
        """Return the kernels as a graph of ops."""
        old, kernels = self.source, self.kernels
        numbers: dict[tuple[object, ...], int] = {}

        def column(name: str) -> np.ndarray:
            return np.array([getattr(kernel, name) for kernel in kernels])

        def total(values: np.ndarray) -> np.ndarray:
            return np.array([values[list(k.group.rows)].sum() for k in kernels])

        places = [kernel.group.place for kernel in kernels]
        return replace(
            old,
            origin=[numbers.setdefault(self._key(k), len(numbers)) for k in kernels],
            names=[old.names[place] for place in places],
            modules=[self._module(kernel.group) for kernel in kernels],
            kernels=[self._cost(kernel.group) for kernel in kernels],
            inputs=[kernel.inputs for kernel in kernels],
            outputs=[kernel.outputs for kernel in kernels],
            random=[any(old.random[row] for row in k.group.rows) for k in kernels],
            fusible=[old.fusible[place] for place in places],
            forward_bytes=column("forward_bytes"),
            weight_bytes=total(old.weight_bytes),
            backward_flops=total(old.backward_flops),
            backward_bytes=column("backward_bytes"),
            recompute_flops=total(old.recompute_flops),
            transient=column("transient"),
            saves=[(p, storage) for p, k in enumerate(kernels) for storage in k.saved],
        )

    def _module(self, group: _Group) -> str:
        """Module of a kernel's last op; where it drops out, too, that of its norm."""
        graph = self.source
        if any(graph.names[row] == "aten::native_dropout" for row in group.rows):
            for row in group.rows:
                if "Norm" in graph.module_types.get(graph.modules[row], ""):
                    return graph.modules[row]
        return graph.modules[group.place]

    def _key(self, kernel: _Kernel) -> tuple[object, ...]:
        """Equal for kernels of equal ops and cost."""
        origins = tuple(self.source.origin[row] for row in kernel.group.rows)
        moved = (kernel.forward_bytes, kernel.backward_bytes, kernel.transient)
        return (*origins, *moved)

    def _cost(self, group: _Group) -> KernelCost:
        costs = [self.source.kernels[row] for row in group.rows]
        if group.scan:
            return KernelCost(flops=sum(cost.flops for cost in costs))
        if not group.product:
            return costs[0] if len(costs) == 1 else _MEMORY
        return replace(
            costs[0],
            n=sum(cost.n for cost in costs),
            flops=sum(cost.flops for cost in costs),
        )

    def structure(self) -> Structure:
        """Return units and blocks of the kernels."""
        places = [kernel.group.place for kernel in self.kernels]
        units = [self.old.units[place] for place in places]
        blocks = [self.old.blocks[place] for place in places]
        keys = [f"{unit}\0{block}" for unit, block in zip(units, blocks, strict=True)]
        return Structure(
            units=units,
            blocks=blocks,
            bounds=run_bounds(keys),
            elements=self.old.elements,
            flow=read_flow(self.graph()),
        )

    def roles(self, old: Roles) -> Roles:
        """Return the roles of the kernels."""
        sums: dict[int, float] = {}
        for row, size in old.collectives.items():
            place = self.row_of[row]
            sums[place] = sums.get(place, 0.0) + size
        ops: list[OpStyle] = [old.ops[kernel.group.place] for kernel in self.kernels]
        return replace(old, ops=ops, collectives=sums)
