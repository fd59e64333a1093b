"""Evolution goes round what lacks memory."""

from __future__ import annotations

import pytest

from planner.schema.schedules import schedule_spec
from planner.search import Request
from planner.search.campaign import Campaign
from planner.search.evolutionary import evolve
from planner.search.moves import Solution
from planner.space import StrategyTable, enumerate_strategies
from tests.cost.made import device, hosts, request_for, uniform_graph


def tight(memory_bytes: float) -> Request:
    cluster = hosts((2, 4, device(memory_bytes=memory_bytes)))
    # Rows that differ in recomputation alone would come to one cut.
    return request_for(uniform_graph(9), cluster, 36, pins={"recompute": 0})


def priced(request: Request) -> tuple[Campaign, list[Solution]]:
    """Every row under the order of the devices, by closed forms."""
    campaign = Campaign(request)
    table = StrategyTable.concatenate(
        list(enumerate_strategies(request.facts, pins=request.pins))
    )
    every = [Solution(order=request.context.order, row=row) for row in table.rows()]
    campaign.price(every)
    return campaign, every


def faster_misses(campaign: Campaign, every: list[Solution]) -> list[Solution]:
    """Strategies that lack memory but would be faster than all that fit."""
    fits = [campaign.corrected(one) for one in every if campaign.may_fit(one)]
    return [
        one
        for one in every
        if fits and not campaign.may_fit(one) and campaign.unlimited(one) < min(fits)
    ]


@pytest.fixture(scope="module")
def short() -> Request:
    # Few rows fit, none of the fastest.
    request = tight(1.72e9)
    assert len(faster_misses(*priced(request))) > 10
    return request


def test_hope_is_the_score_without_regard_to_memory(short: Request) -> None:
    roomy, every = priced(tight(80e9))
    campaign, rows = priced(short)
    missed = [index for index, one in enumerate(rows) if not campaign.may_fit(one)]
    assert 0 < len(missed) < len(rows)
    for index, one in enumerate(rows):
        assert one.row == every[index].row
        assert campaign.unlimited(one) == pytest.approx(roomy.corrected(every[index]))
        if index not in missed:
            assert campaign.unlimited(one) == campaign.corrected(one)


def test_what_lacks_memory_but_would_be_faster_is_cut_exactly(short: Request) -> None:
    campaign, rows = priced(short)
    faster = faster_misses(campaign, rows)
    assert not any(map(campaign.was_simulated, faster))
    evolve(campaign, 6)
    assert any(map(campaign.was_simulated, faster))


def test_a_row_that_a_cut_let_fit_is_taken_to_fit_elsewhere() -> None:
    request = tight(1.72e9)
    campaign, every = priced(request)
    order = request.context.order
    one = max(faster_misses(campaign, every), key=lambda each: each.row["pp"])
    alike = Solution(order=order[::-1].copy(), row=one.row)
    campaign.price([alike])
    assert not campaign.may_fit(alike)
    campaign.learn(one, 3 * campaign.unlimited(one))
    # All devices are alike, so that under the other order it lacks the same.
    assert campaign.corrected(alike) == pytest.approx(3 * campaign.unlimited(alike))
    # What did not fit says nothing of other orders.
    campaign.learn(alike, 2e12)
    assert not campaign.may_fit(alike)
    assert campaign.may_fit(one)


def test_eager_pipelines_are_a_move_away() -> None:
    request = tight(80e9)
    campaign, every = priced(request)
    plain = schedule_spec("1F1B").code, schedule_spec("Eager1F1B").code
    one = next(
        each
        for each in every
        if (each.row["schedule"], each.row["pp"]) == (plain[0], 4)
        and each.row["num_microbatches"] % 4 == 0
    )
    rows = campaign.neighbours(one)
    assert rows is not None
    eager = (rows.schedule == plain[1]) & (rows.virtual_stages == 1)
    assert eager.sum() == 1
