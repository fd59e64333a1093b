"""Memetic evolution of device orders and strategies together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from planner.search.base import Request, SearchResult
from planner.search.campaign import Campaign
from planner.search.moves import Solution, crossed
from planner.search.starts import begin, lay

__all__ = ["EvolutionaryPartitioner", "evolve"]

#: Solutions in the population, and children made in a generation.
_POPULATION, _CHILDREN = 64, 128
#: Generations without a time budget.
_GENERATIONS = 40
#: Generations without a budget in a race, solutions that each simulates there, and
#: finds of others that enter each.
_FEW_GENERATIONS, _RACED, _ELITE = 12, 2, 8
#: Places in the population for the best on each smaller number of devices.
_SMALL = 8
#: Generations without progress after which most of the population is replaced.
_PATIENCE = 25
#: One mesh has at most 1 / this of the population, so that others survive.
_OF_A_MESH = 4
#: Places in the population for near-feasible solutions, and most with one mesh.
_NEAR, _NEAR_PER_MESH = 12, 3
#: Generations between two simulations of near-feasible solutions.
_NEAR_EVERY = 2
#: Share of the time after which a race's evolution ends where nothing fits.
_PATIENT = 1.3
#: Share of the time for evolution; the rest is for the finalists.
_SHARE = 0.9


class EvolutionaryPartitioner:
    """Evolves solutions (an order of devices, a row of the table) by closed forms.

    It starts from rules of thumb, the best rows of the whole space and the placements
    of DT-FM (:mod:`planner.search.dtfm`). A child takes pieces of two orders and the
    row of one parent, then moves; cuts and recomputation are exact, and the simulator
    prices the best of every generation.

    Source of the scheme: Yuan et al. 2022, DT-FM (2206.01288), section 3.3.
    """

    name = "evolutionary"
    first_share = 0.15

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        campaign = Campaign(request)
        begin(campaign)
        evolve(campaign)
        campaign.finish()
        return campaign.result(self.name)

    def contend(self, campaign: Campaign) -> Iterator[None]:
        """Take part in a race; see :class:`planner.search.race.Racer`.

        The population is what all contenders have found so far, laid over the devices
        in every way. Without a budget it evolves for a few generations; and not at all
        where no order of devices differs from another, as all rows were priced.
        """
        request = campaign.request
        free = request.time_budget_s is None and request.evaluation_budget is None
        if free and request.context.cluster.is_uniform:
            return
        for _ in lay(campaign):
            yield
        most = _FEW_GENERATIONS if free else None
        timed = request.time_budget_s is not None
        for _ in _generations(campaign, lambda: _RACED, most, pauses=timed):
            yield
            late = campaign.is_late(1.0 if campaign.has_fit else _PATIENT)
            if campaign.left == 0 or late:
                return


def evolve(campaign: Campaign, generations: int | None = None) -> None:
    """Improve the solutions of a campaign, generation by generation.

    Args:
        campaign: A campaign with solutions to begin with.
        generations: Most generations without a time budget; None for the default.
    """
    most = generations or _GENERATIONS
    steps = _generations(campaign, lambda: campaign.share_of(most))
    done = 0
    while not campaign.is_over(done, most, _SHARE) and next(steps, False) is None:
        done += 1


def _generations(
    campaign: Campaign,
    share: Callable[[], int],
    most: int | None = None,
    *,
    pauses: bool = False,
) -> Iterator[None]:
    """Improve the population, and yield after each generation.

    Args:
        campaign: A campaign with solutions to begin with.
        share: Says how many solutions to simulate in a generation.
        most: Most generations; None for as many as are asked for.
        pauses: Whether to yield before simulations, too.
    """
    population = _selected(campaign, campaign.best(8 * _POPULATION))
    best, idle, generation = np.inf, 0, 0
    while population and (most is None or generation < most):
        generation += 1
        campaign.find_neighbours(population)
        children = [_child(campaign, population) for _ in range(_CHILDREN)]
        # What others found since the last generation is in it, too.
        found = campaign.best(_ELITE)
        population = _selected(campaign, [*children, *population, *found])
        if pauses:
            yield
        campaign.simulate_best(share())
        if pauses:
            yield
        if generation % _NEAR_EVERY == 0:
            _simulate_near_feasible(campaign, population)
        leader = campaign.corrected(population[0])
        idle = 0 if leader < best * (1 - 1e-9) else idle + 1
        best = min(best, leader)
        if idle == _PATIENCE:
            population, best, idle = _refreshed(campaign, population), np.inf, 0
        yield


def _child(campaign: Campaign, population: list[Solution]) -> Solution:
    """Cross two parents, the better ones more often, and move the result."""
    rng = campaign.rng
    one, other = (
        population[int(len(population) * rng.random() ** 2)] for _ in range(2)
    )
    order = one.order
    if rng.random() < 0.3 and other is not one:
        usable = np.isin(other.order, campaign.pool_of(one))
        order = crossed(order, other.order[usable], rng)
    child = Solution(order=order, row=one.row)
    for _ in range(1 + int(rng.random() < 0.4)):
        child = campaign.moved(child)
    return child


def _selected(campaign: Campaign, population: list[Solution]) -> list[Solution]:
    """Return the best solutions, equal ones once, few with one mesh.

    The first of equal solutions is kept. With children before parents the population
    drifts where nothing gets better.
    """
    campaign.price(population)
    distinct: dict[object, Solution] = {}
    for one in population:
        distinct.setdefault(campaign.price_key(one), one)
    unique = list(distinct.values())
    scores = [campaign.corrected(one) for one in unique]
    ranked = [unique[at] for at in np.argsort(scores, kind="stable").tolist()]
    near = _few_of_a_mesh(_near_feasible(campaign, ranked), _NEAR, _NEAR_PER_MESH)
    kept = _few_of_a_mesh(ranked, _POPULATION - len(near), _POPULATION // _OF_A_MESH)
    inside = {one.key for one in kept}
    others = [*near, *_small_fleets(ranked)]
    return [*kept, *(one for one in others if one.key not in inside)]


def _small_fleets(ranked: list[Solution]) -> list[Solution]:
    """Return the best solution on each of the best few numbers of devices."""
    kept: dict[int, Solution] = {}
    for one in ranked:
        kept.setdefault(len(one.order), one)
        if len(kept) == _SMALL:
            break
    return list(kept.values())


def _simulate_near_feasible(campaign: Campaign, population: list[Solution]) -> None:
    """Simulate a solution that exceeds memory by closed forms: exact cuts may fit."""
    for one in _near_feasible(campaign, population):
        if not campaign.was_simulated(one):
            campaign.simulate(one)
            return


def _few_of_a_mesh(ranked: list[Solution], count: int, each: int) -> list[Solution]:
    """Return the first ``count`` solutions, at most ``each`` with one mesh."""
    kept: list[Solution] = []
    of_mesh: dict[tuple[int, ...], int] = {}
    for one in ranked:
        if len(kept) == count:
            break
        if of_mesh.get(one.mesh, 0) < each:
            of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
            kept.append(one)
    return kept


def _near_feasible(campaign: Campaign, ranked: list[Solution]) -> list[Solution]:
    """Return solutions that exceed memory but would be faster than all that fit.

    Moves from one solution that fits to a better one may lead through solutions that
    exceed memory. Those with the least excess and the fastest ones come in turn: the
    former are often hardly faster.
    """
    best = campaign.corrected(ranked[0]) if ranked else 0.0
    least = [
        one
        for one in ranked
        if not campaign.may_fit(one) and campaign.unlimited(one) < best
    ]
    fastest = sorted(least, key=campaign.unlimited)
    turns = itertools.chain.from_iterable(zip(least, fastest, strict=True))
    return list({one.key: one for one in turns}.values())


def _refreshed(campaign: Campaign, population: list[Solution]) -> list[Solution]:
    """Return a few survivors, and descendants of them that have moved far."""
    fresh = population[:4]
    for place in range(_POPULATION - len(fresh)):
        one = population[place % len(population)]
        for _ in range(6):
            one = campaign.moved(one)
        fresh.append(one)
    return _selected(campaign, fresh)
