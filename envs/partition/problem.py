"""Prepare a world for episodes, and price the decisions about it.

The decisions are a mesh and an order of device groups. All else is found by exact
methods: schedule, microbatch, ZeRO stage and recomputation by closed forms, then cuts
and recomputation of each stage, then the price by the simulator. Where there are too
many meshes to choose from, a sample spread over all of them is offered.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from envs.partition.graphs import GraphStore
from envs.partition.padding import Sizes
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.cost import CostModel
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.search import Candidate, Request, get_partitioner, preference, score
from planner.search.base import scores_of
from planner.search.device_order.groups import DeviceGroups, group_devices
from planner.search.device_order.layouts import Layouts
from planner.search.device_order.pricer import OrderPricer, open_order_pricer
from planner.search.device_order.subsets import Choices, list_choices
from planner.search.violations import nearest_violations
from planner.space import MESH_COLUMNS, StrategyTable, expand_meshes

__all__ = [
    "PLAIN",
    "Baseline",
    "Built",
    "Fidelity",
    "Problem",
    "ProblemStore",
    "open_problem",
    "subset",
    "thinned",
    "with_rows",
]

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]
Fidelity = Literal["simulated", "analytic"]


def _shares(many: Index, most: int) -> Index:
    """Divide a number among subsets equally; unused shares go to the others. [n]."""
    share = np.zeros(len(many), dtype=np.int64)
    left = most
    while left > 0 and (open_ := np.flatnonzero(share < many)).size:
        each = max(1, left // len(open_))
        for subset in open_.tolist():
            more = min(each, int(many[subset] - share[subset]), left)
            share[subset] += more
            left -= more
    return share


def thinned(choices: Choices, among: Index, most: int) -> Index:
    """Select a number of choices: of every subset, evenly over its meshes.

    Meshes of a subset are in the order of their degrees, so that the selection ranges
    from the shallowest pipeline to the deepest. It is deterministic.

    Args:
        choices: All meshes.
        among: Choices to select from, ascending. Shape [n].
        most: Number to select; if there are more subsets, the first subsets keep one
            each.
    Returns:
        Shape [min(n, most)], ascending.
    """
    if len(among) <= most:
        return among
    subset = choices.subset[among]
    numbers, many = np.unique(subset, return_counts=True)
    kept = []
    for number, share in zip(numbers, _shares(many, most).tolist(), strict=True):
        mine = among[subset == number]
        kept.append(mine[np.linspace(0, len(mine) - 1, share).round().astype(int)])
    return np.sort(np.concatenate(kept))


def with_rows(request: Request, choices: Choices) -> Index:
    """Return the choices with at least one legal strategy, ascending. Shape [n].

    Half or more of the meshes have none, and would take the place of others.
    """
    kept = []
    for number in range(len(choices.subsets)):
        mine = np.flatnonzero(choices.subset == number)
        table = expand_meshes(choices.mesh[mine], request.facts, request.pins)
        rows = np.stack([getattr(table, name) for name in MESH_COLUMNS], axis=1)
        both = np.concatenate([np.unique(rows, axis=0), choices.mesh[mine]])
        _, which = np.unique(both, axis=0, return_inverse=True)
        which = which.reshape(-1)
        many = len(both) - len(mine)
        kept.append(mine[np.isin(which[many:], which[:many])])
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, dtype=np.int64)


def subset(choices: Choices, kept: Index) -> Choices:
    """Return some of the choices, over the same subsets."""
    return Choices(
        subsets=choices.subsets, mesh=choices.mesh[kept], subset=choices.subset[kept]
    )


#: Name of the baseline that takes the best mesh under the best plain order.
PLAIN = "plain"
#: Layouts that this baseline cuts exactly and simulates.
_SETTLED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Plan that an episode's plan is compared with.

    Attributes:
        name: Name of the partitioner that found it, or :data:`PLAIN`.
        score: Value of the objective; less is better.
        candidate: The strategy and its price; None with closed forms alone.
    """

    name: str
    score: float
    candidate: Candidate | None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Built:
    """Plan of a mesh and an order.

    Attributes:
        score: Value of the objective; infinite if nothing fits.
        row: Degrees and the rest of the strategy's table row, before schedules were
            compared; None if nothing fits by closed forms.
        order: Device id by rank. Shape [devices].
        candidate: The strategy and its price; None with closed forms alone, or if
            nothing fits.
    """

    score: float
    row: dict[str, int] | None
    order: Index
    candidate: Candidate | None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Problem:
    """A world prepared for an episode.

    Attributes:
        world: The world.
        request: Its request.
        groups: Groups of its devices.
        choices: Meshes that are offered.
        fits: True for meshes with a row that fits under a plain order. Shape [choices].
        seen: Features of the problem.
        pricer: Prices arrangements of the meshes that fit.
        baseline: The plan to beat.
        fidelity: Fidelity of all prices.
    """

    world: World
    request: Request
    groups: DeviceGroups
    choices: Choices
    fits: Mask
    seen: Observed
    pricer: OrderPricer
    baseline: Baseline
    fidelity: Fidelity

    def mesh(self, choice: int) -> dict[str, int]:
        """Return the degrees of an offered mesh, by axis."""
        degrees = self.choices.mesh[choice].tolist()
        return dict(zip(MESH_COLUMNS, degrees, strict=True))

    def build(self, choice: int, sequence: Index) -> Built:
        """Find the best strategy of a mesh on an order of groups.

        Args:
            choice: Number of an offered mesh.
            sequence: Groups in order, -1 after the last; enough for its devices.
        """
        subset = self.choices.subsets[self.choices.subset[choice]]
        table = expand_meshes(
            self.choices.mesh[[choice]], self.request.facts, self.request.pins
        )
        order = self.groups.orders(sequence[None, :], subset.count)[0]
        if not len(table):
            return Built(score=np.inf, row=None, order=order, candidate=None)
        # All rows of the mesh, because the best of a plain order may not fit here.
        local = replace(
            self.pricer,
            layouts=Layouts(
                choice=np.array([choice]),
                rows=table,
                starts=np.array([0, len(table)]),
                count=np.array([subset.count]),
                usable=subset.usable[None, :],
                score=np.full(1, np.inf),
                sequence=sequence[None, :],
            ),
        )
        priced = local.price(np.zeros(1, dtype=np.int64), sequence[None, :])
        if not np.isfinite(priced.score[0]):
            return Built(score=np.inf, row=None, order=order, candidate=None)
        row = table.row(int(priced.row[0]))
        if self.fidelity == "analytic":
            value = float(priced.score[0])
            return Built(score=value, row=row, order=order, candidate=None)
        best = _best(self.request, local.best_row_candidates(priced, 0, variants=True))
        value = np.inf if best is None else _score(self.request, best)
        return Built(score=value, row=row, order=order, candidate=best)


