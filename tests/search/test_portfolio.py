"""Who is asked in ``auto``, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from planner.cluster import Cluster
from planner.errors import NoFeasiblePlanError
from planner.portfolio import run_partitioners
from planner.search import Candidate, Request, SearchResult, get_partitioner
from tests.cost.made import device, hosts, request_for, uniform_graph

EVEN = hosts((2, 4, device()))
MIXED = hosts((1, 4, device()), (1, 4, device("other", memory_bytes=9e9)))
_Asked = list[tuple[str, float | None]]


class _Timed:
    """Takes the time it is given, by a clock that nobody else moves.

    Answers with what it was made with.
    """

    now_s = 0.0

    def __init__(
        self, name: str, asked: _Asked, candidates: tuple[Candidate, ...]
    ) -> None:
        self.name, self._asked, self._candidates = name, asked, candidates

    def search(self, request: Request) -> SearchResult:
        budget = request.time_budget_s
        self._asked.append((self.name, budget))
        _Timed.now_s += budget or 0.0
        return SearchResult(
            partitioner=self.name,
            candidates=self._candidates,
            nearest=None,
            evaluations={},
            seconds=budget or 0.0,
        )


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., _Asked]:
    """Ask ``auto`` and say who was asked, with how many seconds each."""

    def who(cluster: Cluster, seconds: float | None, *, found: bool = True) -> _Asked:
        request = request_for(uniform_graph(12), cluster, 16, time_budget_s=seconds)
        some = get_partitioner("expert").search(request).candidates if found else ()
        seen: _Asked = []
        clock = SimpleNamespace(perf_counter=lambda: _Timed.now_s)
        monkeypatch.setattr("planner.portfolio.time", clock)
        monkeypatch.setattr(
            "planner.portfolio.get_partitioner", lambda name: _Timed(name, seen, some)
        )
        monkeypatch.setattr(
            "planner.portfolio.ExpertPartitioner",
            lambda widen=True: _Timed("expert" if not widen else "widened", seen, some),
        )
        run_partitioners(request, "auto")
        return seen

    return who


def test_where_devices_differ_the_learned_one_gets_all_of_the_time(
    asked: Callable[..., _Asked],
) -> None:
    ((name, seconds),) = asked(MIXED, 0.4)
    assert name == "learned"
    assert seconds == pytest.approx(0.4)


def test_in_a_hurry_rules_of_thumb_come_first(asked: Callable[..., _Asked]) -> None:
    (first, short), (second, rest) = asked(MIXED, 0.2)
    assert (first, second) == ("expert", "learned")
    assert short == pytest.approx(0.01)
    assert rest == pytest.approx(0.19)


def test_where_devices_are_alike_exhaustive_search_gets_the_rest(
    asked: Callable[..., _Asked],
) -> None:
    names, seconds = zip(*asked(EVEN, 0.4), strict=True)
    assert names == ("learned", "exhaustive")
    assert seconds == pytest.approx((0.36, 0.04))


def test_without_a_clock_everybody_is_asked(asked: Callable[..., _Asked]) -> None:
    everybody = [("expert", None), ("learned", None), ("exhaustive", None)]
    assert asked(MIXED, None) == everybody


def test_who_has_looked_everywhere_is_believed(
    asked: Callable[..., _Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The error names those that answered.
    monkeypatch.setattr(
        "planner.portfolio.no_feasible_plan",
        lambda _request, results: NoFeasiblePlanError(
            [" and ".join(one.partitioner for one in results)], []
        ),
    )
    with pytest.raises(NoFeasiblePlanError) as caught:
        asked(MIXED, 0.4, found=False)
    assert caught.value.reasons == ("learned",)
    monkeypatch.setattr("planner.portfolio.AUTO", ("expert", "exhaustive"))
    with pytest.raises(NoFeasiblePlanError) as caught:
        asked(MIXED, 0.4, found=False)
    assert caught.value.reasons == ("exhaustive and widened",)
