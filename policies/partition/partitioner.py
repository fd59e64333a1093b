"""The learned partitioner: the network proposes, prices decide.

1. The network scores every mesh; the best of them are priced with all their rows.
2. It draws orders of the device groups for the best of those.
3. What it drew and the plain orders are improved by small changes, all priced by
   closed forms.
4. The best are cut exactly and simulated; the simulator decides.

At every point there is an answer; time or the number of simulations ends the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from envs.partition.features import Observed, observe
from planner.search import Candidate, Request, SearchResult
from planner.search.arranging.arranger import Arranger, Finalists, Priced, open_arranger
from planner.search.arranging.climb import Limits, best_of, climb, joined
from planner.search.arranging.fleets import Choices, list_choices
from planner.search.arranging.groups import DeviceGroups, group_devices
from planner.search.base import finish
from planner.search.expert import ExpertPartitioner
from policies.partition.decoding import draw_orders
from policies.partition.network import Encoded
from policies.partition.saved import SavedNetwork, load_network

__all__ = ["LearnedPartitioner", "SearchConfig"]

#: What is this much worse than the best by closed forms is not simulated any more.
_HOPELESS = 1.25
#: Share of the time that is left which drawing orders may take, and what a step of it
#: takes: seconds, and seconds for each order and group (one core of 2020).
_DRAWING, _STEP_S, _GROUP_S = 0.3, 4e-4, 1.5e-6
#: Without a clock, orders times groups squared.
_MOST_DRAWN = 120_000
#: After these ranks the first, the second and the third are tried under all schedules.
_VARIED = (1, 3, 6)

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig:
    """How much is tried of what.

    Attributes:
        meshes: Meshes priced in one go.
        layouts: Of them, those that orders are drawn for.
        draws: Orders drawn for each.
        rounds: Rounds of small changes without a clock.
        climbing: Share of the time that is left when they begin.
        finalists: Arrangements simulated without a clock.
        learned: False scores meshes at random and draws orders at random: what search
            alone is worth.
    """

    meshes: int = 24
    layouts: int = 8
    draws: int = 8
    rounds: int = 24
    climbing: float = 0.6
    finalists: int = 10
    learned: bool = True


@dataclass(frozen=True, eq=False, slots=True)
class _Problem:
    """One search."""

    request: Request
    groups: DeviceGroups
    choices: Choices
    until: float | None

    @property
    def late(self) -> bool:
        return self.until is not None and time.perf_counter() >= self.until


class LearnedPartitioner:
    """Answers with the weights that come with the package, or with others.

    Args:
        folder: Of weights that :func:`policies.partition.saved.save_network` wrote.
        config: How much is tried.
    """

    name = "learned"

    def __init__(
        self, folder: str | Path | None = None, config: SearchConfig | None = None
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._config = config or SearchConfig()

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`.

        Raises:
            StrategyError: If the weights cannot be read.
        """
        started = time.perf_counter()
        saved = load_network(self._folder)
        budget = request.time_budget_s
        until = None if budget is None else started + budget
        groups = group_devices(request.setting)
        problem = _Problem(request, groups, list_choices(request, groups), until)
        rng = np.random.default_rng(request.seed)
        with torch.inference_mode():
            arranger, candidates = self._search(problem, saved, rng)
        if arranger is None or not any(one.cost.fits for one in candidates):
            # What no mesh fits by closed forms may still fit stage by stage; and
            # where nothing does, it says what comes closest.
            found = ExpertPartitioner().search(request)
            models = [] if arranger is None else [arranger.model]
            near = [found.nearest] if found.nearest else []
            candidates = [*candidates, *found.candidates, *near]
            answer = finish(
                self.name, request, models, candidates, started, saved.checkpoint
            )
            for kind, number in found.evaluations.items():
                answer.evaluations[kind] += number  # type: ignore[index]
            return answer
        return finish(
            self.name, request, arranger.model, candidates, started, saved.checkpoint
        )

    def _search(
        self, problem: _Problem, saved: SavedNetwork, rng: np.random.Generator
    ) -> tuple[Arranger | None, list[Candidate]]:
        if not len(problem.choices):
            return None, []
        seen = observe(problem.request, problem.groups, problem.choices)
        encoded = saved.network.encode(seen)
        logits = saved.network.mesh_logits(seen, encoded).numpy()
        if not self._config.learned:
            logits = rng.random(len(logits))
        arranger = self._open(problem, np.argsort(-logits, kind="stable"))
        if arranger is None:
            return None, []
        layouts = arranger.layouts
        current = Priced(
            layout=np.arange(len(layouts)),
            sequence=layouts.sequence,
            row=layouts.starts[:-1].copy(),
            score=layouts.score,
        )
        if self._order_matters(problem):
            if self._affordable(problem):
                drawn = self._draw(problem, saved, seen, encoded, arranger, rng)
                current = joined([current, drawn])
            current = self._climb(problem, arranger, current, rng)
        return arranger, self._settle(problem, arranger, current)

    def _open(self, problem: _Problem, ranked: Index) -> Arranger | None:
        """The best meshes that fit; further down the list while none does."""
        step = self._config.meshes
        for start in range(0, len(ranked), step):
            arranger = open_arranger(
                problem.request,
                problem.choices,
                problem.groups,
                ranked[start : start + step],
            )
            if arranger is not None:
                return arranger
            step *= 2
            if problem.late:
                return None
        return None

    def _order_matters(self, problem: _Problem) -> bool:
        return any(len(fleet.sequences) > 1 for fleet in problem.choices.fleets) or (
            len(np.unique(problem.groups.sizes)) > 1
        )

    def _affordable(self, problem: _Problem) -> int:
        """Orders to draw, so that on a clock they take a share of it; 0 for none."""
        groups = len(problem.groups)
        wanted = self._config.layouts * (1 + self._config.draws)
        if problem.until is None:
            return min(wanted, max(8, _MOST_DRAWN // groups**2))
        left = _DRAWING * (problem.until - time.perf_counter())
        each_step = left / groups - _STEP_S
        count = int(min(wanted, each_step / (_GROUP_S * groups)))
        return count if count >= 4 else 0

    def _draw(
        self,
        problem: _Problem,
        saved: SavedNetwork,
        seen: Observed,
        encoded: Encoded,
        arranger: Arranger,
        rng: np.random.Generator,
    ) -> Priced:
        """Orders for the best layouts, the likeliest of each among them."""
        count = max(1, self._affordable(problem))
        few = np.arange(min(self._config.layouts, len(arranger.layouts), count))
        layout = np.sort(np.resize(few, max(0, count - len(few))))
        layout = np.concatenate([few, layout])
        if not self._config.learned:
            sequence = arranger.layouts.sequence[layout]
            shuffled = np.stack(
                [np.append(rng.permutation(s[s >= 0]), s[s < 0]) for s in sequence]
            )
            return arranger.price(layout, shuffled)
        drawn = draw_orders(
            saved.network,
            seen,
            encoded,
            problem.groups,
            problem.choices,
            arranger.layouts.choice[layout],
            rng,
            greedy=len(few),
        )
        return arranger.price(layout, drawn.sequence)

    def _climb(
        self,
        problem: _Problem,
        arranger: Arranger,
        start: Priced,
        rng: np.random.Generator,
    ) -> Priced:
        if problem.until is None:
            limits = Limits(rounds=self._config.rounds)
        else:
            now = time.perf_counter()
            limits = Limits(until=now + self._config.climbing * (problem.until - now))
        return joined([climb(arranger, start, rng, limits), best_of(start, 8)])

    def _settle(
        self, problem: _Problem, arranger: Arranger, current: Priced
    ) -> list[Candidate]:
        """Simulate the best until time or the number of simulations is up."""
        budget = problem.request.evaluation_budget
        most = self._config.finalists if budget is None else budget
        few = best_of(current, max(12, self._config.finalists), of_layout=3)
        ranked = arranger.finalists(few)
        candidates: list[Candidate] = []
        for entered, index in self._turns(arranger, ranked):
            spent = arranger.model.evaluations["simulated"]
            full = spent >= most and (problem.until is None or budget is not None)
            fits = any(one.cost.fits for one in candidates)
            if candidates and (full or (problem.late and fits)):
                break
            # The exact cut has the fastest slowest stage; of ranks that hold several
            # stages the slowest may be another, and even times the better cut.
            looped = entered.rows.virtual_stages[index] > 1
            left = 2 if budget is None else max(1, budget - spent)
            cuts = min(left, 2 if looped else 1)
            candidates += arranger.settled(entered, index, cuts=cuts)
        return candidates

    @staticmethod
    def _turns(
        arranger: Arranger, ranked: Finalists
    ) -> Iterator[tuple[Finalists, int]]:
        """What to simulate: rows by rank; of a few also all other schedules."""
        for index in range(len(ranked)):
            if ranked.score[index] > _HOPELESS * ranked.score[0]:
                return
            yield ranked, index
            if index in _VARIED:
                others = arranger.variants(ranked, _VARIED.index(index))
                for other in range(len(others)):
                    yield others, other