def _score(request: Request, candidate: Candidate) -> float:
    devices = candidate.strategy.mesh.num_devices
    return score(candidate.cost, devices, request.objective)


def _best(request: Request, candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the best of those that fit; None if there are none."""
    return min(
        (candidate for candidate in candidates if candidate.cost.fits),
        key=lambda candidate: preference(candidate, request.objective),
        default=None,
    )


def _priced_alike(request: Request, candidate: Candidate) -> float:
    """Price a candidate by closed forms; infinite if it does not fit."""
    strategy = candidate.strategy
    order = np.array(strategy.device_ids(), dtype=np.int64)
    table = StrategyTable.from_strategies([strategy])
    costs = CostModel(request.context.reordered(order)).table(table)
    return float(scores_of(costs, table, request.objective)[0])


def _plain(pricer: OrderPricer, fidelity: Fidelity) -> Baseline | None:
    request, layouts = pricer.request, pricer.layouts.best(_SETTLED)
    if fidelity == "analytic":
        return Baseline(name=PLAIN, score=float(layouts.score[0]), candidate=None)
    priced = pricer.price(np.arange(len(layouts)), layouts.sequence)
    found = [
        candidate
        for at in range(len(priced))
        for candidate in pricer.best_row_candidates(priced, at, variants=True)
    ]
    best = _best(request, found)
    if best is None:
        return None
    return Baseline(name=PLAIN, score=_score(request, best), candidate=best)


def _baseline(
    pricer: OrderPricer, names: Sequence[str], fidelity: Fidelity
) -> Baseline | None:
    """Return the best of some baselines; None if none finds a plan that fits."""
    request = pricer.request
    found = []
    for name in names:
        if name == PLAIN:
            found.append(_plain(pricer, fidelity))
            continue
        best = _best(request, get_partitioner(name).search(request).candidates)
        if best is None:
            continue
        if fidelity == "analytic":
            value = _priced_alike(request, best)
            found.append(Baseline(name=name, score=value, candidate=None))
        else:
            value = _score(request, best)
            found.append(Baseline(name=name, score=value, candidate=best))
    known = [one for one in found if one is not None and np.isfinite(one.score)]
    return min(known, key=lambda one: one.score, default=None)


def open_problem(
    world: World,
    sizes: Sizes,
    *,
    baselines: Sequence[str] = ("expert", PLAIN),
    fidelity: Fidelity = "simulated",
    graphs: GraphStore | None = None,
) -> Problem:
    """Read a world, price its meshes under plain orders, and find the baseline.

    Args:
        world: The world.
        sizes: Sizes of observations; if there are more meshes, a sample is offered
            (:func:`thinned`).
        baselines: Names of partitioners, and :data:`PLAIN`.
        fidelity: ``analytic`` prices by closed forms alone.
        graphs: Store of model graphs.

    Raises:
        NoFeasiblePlanError: If no mesh is legal, or none fits in memory.
        StrategyError: If the world is too large for observations.
        UnknownNameError: If there is no such baseline.
        MeshwrightError: As :meth:`World.request`.
    """
    request = world.request(graphs)
    groups = group_devices(request.context)
    # Before anything is priced.
    units = len(request.context.graph.units)
    if reason := sizes.violation(units=units, groups=len(groups)):
        raise StrategyError(f"world {world.name!r}: {reason}")
    every = list_choices(request, groups)
    if not len(every):
        raise NoFeasiblePlanError([nearest_violations(request)])
    kept, pricer = _offered(request, groups, every, sizes)
    if pricer is None:
        raise _nothing_fits(world, request, every)
    choices = subset(every, kept)
    baseline = _baseline(pricer, baselines, fidelity) or _plain(pricer, fidelity)
    if baseline is None:
        raise _nothing_fits(world, request, every)
    seen = observe(request, groups, choices)
    edges = seen.unit_edges.shape[1]
    if reason := sizes.violation(units=units, groups=len(groups), unit_edges=edges):
        raise StrategyError(f"world {world.name!r}: {reason}")
    fits = np.zeros(len(kept), dtype=np.bool_)
    fits[pricer.layouts.choice] = True
    return Problem(
        world=world,
        request=request,
        groups=groups,
        choices=choices,
        fits=fits,
        seen=seen,
        pricer=pricer,
        baseline=baseline,
        fidelity=fidelity,
    )


def _offered(
    request: Request, groups: DeviceGroups, every: Choices, sizes: Sizes
) -> tuple[Index, OrderPricer | None]:
    """Return the meshes on offer, and their pricer; None if no mesh at all fits."""
    whole = np.arange(len(every))
    if len(every) > sizes.meshes:
        whole = with_rows(request, every)
    kept = thinned(every, whole, sizes.meshes)
    pricer = open_order_pricer(request, every, groups, kept)
    if pricer is None and len(kept) < len(whole):
        # All that fits may be among the meshes left out.
        found = open_order_pricer(request, every, groups, whole)
        if found is not None:
            kept = thinned(every, np.sort(found.layouts.choice), sizes.meshes)
            pricer = open_order_pricer(request, every, groups, kept)
    if pricer is None:
        return kept, None
    # The pricer numbers choices as they are offered.
    choice = np.searchsorted(kept, pricer.layouts.choice)
    return kept, replace(pricer, layouts=replace(pricer.layouts, choice=choice))


def _nothing_fits(
    world: World, request: Request, every: Choices
) -> NoFeasiblePlanError:
    legal_rows = (
        len(expand_meshes(every.mesh[every.subset == k], request.facts, request.pins))
        for k in range(len(every.subsets))
    )
    if not any(legal_rows):
        return NoFeasiblePlanError([nearest_violations(request)])
    return NoFeasiblePlanError(
        [
            f"world {world.name!r}: none of {len(every)} meshes has a strategy that "
            f"fits in memory_fraction={world.memory_fraction} of the devices' memory "
            f"under any plain order; use more devices or a smaller model"
        ]
    )


#: Drawn worlds in a row that may be unsuitable before that is an error.
_ATTEMPTS = 100
#: Problems that are kept, because preparing one takes longer than an episode.
_KEPT = 256


class ProblemStore:
    """Draws worlds and prepares them; several environments may share one.

    Args:
        worlds: A sampler to draw from, or some worlds.
        sizes: Sizes of observations.
        baselines: As for :func:`open_problem`.
        fidelity: As for :func:`open_problem`.
        pool: Worlds of a sampler that are drawn from.

    Raises:
        StrategyError: If there are no worlds.
    """

    def __init__(
        self,
        worlds: WorldSampler | Sequence[World],
        sizes: Sizes,
        *,
        baselines: Sequence[str],
        fidelity: Fidelity,
        pool: int,
    ) -> None:
        if not isinstance(worlds, WorldSampler) and not len(worlds):
            raise StrategyError("worlds is empty; give at least one world")
        if pool < 1:
            raise StrategyError(f"pool={pool} of worlds is at least 1")
        self.worlds, self.sizes, self.pool = worlds, sizes, pool
        self.baselines, self.fidelity = tuple(baselines), fidelity
        self._ready: OrderedDict[str, Problem] = OrderedDict()
        self._drawn: dict[int, World] = {}
        self._refused: dict[int, str] = {}

    def draw(self, rng: np.random.Generator) -> Problem:
        """Draw a world; unsuitable worlds of a sampler are skipped.

        Raises:
            NoFeasiblePlanError: If no mesh of a given world fits.
            StrategyError: If a given world is too large, or if none of many that are
                drawn is suitable.
        """
        if not isinstance(self.worlds, WorldSampler):
            return self.open(self.worlds[int(rng.integers(len(self.worlds)))])
        index = 0
        for _ in range(_ATTEMPTS):
            index = int(rng.integers(self.pool))
            if index in self._refused:
                continue
            if index not in self._drawn:
                self._drawn[index] = self.worlds.world(index)
            try:
                return self.open(self._drawn[index])
            except (NoFeasiblePlanError, StrategyError) as error:
                self._refused[index] = str(error)
        raise StrategyError(
            f"of {_ATTEMPTS} worlds drawn none can be taken; the last: "
            f"{self._refused[index]}"
        )

    def open(self, world: World) -> Problem:
        """Prepare a world, or find it prepared.

        Raises:
            MeshwrightError: As :func:`open_problem`.
        """
        key = world.to_json()
        if key not in self._ready:
            source = self.worlds
            self._ready[key] = open_problem(
                world,
                self.sizes,
                baselines=self.baselines,
                fidelity=self.fidelity,
                graphs=source.graphs if isinstance(source, WorldSampler) else None,
            )
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        self._ready.move_to_end(key)
        return self._ready[key]
