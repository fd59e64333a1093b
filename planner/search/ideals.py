"""Exact cuts of models whose units form no chain, along ideals.

An ideal is a set of units that contains, with each unit, every unit that it reads. On a
chain the ideals are the prefixes of program order; two towers have one for each pair of
prefixes. A chain of ideals is a pipeline whose stages may hold layers of several
towers: stages relay tensors that later ones read, so that a boundary is crossed by
every tensor that is made before it and read after it. Every such pipeline is also a cut
of the units in some other topological order, which is how a strategy lists them. Source
of the idea: Tarnawski et al. 2020, arXiv 2006.16423, section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel, PricingContext
from planner.cost.units import UnitCosts
from planner.graph import ModelGraph
from planner.schema import Strategy
from planner.search.base import Candidate, Request, score
from planner.search.stages import span_memory, span_times, stage_limits
from planner.simulate import actions
from planner.simulate.compiled import compiled
from planner.space import RECOMPUTE_NAMES

__all__ = ["Ideals", "along_ideals", "best_chain", "ideals_of"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Most ideals of a model for a search along them: all pairs of them are compared.
_MOST_IDEALS = 2048
#: Fastest pipelines that are recut, besides the fastest of each schedule.
_MOST_RECUT = 8
#: Least relative gain of the slowest stage for another cut.
_WORTH = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class Ideals:
    """All ideals of a model's units, smaller ones first.

    Attributes:
        graph: The model.
        bits: Units of each ideal. Shape [ideals, U].
        cut_bytes: Bytes made in each ideal and read outside of it, as traced. Shape
            [ideals].
    """

    graph: ModelGraph
    bits: Mask
    cut_bytes: Array

    @cached_property
    def inside(self) -> Mask:
        """True where an ideal (row) is a proper part of another (column)."""
        bits = self.bits.astype(np.float32)
        found = bits @ (1.0 - bits.T) == 0
        np.fill_diagonal(found, False)
        return np.asarray(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Pairs:
    """Pairs of ideals before and after a stage; arrays have the shape [..., P]."""

    bits: Mask
    first: Index
    second: Index

    def sums(self, values: Array) -> Array:
        """Return the sum of units' values between the ideals of each pair."""
        whole = values @ self.bits.T
        return np.asarray(whole[..., self.second] - whole[..., self.first])

    def largest(self, values: Array) -> Array:
        """Return the greatest of units' values between the ideals of each pair."""
        if values.ndim > 1:
            return np.stack([self.largest(row) for row in values])
        found = np.zeros(len(self.first))
        for value in np.unique(values):
            count = self.bits[:, values == value].sum(axis=1)
            found[count[self.second] > count[self.first]] = value
        return found

    def starts(self, values: Array) -> Array:
        """Return the values of ideals at the first of each pair."""
        return np.asarray(values[self.first])

    def ends(self, values: Array) -> Array:
        """Return the values of ideals at the second of each pair."""
        return np.asarray(values[self.second])


def ideals_of(graph: ModelGraph) -> Ideals | None:
    """Enumerate a model's ideals; None on a chain, and if there are too many."""
    reads = graph.unit_reads
    if all(unit - 1 in reads[unit] for unit in range(1, len(reads))):
        return None
    empty: frozenset[int] = frozenset()
    seen, front = {empty}, [empty]
    while front:
        ideal = front.pop()
        for unit, needed in enumerate(reads):
            larger = ideal | {unit}
            if unit not in ideal and needed <= ideal and larger not in seen:
                seen.add(larger)
                front.append(larger)
        if len(seen) > _MOST_IDEALS:
            return None
    bits = np.zeros((len(seen), len(reads)), dtype=bool)
    for row, ideal in enumerate(sorted(seen, key=lambda one: (len(one), sorted(one)))):
        bits[row, list(ideal)] = True
    crossing = np.zeros(len(bits))
    for source, readers, sent in graph.unit_tensors:
        crossing += sent * (bits[:, source] & ~bits[:, list(readers)].all(axis=1))
    return Ideals(graph=graph, bits=bits, cut_bytes=crossing)


@compiled
def _solve(
    time: Array,
    fixed: Array,
    kept: Array,
    start: Index,
    second: Index,
    types: Index,
    held: Array,
    limit: Array,
    bottleneck: float,
    choice: Index,
) -> float:
    """Find the least bottleneck below ``bottleneck``; the least sum if it is negative.

    The dynamic program of :mod:`planner.search.stages`, from ideal to ideal: the pairs
    that begin with ideal i are start[i] to start[i + 1] - 1.
    """
    stages, count = len(types), len(start) - 1
    best = np.full((stages + 1, count), np.inf)
    best[stages, count - 1] = 0.0
    for s in range(stages - 1, -1, -1):
        for i in range(count):
            for p in range(start[i], start[i + 1]):
                rest = best[s + 1, second[p]]
                if rest == np.inf:
                    continue
                for kind in range(len(fixed)):
                    here = time[types[s], kind, p]
                    if here > abs(bottleneck):
                        break
                    if fixed[kind, p] + kept[kind, p] * held[s] > limit[s]:
                        continue
                    total = max(here, rest) if bottleneck > 0 else here + rest
                    if total < best[s, i]:
                        best[s, i] = total
                        choice[s, i, 0] = second[p]
                        choice[s, i, 1] = kind
                    break
    found: float = best[0, 0]
    return found


