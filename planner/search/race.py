"""A race of searches that share one campaign: who improves the plan goes on.

Every contender works in small steps on the same prices, the same population and the
same simulated candidates, so that a find of one is a start for the others. Each gets a
first share of the budget. From then on steps are dealt out by stride scheduling
(Waldspurger and Weihl 1995): a contender's weight is 1, and up to :data:`_BOOST` more
by its part of the recent improvements. Nobody's weight falls below 1, so that a late
winner still gets its turns. The last tenth simulates the most promising solutions of
all. Where nothing fits when the time is up, the contender with the largest share goes
on alone until something does.

Under a time budget steps cost seconds; else they cost simulations, and neither what is
found nor the log depends on the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from planner.search.base import Candidate, Request, SearchResult, finish
from planner.search.campaign import Campaign

__all__ = ["Racer", "race"]

#: Share of the budget after which the most promising solutions of all are simulated.
_LAST = 0.9
#: Weight on top of 1 of a contender to which all recent improvements are due.
_BOOST = 6.0
#: Share of the budget after which an improvement counts for half.
_HALF = 0.1
#: Simulations that a step costs without a clock, beside those that it makes: steps
#: that price closed forms are not free.
_STEP = 0.5


@runtime_checkable
class Racer(Protocol):
    """A partitioner that can take part in a race.

    Attributes:
        name: Its registered name.
        first_share: Share of the budget that it gets at first, unless it ends before.
    """

    name: str
    first_share: float

    def contend(self, campaign: Campaign) -> Iterator[None]:
        """Search in small steps, and yield after each; end when the time is up.

        Args:
            campaign: The race's prices, population and candidates; extended by what is
                found.
        """
        ...


@dataclass(eq=False, slots=True)
class _Lane:
    """A contender with what it spent and found.

    Attributes:
        name: Its registered name.
        steps: Its search.
        first_share: Share of the budget that it gets at first.
        spent: Share of the budget that it has used.
        turn: Virtual time of its next step: the least is next.
        gain: Recent improvements, in logarithms of the score.
        checkpoint: Hash of the weights that it uses, if it has learned any.
        best: Best score among its candidates.
        best_after: Simulations of all contenders when it had found that.
    """

    name: str
    steps: Iterator[None]
    first_share: float
    spent: float = 0.0
    turn: float = 0.0
    gain: float = 0.0
    ended: bool = False
    checkpoint: str | None = None
    best: float = math.inf
    best_after: int | None = None
    candidates: list[Candidate] = field(default_factory=list)
    evaluations: dict[str, int] = field(
        default_factory=lambda: {"analytic": 0, "simulated": 0}
    )


def race(
    request: Request, racers: Sequence[Racer], *, budgets: int = 1
) -> list[SearchResult]:
    """Let searches answer a request together.

    Args:
        request: The question.
        racers: Contenders, in the order of their first shares.
        budgets: Evaluation budgets of the request that they share.

    Returns:
        A result for each contender, with the candidates that it simulated, its share
        of the budget, and when it had found its best.
    """
    return _Race(request, racers, budgets).run()


class _Race:
    """One race; see :func:`race`."""

    def __init__(self, request: Request, racers: Sequence[Racer], budgets: int) -> None:
        free = request.time_budget_s is None and request.evaluation_budget is None
        self._campaign = Campaign(request, len(racers) if free else budgets)
        # Without a budget everybody goes on to the end, or a fair part of many.
        self._free = free
        self._lanes = [
            _Lane(
                name=one.name,
                steps=one.contend(self._campaign),
                first_share=1 / len(racers) if free else one.first_share,
                checkpoint=getattr(one, "checkpoint", None),
            )
            for one in racers
        ]
        self._request = request
        self._timed = request.time_budget_s is not None

    def run(self) -> list[SearchResult]:
        """Run it, and return the contenders' results."""
        for lane in self._lanes:
            while not self._is_over(lane):
                self._step(lane)
        # Nobody starts ahead because its first step was short.
        for lane in self._lanes:
            lane.turn = 0.0
        while not self._free and not self._spent(_LAST) and (there := self._waiting()):
            self._step(min(there, key=lambda lane: lane.turn))
        self._last()
        return self._results()

    def _waiting(self) -> list[_Lane]:
        return [lane for lane in self._lanes if not lane.ended]

    def _is_over(self, lane: _Lane) -> bool:
        """Return True if a contender has had its first share.

        The one with the largest share goes on as long as none of its own plans fits and
        there is time, and where nothing fits when the time is up.
        """
        if lane.ended:
            return True
        if self._timed and lane is max(self._lanes, key=lambda one: one.first_share):
            if not any(one.cost.fits for one in lane.candidates):
                return self._campaign.has_fit and self._campaign.is_late()
        elif self._timed and self._campaign.is_late():
            return True
        return self._spent(_LAST) or lane.spent >= lane.first_share

    def _spent(self, share: float) -> bool:
        """Return True if this share of the budget is used up."""
        if self._timed:
            return self._campaign.has_fit and self._campaign.is_late(share)
        return sum(lane.spent for lane in self._lanes) >= share

    def _step(self, lane: _Lane) -> None:
        def work() -> None:
            if next(lane.steps, lane) is lane:
                lane.ended = True

        self._charged(lane, work)

    def _charged(self, lane: _Lane, work: Callable[[], None]) -> None:
        """Do a contender's work, and write down what it cost and brought."""
        campaign, began = self._campaign, time.perf_counter()
        before, found = campaign.evaluations, len(campaign.simulated)
        best = campaign.best_score
        work()
        for kind, number in campaign.evaluations.items():
            lane.evaluations[kind] += number - before[kind]
        lane.candidates += campaign.simulated[found:]
        if self._timed:
            whole_s = max(self._request.time_budget_s or 0.0, 1e-9)
            cost = (time.perf_counter() - began) / whole_s
        else:
            made = campaign.evaluations["simulated"] - before["simulated"]
            cost = (made + _STEP) / (campaign.total or 1)
        lane.spent += cost
        for one in self._lanes:
            one.gain *= 0.5 ** (cost / _HALF)
        now = campaign.best_score
        if now < best:
            lane.gain += math.log(min(best, 1e3 * now) / now)
            lane.best, lane.best_after = now, campaign.evaluations["simulated"]
        whole = sum(one.gain for one in self._lanes)
        weight = 1.0 + (_BOOST * lane.gain / whole if whole > 0 else 0.0)
        lane.turn += cost / weight

    def _last(self) -> None:
        """Simulate the most promising solutions; charged to who holds the best plan."""
        leader = min(self._lanes, key=lambda lane: lane.best)
        self._charged(leader, self._campaign.finish)

    def _results(self) -> list[SearchResult]:
        whole = sum(lane.spent for lane in self._lanes) or 1.0
        results = []
        for lane in self._lanes:
            result = finish(
                lane.name,
                self._request,
                [],
                self._campaign.legal(lane.candidates),
                self._campaign.started,
                lane.checkpoint,
            )
            results.append(
                replace(
                    result,
                    evaluations=lane.evaluations,
                    share=round(lane.spent / whole, 2),
                    best_after=lane.best_after,
                )
            )
        return results
