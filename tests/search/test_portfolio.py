"""Who is asked, and for how long."""

from __future__ import annotations

import pytest

from planner.errors import NoFeasiblePlanError
from planner.portfolio import AUTO, names_of, run_partitioners
from planner.search import Partitioner, Request, SearchResult, get_partitioner
from planner.search.race import Racer
from tests.cost.made import device, hosts, request_for, uniform_graph

MIXED = hosts((1, 4, device()), (1, 4, device("other", memory_bytes=9e9)))


class _Timed:
    """Notes the time that it is given, and takes it by a clock that nobody moves."""

    def __init__(self, name: str, asked: list[float | None]) -> None:
        self.name, self._asked = name, asked

    def search(self, request: Request) -> SearchResult:
        self._asked.append(request.time_budget_s)
        return get_partitioner("expert").search(request)


def _request(seconds: float | None = None, **changes: float) -> Request:
    return request_for(uniform_graph(12), MIXED, 16, time_budget_s=seconds, **changes)


def test_everybody_in_auto_can_race() -> None:
    assert names_of("auto") == AUTO
    assert all(isinstance(get_partitioner(name), Racer) for name in AUTO)


def test_auto_is_one_race_with_a_result_for_each() -> None:
    results = run_partitioners(_request(evaluation_budget=6), "auto")
    assert tuple(one.partitioner for one in results) == AUTO
    assert all(one.share is not None for one in results)
    assert sum(one.evaluations["simulated"] for one in results) <= 6 * len(AUTO)
    assert (
        results[1].checkpoint
        == get_partitioner("learned").search(_request()).checkpoint
    )


def test_partitioners_that_are_named_share_the_time_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float | None] = []

    def named(name: str) -> Partitioner:
        return _Timed(name, asked)

    monkeypatch.setattr("planner.portfolio.get_partitioner", named)
    results = run_partitioners(_request(100.0), ["one", "two"])
    assert all(one.share is None for one in results)
    first, second = asked
    assert first == pytest.approx(50.0)
    assert second is not None
    assert second > 50.0


def test_where_a_race_finds_nothing_the_expert_searches_everything() -> None:
    tiny = hosts((1, 4, device(memory_bytes=1e6)))
    request = request_for(uniform_graph(12), tiny, 16, time_budget_s=0.1)
    with pytest.raises(NoFeasiblePlanError, match=r"GB|MB"):
        run_partitioners(request, "auto")