def best_chain(
    context: PricingContext,
    ideals: Ideals,
    bare: Strategy,
    costs: UnitCosts,
    *,
    below_s: float,
    kinds: tuple[int, ...] = (0, 1, 2),
) -> tuple[list[int], list[int]] | None:
    """Find the chain of ideals with the fastest slowest stage, then least total time.

    Args:
        context: Model, machines, training recipe.
        ideals: Ideals of the model.
        bare: A strategy without stages and without sequence parallelism.
        costs: Units under its combination alone (C = 1).
        below_s: Upper bound on the seconds of a stage.
        kinds: Recompute kinds that may be chosen, as indices into
            :data:`planner.space.RECOMPUTE_NAMES`, fastest first.

    Returns:
        Ideal before each stage and after the last, and each stage's recompute kind;
        None if no chain fits.
    """
    table = actions(
        bare.schedule, bare.mesh.pp, bare.virtual_stages, bare.num_microbatches
    )
    scale = bare.microbatch_size / context.graph.batch / bare.mesh.cp
    cut = ideals.cut_bytes * scale * context.element_ratio
    types, held, limit = stage_limits(context, bare, costs, table)
    work = (costs.forward_s[:, 0] + costs.backward_s[:, 0]).min(axis=0) @ ideals.bits.T
    # A stage that computes for longer cannot be part of the chain.
    short = work[None, :] - work[:, None] < below_s
    first, second = np.nonzero(ideals.inside & short)
    pairs = _Pairs(bits=ideals.bits, first=first, second=second)
    fixed, kept = span_memory(context, bare, costs, pairs, cut, cut)
    chosen = list(kinds)
    problem = (
        np.ascontiguousarray(span_times(costs, pairs)[:, chosen]),
        np.ascontiguousarray(fixed[chosen]),
        np.ascontiguousarray(kept[chosen]),
        np.searchsorted(first, np.arange(len(ideals.bits) + 1)),
        second,
        types,
        held,
        limit,
    )
    choice = np.zeros((len(types), len(ideals.bits), 2), dtype=np.int64)
    bottleneck = _solve(*problem, below_s, choice)
    if np.isinf(bottleneck):
        return None
    _solve(*problem, -bottleneck * (1 + 1e-9), choice)
    chain, recompute = [0], []
    for stage in range(len(types)):
        onward, kind = (int(x) for x in choice[stage, chain[-1]])
        chain.append(onward)
        recompute.append(kinds[kind])
    return chain, recompute


def along_ideals(
    request: Request, model: CostModel, candidates: Sequence[Candidate], most: int
) -> Iterator[Candidate]:
    """Recut the fastest pipelines along ideals, and price those that get faster.

    The fastest of each schedule is among them, because another cut may make another
    schedule best. Launchers cannot express stages whose units lie apart.

    Args:
        request: The question.
        model: The cost model that priced the candidates.
        candidates: Candidates with stages that are runs of program order.
        most: Most candidates to price.
    """
    found = [
        one
        for one in candidates
        if one.strategy.mesh.pp > 1 and not one.strategy.sharding.sequence_parallel
    ]
    if request.launcher_limits is not None or not found:
        return
    ideals = ideals_of(request.context.graph)
    if ideals is None:
        return
    found.sort(
        key=lambda one: (
            not one.cost.fits,
            score(one.cost, one.strategy.mesh.num_devices, request.objective),
        )
    )
    fastest = {one.strategy.schedule: one for one in reversed(found)}
    chosen = {id(one): one for one in (*fastest.values(), *found[:_MOST_RECUT])}
    free = "recompute" not in request.pins
    for one in list(chosen.values())[:most]:
        strategy = _recut(model, ideals, one.strategy, free_recompute=free)
        if strategy is not None:
            yield Candidate(strategy=strategy, cost=model.cost(strategy))


def _recut(
    model: CostModel, ideals: Ideals, line: Strategy, *, free_recompute: bool
) -> Strategy | None:
    """Cut a strategy along ideals; None if its slowest stage does not get faster."""
    context, stages = model.context, model.stages(line)
    times = stages.times
    slowest = float((times.forward + times.backward).max())
    used = tuple(sorted({RECOMPUTE_NAMES.index(one.recompute) for one in line.stages}))
    mixed = free_recompute and not line.schedule_spec.splits_backward
    found = best_chain(
        context,
        ideals,
        line,
        stages.costs,
        below_s=slowest * (1 - _WORTH),
        kinds=(0, 1, 2) if mixed else used,
    )
    if found is None:
        return None
    chain, kinds = found
    names, made = context.graph.unit_names, []
    for stage, before, after, kind in zip(
        line.stages, chain[:-1], chain[1:], kinds, strict=True
    ):
        units = np.flatnonzero(ideals.bits[after] & ~ideals.bits[before])
        change = {
            "modules": tuple(names[unit] for unit in units),
            "recompute": RECOMPUTE_NAMES[kind],
        }
        made.append(stage.model_copy(update=change))
    return line.model_copy(update={"stages": tuple(made)})
