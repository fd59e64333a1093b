"""Sums over the ops of a block, and the kind of block that they make."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.graph.model import Block, BlockKind, Kernel, Parameter
from planner.graph.ops import OpGraph
from planner.graph.sharding import Roles
from planner.graph.spatial import Space
from planner.graph.units import Structure
from planner.units import dtype_bytes

__all__ = ["EXPERTS", "BlockSums"]

#: Names of modules and parameters that expert parallelism divides.
EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
SCAN = re.compile(r"mamba|ssm|s4|rwkv|selective|retention|deltanet", re.IGNORECASE)
_RECURRENT = re.compile(r"lstm|gru|rnn", re.IGNORECASE)
_NORM = re.compile(r"norm", re.IGNORECASE)


def _attends(names: Sequence[str], kinds: Sequence[str]) -> bool:
    """Return True for a fused attention op, or a softmax between batched products."""
    if "attention" in kinds:
        return True
    products = [
        i for i, name in enumerate(names) if name in {"aten::bmm", "aten::baddbmm"}
    ]
    softmax = [i for i, name in enumerate(names) if name == "aten::_softmax"]
    return any(products[0] < i < products[-1] for i in softmax) if products else False


def _block_kind(graph: OpGraph, start: int, stop: int, *, last: bool) -> BlockKind:
    """Return the kind of block that the ops [start, stop) make.

    Args:
        graph: The ops.
        start: First op.
        stop: One past the last op.
        last: Whether nothing with weights follows the block.
    """
    names = graph.names[start:stop]
    kernels = graph.kernels[start:stop]
    modules = sorted(set(graph.modules[start:stop]))
    classes = " ".join(graph.module_types.get(name, "") for name in modules)
    flops: dict[str, float] = {}
    for kernel in kernels:
        flops[kernel.kind] = flops.get(kernel.kind, 0.0) + kernel.flops
    arithmetic = sum(flops.values())
    checks: tuple[tuple[BlockKind, bool], ...] = (
        ("expert", any(EXPERTS.search(name) for name in modules)),
        ("expert", any(name.endswith("grouped_mm") for name in names)),
        ("scan", bool(SCAN.search(classes)) and arithmetic > 0),
        ("attention", _attends(names, [kernel.kind for kernel in kernels])),
        ("recurrent", bool(_RECURRENT.search(classes)) and arithmetic > 0),
        ("head", last and arithmetic > 0),
        ("conv", 2 * flops.get("conv", 0.0) > arithmetic > 0),
        ("embedding", "embedding" in flops),
        ("mlp", arithmetic > 0),
        ("norm", bool(_NORM.search(classes)) or any("norm" in name for name in names)),
    )
    return next((kind for kind, holds in checks if holds), "other")


class BlockSums:
    """Sums the ops of one block after another.

    Args:
        graph: All forward ops with the cost of their backward.
        structure: Units and blocks of the model.
        roles: Tensor-parallel role of each op.
        parameters: Parameters of the model, with their blocks.
        saved: Storages kept for backward, by block.
        space: Ops on shards of samples.
    """

    def __init__(
        self,
        graph: OpGraph,
        structure: Structure,
        roles: Roles,
        parameters: list[Parameter],
        saved: list[list[int]],
        space: Space,
    ) -> None:
        self.graph = graph
        self.structure = structure
        self.roles = roles
        self.saved = saved
        self.space = space
        self.all_saved = {storage for storages in saved for storage in storages}
        self.owned: dict[int, list[Parameter]] = {}
        for parameter in parameters:
            self.owned.setdefault(parameter.block, []).append(parameter)
        self.entered: set[int] = set()
        self.parts: dict[tuple[int, ...], Block] = {}
        self.pictures: dict[int, str] = {}
        self.last = self._last_with_weights()
        #: The last op of each unit that saves something.
        self.last_saving: dict[str, int] = {}
        for row, _ in graph.saves:
            unit = structure.units[row]
            self.last_saving[unit] = max(row, self.last_saving.get(unit, row))
        self.bytes = graph.storage_bytes.tolist()

    def _last_with_weights(self) -> int:
        """Return the block after which no product has weights, if it is in no list."""
        for index in range(len(self.structure.bounds) - 1, -1, -1):
            start, stop = self.structure.bounds[index]
            if any(
                self.graph.kernels[row].flops and min(self.graph.inputs[row]) < 0
                for row in range(start, stop)
            ):
                inside = self.structure.units[start] in self.structure.elements
                return -1 if inside else index
        return -1

    def block(self, index: int) -> Block:
        """Sum the ops of block ``index``; blocks must be requested in order."""
        graph, (start, stop) = self.graph, self.structure.bounds[index]
        unit = self.structure.units[start]
        owned = self.owned.get(index, [])
        selective = self._selective(start, stop)
        first = start == 0 or self.structure.units[start - 1] != unit
        boundary = self._boundary(start) if first else 0.0
        key = (*graph.origin[start:stop], index == self.last)
        if key not in self.parts:
            self.parts[key] = self._part(index, start, stop)
        made = replace(
            self.parts[key],
            index=index,
            name=self.structure.blocks[start],
            layer=unit,
            modules=tuple(
                dict.fromkeys(name for name in graph.modules[start:stop] if name)
            ),
            parameter_count=sum(parameter.numel for parameter in owned),
            parameter_bytes=float(
                sum(
                    parameter.numel * dtype_bytes(parameter.dtype)
                    for parameter in owned
                )
            ),
            saved_bytes=self._sum(self.saved[index]),
            saved_tensor_bytes=self._divided(self.saved[index]),
            saved_gathered_bytes=self._gathered(self.saved[index]),
            saved_selective_bytes=self._sum(selective) + boundary,
            saved_selective_tensor_bytes=self._divided(selective),
            boundary_bytes=boundary,
            tp_again_bytes=self._again(start, stop),
            expert_parameter_count=sum(p.numel for p in owned if p.expert),
            **self._shards(start, stop),
        )
        return replace(made, repeat=_signature(made, owned, self.pictures))

    def _shards(self, start: int, stop: int) -> dict[str, Any]:
        """Return what the block computes on shards of samples, and gathers of them."""
        space, rows = self.space, range(start, stop)
        if not space.sizes:
            return {}
        return {
            "spatial": tuple(space.layers[row] for row in rows if row in space.layers),
            "whole": not any(row in space.divided for row in rows),
            "sample_bytes": math.fsum(space.gathered.get(row, 0.0) for row in rows),
        }

    def _part(self, index: int, start: int, stop: int) -> Block:
        """Return the figures that equal runs of ops share, wherever they are."""
        graph, rows = self.graph, slice(start, stop)
        collectives = self.roles.collectives
        return Block(
            index=index,
            name="",
            layer="",
            kind=_block_kind(graph, start, stop, last=index == self.last),
            forward_flops=sum(kernel.flops for kernel in graph.kernels[rows]),
            backward_flops=float(graph.backward_flops[rows].sum()),
            recompute_flops=float(graph.recompute_flops[rows].sum()),
            transient_bytes=self._transient(start, stop),
            kernels=self._kernels(start, stop),
            tp_collectives=sum(row in collectives for row in range(start, stop)),
            tp_collective_bytes=sum(
                collectives.get(row, 0.0) for row in range(start, stop)
            ),
            expert_bytes=self._expert_bytes(start, stop),
            **_heads(graph, start, stop),
        )

    def _sum(self, storages: Sequence[int]) -> float:
        return math.fsum(self.bytes[i] for i in storages)

    def _divided(self, storages: Sequence[int]) -> float:
        return math.fsum(self.bytes[i] for i in storages if i in self.roles.divided)

    def _gathered(self, storages: Sequence[int]) -> float:
        return math.fsum(self.bytes[i] for i in storages if i in self.roles.gathered)

    def _again(self, start: int, stop: int) -> float:
        last = self.last_saving.get(self.structure.units[start], start)
        reduced = self.roles.collectives.items()
        return sum(size for row, size in reduced if start <= row < min(stop, last))

    def _kernels(self, start: int, stop: int) -> tuple[Kernel, ...]:
        graph = self.graph
        count: dict[tuple[object, ...], int] = {}
        for row in range(start, stop):
            cost = graph.kernels[row]
            key = (
                cost.kind,
                cost.batch,
                cost.m,
                cost.n,
                cost.k,
                cost.flops,
                float(graph.backward_flops[row]),
                float(graph.recompute_flops[row]),
                float(graph.forward_bytes[row]),
                float(graph.backward_bytes[row]),
                float(graph.weight_bytes[row]),
                self.roles.ops[row],
                self._trained(row),
                self._of_experts(row),
            )
            if any(key[5:11]):
                count[key] = count.get(key, 0) + 1
        return tuple(
            Kernel(
                kind=key[0],  # type: ignore[arg-type]
                batch=key[1],  # type: ignore[arg-type]
                m=key[2],  # type: ignore[arg-type]
                n=key[3],  # type: ignore[arg-type]
                k=key[4],  # type: ignore[arg-type]
                forward_flops=key[5],  # type: ignore[arg-type]
                backward_flops=key[6],  # type: ignore[arg-type]
                recompute_flops=key[7],  # type: ignore[arg-type]
                forward_bytes=key[8],  # type: ignore[arg-type]
                backward_bytes=key[9],  # type: ignore[arg-type]
                weight_bytes=key[10],  # type: ignore[arg-type]
                style=key[11],  # type: ignore[arg-type]
                trained=key[12],  # type: ignore[arg-type]
                expert=key[13],  # type: ignore[arg-type]
                count=number,
            )
            for key, number in count.items()
        )

    def _trained(self, row: int) -> bool:
        """Return True if the largest parameter of an op is trained, or it has none."""
        tensors = self.graph.parameters
        read = [tensors[-1 - i] for i in self.graph.inputs[row] if i < 0]
        largest = max(read, key=lambda tensor: math.prod(tensor.shape), default=None)
        return largest is None or largest.trainable

    def _of_experts(self, row: int) -> bool:
        """Return True if an op reads weights of experts."""
        tensors = self.graph.parameters
        read = (tensors[-1 - i].name for i in self.graph.inputs[row] if i < 0)
        return any(EXPERTS.search(name) for name in read)

    def _selective(self, start: int, stop: int) -> list[int]:
        """Return the outputs of products and fused attention, each storage once."""
        found: dict[int, None] = {}
        for row in range(start, stop):
            if self.graph.kernels[row].selective:
                found.update(dict.fromkeys(self.graph.outputs[row]))
        return [i for i in found if i not in self.structure.flow.recomputable]

    def _boundary(self, start: int) -> float:
        """Return bytes that enter the unit at op ``start`` and no unit before it."""
        unit, total = self.structure.units[start], 0.0
        made: set[int] = set()
        for row in range(start, len(self.graph)):
            if self.structure.units[row] != unit:
                break
            for storage in self.graph.inputs[row]:
                if storage < 0 or storage in made or storage in self.entered:
                    continue
                if storage in self.graph.constants:
                    continue
                if storage in self.structure.flow.recomputable:
                    continue
                self.entered.add(storage)
                total += self.bytes[storage]
            made.update(self.graph.outputs[row])
        return total

    def _transient(self, start: int, stop: int) -> float:
        graph, most = self.graph, float(self.graph.transient[start:stop].max())
        for row in range(start, stop):
            held = {
                i
                for i in (*graph.inputs[row], *graph.outputs[row])
                if i >= 0 and i not in self.all_saved
            }
            most = max(most, sum(self.bytes[i] for i in held - graph.constants))
        return most

    def _expert_bytes(self, start: int, stop: int) -> float:
        """Return the bytes of rows that the first product with expert weights reads."""
        graph = self.graph
        for row in range(start, stop):
            cost = graph.kernels[row]
            if cost.kind != "matmul" or not EXPERTS.search(graph.modules[row]):
                continue
            reads = [i for i in graph.inputs[row] if i >= 0]
            if reads:
                return float(max(self.bytes[i] for i in reads))
        return 0.0


def _heads(graph: OpGraph, start: int, stop: int) -> dict[str, Any]:
    """Return heads, and bytes that context parallelism sends, of fused attention."""
    ops = [cost for cost in graph.kernels[start:stop] if cost.kind == "attention"]
    if not ops:
        return {}
    return {
        "heads": max(cost.heads for cost in ops),
        "kv_heads": max(cost.kv_heads for cost in ops),
        "sequence_bytes": sum(cost.kv_bytes for cost in ops),
    }


def _signature(block: Block, owned: list[Parameter], pictures: dict[int, str]) -> str:
    """Return a string that is equal for blocks of equal structure and cost."""
    kernels = pictures.get(id(block.kernels))
    if kernels is None:
        kernels = pictures[id(block.kernels)] = repr(block.kernels)
    spatial = tuple(replace(layer, name="") for layer in block.spatial)
    plain = replace(
        block, index=0, name="", layer="", modules=(), kernels=(), spatial=spatial
    )
    tensors = tuple((p.shape, p.dtype, p.trainable, p.style) for p in owned)
    picture = f"{plain}{kernels}{tensors}"
    return hashlib.sha256(picture.encode()).hexdigest()[:12]
