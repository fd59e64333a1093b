"""Memetic evolution of device orders and strategies together."""

from __future__ import annotations

import itertools

import numpy as np

from planner.search.base import Request, SearchResult
from planner.search.campaign import Campaign
from planner.search.moves import Solution, crossed
from planner.search.starts import begin

__all__ = ["EvolutionaryPartitioner", "evolve"]

#: Solutions that live, and that are made in a generation.
_PEOPLE, _CHILDREN = 64, 128
#: Generations where no time is given.
_GENERATIONS = 40
#: Generations without anything better after which most of the population is replaced.
_PATIENCE = 25
#: Of one mesh at most this share of the population, so that it does not become one.
_OF_A_MESH = 4
#: Places that are kept for what lacks memory but would be faster, and of one mesh.
_MISSES, _MISSES_OF_A_MESH = 12, 3
#: Generations between two simulations of what lacks the least memory.
_MISS_EVERY = 2
#: Share of the time that evolution may take; the rest is the finalists'.
_SHARE = 0.9


class EvolutionaryPartitioner:
    """Evolves solutions (an order of devices, a row of the table) by closed forms.

    It starts from rules of thumb, the best rows of the whole space and the placements
    of DT-FM (:mod:`planner.search.dtfm`). A child takes pieces of two orders and the
    row of one parent, then moves; cuts and recomputation stay exact, and the simulator
    judges the best of every generation.

    Source of the scheme: Yuan et al. 2022, DT-FM (2206.01288), section 3.3.
    """

    name = "evolutionary"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        campaign = Campaign(request)
        begin(campaign)
        evolve(campaign)
        campaign.finish()
        return campaign.result(self.name)


def evolve(campaign: Campaign, generations: int | None = None) -> None:
    """Improve what a campaign has priced so far, generation by generation.

    Args:
        campaign: Knows solutions to begin with.
        generations: Most of them where there is no clock; None for the usual number.
    """
    most = generations or _GENERATIONS
    people = _selected(campaign, campaign.best(8 * _PEOPLE))
    best, idle, generation = np.inf, 0, 0
    while people and not campaign.is_over(generation, most, _SHARE):
        generation += 1
        campaign.look_around(people)
        children = [_child(campaign, people) for _ in range(_CHILDREN)]
        people = _selected(campaign, [*children, *people])
        campaign.simulate_best(campaign.share_of(most))
        if generation % _MISS_EVERY == 0:
            _try_a_miss(campaign, people)
        leader = campaign.corrected(people[0])
        idle = 0 if leader < best * (1 - 1e-9) else idle + 1
        best = min(best, leader)
        if idle == _PATIENCE:
            people, best, idle = _refreshed(campaign, people), np.inf, 0


def _child(campaign: Campaign, people: list[Solution]) -> Solution:
    """Cross two parents, the better ones more often, and move the result."""
    rng = campaign.rng
    one, other = (people[int(len(people) * rng.random() ** 2)] for _ in range(2))
    order = one.order
    if rng.random() < 0.3 and other is not one:
        usable = np.isin(other.order, campaign.pool_of(one))
        order = crossed(order, other.order[usable], rng)
    child = Solution(order=order, row=one.row)
    for _ in range(1 + int(rng.random() < 0.4)):
        child = campaign.moved(child)
    return child


def _selected(campaign: Campaign, people: list[Solution]) -> list[Solution]:
    """The best, those alike once, not too many of one mesh.

    Of those alike the first: newcomers, if they are named first, so that the
    population drifts where nothing gets better.
    """
    campaign.price(people)
    alike: dict[object, Solution] = {}
    for one in people:
        alike.setdefault(campaign.alike(one), one)
    unique = list(alike.values())
    scores = [campaign.corrected(one) for one in unique]
    ranked = [unique[at] for at in np.argsort(scores, kind="stable").tolist()]
    misses = _few_of_a_mesh(_near_misses(campaign, ranked), _MISSES, _MISSES_OF_A_MESH)
    kept = _few_of_a_mesh(ranked, _PEOPLE - len(misses), _PEOPLE // _OF_A_MESH)
    inside = {one.key for one in kept}
    return [*kept, *(one for one in misses if one.key not in inside)]


def _try_a_miss(campaign: Campaign, people: list[Solution]) -> None:
    """Simulate one that lacks memory by closed forms: exact cuts mind it."""
    for one in _near_misses(campaign, people):
        if not campaign.was_simulated(one):
            campaign.simulate(one)
            return


def _few_of_a_mesh(ranked: list[Solution], count: int, each: int) -> list[Solution]:
    """The first of some solutions, of one mesh at most so many."""
    kept: list[Solution] = []
    of_mesh: dict[tuple[int, ...], int] = {}
    for one in ranked:
        if len(kept) == count:
            break
        if of_mesh.get(one.mesh, 0) < each:
            of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
            kept.append(one)
    return kept


def _near_misses(campaign: Campaign, ranked: list[Solution]) -> list[Solution]:
    """Return those that lack memory but would be faster than all that fit.

    Between what fits and something better that does there may be nothing that fits:
    descendants of these find a way round. What lacks the least and what would be the
    fastest come in turn: the first is often hardly faster.
    """
    best = campaign.corrected(ranked[0]) if ranked else 0.0
    least = [
        one for one in ranked if not campaign.may_fit(one) and campaign.hope(one) < best
    ]
    fastest = sorted(least, key=campaign.hope)
    turns = itertools.chain.from_iterable(zip(least, fastest, strict=True))
    return list({one.key: one for one in turns}.values())


def _refreshed(campaign: Campaign, people: list[Solution]) -> list[Solution]:
    """A few survivors, and descendants of them that have moved far."""
    fresh = people[:4]
    for place in range(_PEOPLE - len(fresh)):
        one = people[place % len(people)]
        for _ in range(6):
            one = campaign.moved(one)
        fresh.append(one)
    return _selected(campaign, fresh)
