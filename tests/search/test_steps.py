"""Searches that pause between small steps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.search.campaign import Campaign
from planner.search.device_order.climb import Limits, climb, climb_in_steps
from planner.search.device_order.screening import screen, screen_in_steps
from planner.search.evolutionary import EvolutionaryPartitioner
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.moves import Solution
from planner.search.steps import Steps, completed
from planner.space import StrategyTable, enumerate_strategies
from tests.cost.made import device, hosts, request_for, uniform_graph
from tests.search.device_order.made import mixed_hosts, opened, prepared

Array = NDArray[np.float64]

SHORT = hosts((2, 4, device(memory_bytes=1.71e9)))


def _counted(to: int, seen: list[int]) -> Steps[str]:
    for number in range(to):
        seen.append(number)
        yield
    return "done"


def test_a_search_in_steps_is_completed_with_its_result() -> None:
    seen: list[int] = []
    assert completed(_counted(3, seen)) == "done"
    assert seen == [0, 1, 2]
    assert completed(_counted(0, seen)) == "done"


def test_a_screening_pauses_between_batches_and_finds_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request, groups, choices = prepared(mixed_hosts())
    asked = request, CostModel(request.context), groups, choices
    every = np.arange(len(choices))
    whole = screen(*asked, every)
    monkeypatch.setattr("planner.search.device_order.screening._AT_ONCE", 1)
    steps = screen_in_steps(*asked, every)
    pauses = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value
            break
        pauses += 1
    assert pauses > len(whole.choice) // 2
    assert found.choice.tolist() == whole.choice.tolist()
    assert found.score == pytest.approx(whole.score)


def test_a_climb_pauses_after_each_round() -> None:
    pricer, _ = opened(mixed_hosts())
    layouts = pricer.layouts
    start = pricer.price(np.arange(len(layouts)), layouts.sequence)
    once = climb(pricer, start, np.random.default_rng(0), Limits(rounds=5))
    steps = climb_in_steps(pricer, start, np.random.default_rng(0), Limits(rounds=5))
    for _ in range(5):
        next(steps)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value.score.tolist() == once.score.tolist()


def test_a_simulation_stands_in_for_a_price_that_was_not_asked_for() -> None:
    request = request_for(uniform_graph(12), hosts((2, 4, device())), 16)
    campaign = Campaign(request)
    table = StrategyTable.concatenate(list(enumerate_strategies(request.facts)))
    row = table[np.flatnonzero(table.pp > 1)].row(0)
    one = Solution(order=request.context.order, row=row)
    value = campaign.simulate(one)
    assert value < 1e12
    assert campaign.corrected(one) == value == campaign.best_score
    assert campaign.best(1) == [one]
    # Without a price nothing is learned of the row under other orders.
    turned = Solution(order=one.order[::-1].copy(), row=row)
    campaign.price([turned])
    plain = Campaign(request)
    assert campaign.corrected(turned) == plain.price([turned])[0]


def test_a_solution_that_was_forgotten_is_priced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_for(uniform_graph(12), SHORT, 48)
    campaign = Campaign(request)
    table = StrategyTable.concatenate(list(enumerate_strategies(request.facts)))
    order = request.context.order
    every = [Solution(order=order, row=row) for row in table.rows()]

    def numbers() -> Array:
        return np.array([[campaign.corrected(s), campaign.unlimited(s)] for s in every])

    def kinds() -> list[object]:
        return [(campaign.may_fit(one), campaign.price_key(one)) for one in every]

    campaign.price(every)
    campaign.simulate(every[0])
    priced, known = numbers(), kinds()
    monkeypatch.setattr("planner.search.campaign._REMEMBERED", 4)
    turned = [Solution(order=order[::-1].copy(), row=every[0].row)]
    campaign.price(turned)
    assert not all(campaign.is_priced(one) for one in every)
    assert kinds() == known
    assert numbers() == pytest.approx(priced, rel=1e-12)


def test_evolution_goes_on_where_others_made_room_for_their_prices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = request_for(uniform_graph(12), mixed_hosts(), 16, time_budget_s=1e6)
    campaign = Campaign(request)
    campaign.price(
        [
            Solution(order=request.context.order, row=row)
            for table in enumerate_strategies(request.facts)
            for row in table.rows()
        ]
    )
    steps = EvolutionaryPartitioner().contend(campaign)
    while not campaign.has_fit:
        next(steps)
    monkeypatch.setattr("planner.search.campaign._REMEMBERED", 2)
    priced = campaign.evaluations["analytic"]
    for _ in range(12):
        campaign._forget()
        next(steps)
    assert campaign.evaluations["analytic"] > priced


@pytest.mark.parametrize(("action_s", "tried"), [(0.0, True), (1e9, False)])
def test_schedules_are_tried_that_there_is_time_to_lay_out(
    action_s: float, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.search.campaign._ACTION_S", action_s)
    cluster = hosts((2, 4, device()))
    request = request_for(uniform_graph(12), cluster, 16, time_budget_s=1e6)
    campaign = Campaign(request)
    table = StrategyTable.concatenate(list(enumerate_strategies(request.facts)))
    row = table[np.flatnonzero(table.pp > 1)].row(0)
    one = Solution(order=request.context.order, row=row)
    campaign.price([one])
    campaign.simulate(one)
    before = campaign.evaluations["analytic"]
    campaign._try_schedules()
    assert (campaign.evaluations["analytic"] > before) == tried


def test_where_nothing_fits_the_least_excess_is_simulated_first() -> None:
    request = request_for(uniform_graph(12), SHORT, 48, evaluation_budget=400)
    campaign = Campaign(request)
    steps = ExhaustivePartitioner().contend(campaign)
    excess: list[float] = []
    while not campaign.has_fit:
        many = len(campaign.simulated)
        next(steps)
        new = campaign.simulated[many:]
        excess += [one.cost.lack_bytes for one in new]
    priced = StrategyTable.concatenate(list(enumerate_strategies(request.facts)))
    assert not campaign.price_table(
        priced,
        request.context.order[None, :],
        np.zeros(len(priced), dtype=np.int64),
    ).fits.all()
    # A few simulations are enough, though most of the space exceeds memory.
    assert len(excess) < 20
