"""Searches that race for one budget."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import Request, SearchResult, get_partitioner, score
from planner.search.campaign import Campaign
from planner.search.evolutionary import EvolutionaryPartitioner
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.expert import ExpertPartitioner
from planner.search.moves import Solution
from planner.search.race import Racer, race
from planner.search.refine import candidates_of_row
from tests.cost.made import device, hosts, request_for, row, uniform_graph

EVEN = hosts((2, 4, device()))
MIXED = hosts((1, 4, device()), (2, 2, device("other", memory_bytes=9e9)))
NAMES = ("expert", "learned", "exhaustive", "evolutionary")


class _Scripted:
    """Simulates the solutions of a list, worst first, one a step.

    Args:
        name: Of the contender.
        waits: Steps that bring nothing before the first solution.
        most: Solutions.
    """

    first_share = 0.1

    def __init__(self, name: str, waits: int, most: int) -> None:
        self.name, self._waits, self._most = name, waits, most
        self.steps = 0

    def contend(self, campaign: Campaign) -> Iterator[None]:
        for solution in self._listed(campaign):
            if solution is not None:
                campaign.simulate(solution)
            self.steps += 1
            yield

    def _listed(self, campaign: Campaign) -> Iterator[Solution | None]:
        yield from [None] * self._waits
        found = _solutions(campaign)
        yield from found[: self._most]
        while True:
            yield None


def _solutions(campaign: Campaign) -> list[Solution]:
    """Every row of the space in the request's order, the slowest first."""
    from planner.space import enumerate_strategies

    order = campaign.request.context.order
    rows = [
        row
        for table in enumerate_strategies(campaign.request.facts)
        for row in table.rows()
    ]
    found = [Solution(order=order, row=row) for row in rows]
    scores = campaign.price(found)
    kept = np.argsort(-scores, kind="stable")
    return [found[at] for at in kept.tolist() if scores[at] < 1e12]


def _asked(budget: int | None = 40, **changes: float) -> Request:
    return request_for(uniform_graph(12), EVEN, 16, evaluation_budget=budget, **changes)


def _best(results: list[SearchResult], request: Request) -> float:
    return min(
        score(one.cost, one.strategy.mesh.num_devices, request.objective)
        for result in results
        for one in result.candidates
    )


def test_every_contender_gets_a_first_share() -> None:
    racers = [_Scripted(name, waits=1000, most=0) for name in "abc"]
    race(_asked(), racers)
    assert all(one.steps * 0.5 / 40 >= 0.1 for one in racers)


def test_who_improves_the_plan_gets_more_than_an_equal_share() -> None:
    idle, better = _Scripted("idle", 1000, 0), _Scripted("better", 0, 1000)
    spent = {one.partitioner: one.share for one in race(_asked(), [idle, better])}
    assert spent["better"] is not None
    assert spent["better"] > 0.6


def test_a_late_winner_still_gets_its_turns() -> None:
    early, late = _Scripted("early", 0, 6), _Scripted("late", 30, 1000)
    results = {one.partitioner: one for one in race(_asked(100), [early, late])}
    assert results["late"].best_after is not None
    assert results["early"].best_after is not None
    assert results["late"].best_after > results["early"].best_after
    assert results["late"].candidates


def test_shares_are_of_one_budget() -> None:
    request = _asked(10)
    racers = [get_partitioner(name) for name in NAMES]
    contenders = [one for one in racers if isinstance(one, Racer)]
    assert len(contenders) == len(NAMES)
    results = race(request, contenders, budgets=4)
    assert sum(one.evaluations["simulated"] for one in results) <= 40
    shares = [one.share for one in results if one.share is not None]
    assert sum(shares) == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize("cluster", [EVEN, MIXED], ids=["even", "mixed"])
def test_the_same_seed_and_budget_run_the_same_race(cluster: object) -> None:
    def run() -> list[SearchResult]:
        request = request_for(uniform_graph(12), cluster, 16, evaluation_budget=12)
        racers = [get_partitioner(name) for name in NAMES]
        return race(request, [one for one in racers if isinstance(one, Racer)])

    first, second = run(), run()
    for one, other in zip(first, second, strict=True):
        here, there = ([c.strategy for c in r.candidates] for r in (one, other))
        assert here == there
        assert (one.share, one.best_after) == (other.share, other.best_after)
        assert one.evaluations == other.evaluations


@pytest.mark.parametrize("cluster", [EVEN, MIXED], ids=["even", "mixed"])
def test_a_race_is_no_worse_than_plain_orders_alone(cluster: object) -> None:
    request = request_for(uniform_graph(12), cluster, 16)
    alone = [get_partitioner("exhaustive").search(request)]
    racers = [ExpertPartitioner(), ExhaustivePartitioner(), EvolutionaryPartitioner()]
    assert _best(race(request, racers), request) <= _best(alone, request) * (1 + 1e-9)


def test_without_time_the_first_plan_that_fits_is_the_answer() -> None:
    request = request_for(uniform_graph(12), MIXED, 16, time_budget_s=0.0)
    racers = [ExpertPartitioner(), ExhaustivePartitioner(), EvolutionaryPartitioner()]
    results = race(request, racers)
    assert sum(len(one.candidates) for one in results) >= 1
    assert results[2].evaluations["simulated"] == 0


def test_the_largest_goes_on_where_the_time_is_up_and_nothing_fits() -> None:
    request = request_for(uniform_graph(12), EVEN, 16, time_budget_s=1e-9)
    small, large = _Scripted("small", 0, 1), _Scripted("large", 20, 1)
    large.first_share = 0.7
    first, second = race(request, [small, large])
    assert first.candidates == ()
    assert len(second.candidates) == 1


def test_the_largest_goes_on_until_a_plan_of_its_own_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(_Scripted):
        """Thinks for more than its share, then simulates the best of all."""

        first_share = 0.9

        def _listed(self, campaign: Campaign) -> Iterator[Solution | None]:
            now[0] += 0.95
            yield None
            yield _solutions(campaign)[-1]

    slow, poor = Slow("slow", 0, 0), _Scripted("poor", 0, 1)
    request = _asked(None, time_budget_s=1.0)
    results = race(request, [slow, poor])
    assert results[0].candidates
    assert _best(results, request) == _best(results[:1], request)


def test_a_race_ends_where_nothing_fits() -> None:
    tiny = hosts((2, 2, device(memory_bytes=1e6)))
    request = request_for(uniform_graph(12), tiny, 16, time_budget_s=0.2)
    racers = [ExpertPartitioner(), ExhaustivePartitioner(), EvolutionaryPartitioner()]
    assert not any(one.candidates for one in race(request, racers))


def test_schedules_are_varied_where_memory_is_short() -> None:
    """Some schedules even out the memory of stages that lack it under 1F1B."""
    speed = {"float32": 4e13, "bfloat16": 8e13}
    large = device(memory_bytes=2.73e9)
    small = device("small", memory_bytes=1.82e9, peak_flops_per_s=speed)
    request = request_for(
        uniform_graph(12), hosts((1, 1, large), (1, 2, small)), 32, devices="any"
    )
    raced = race(request, [ExhaustivePartitioner()])[0].candidates
    best = min(one.cost.step_time_s for one in raced if one.cost.fits)
    eager = schedule_spec("Eager1F1B").code
    shape = {"pp": 3, "microbatch_size": 4, "num_microbatches": 8, "recompute": 2}
    known = candidates_of_row(
        CostModel(request.context), row(**shape, schedule=eager), most=1
    )[0]
    assert known.cost.fits
    assert best <= 1.0001 * known.cost.step_time_s
