"""The learned partitioner: the network proposes, prices decide.

1. The network scores every mesh. Its best, and those that a glance by closed forms
   finds good (:mod:`planner.search.arranging.screening`), are priced with all their
   rows.
2. It draws orders of the device groups for the best of those.
3. What it drew and the plain orders are improved by small changes, all priced by
   closed forms.
4. The best are cut exactly and simulated.
5. From what is known by then orders and strategies evolve together
   (:mod:`policies.partition.refining`); the simulator decides.

At every point there is an answer; time or the number of simulations ends the search.
Where all devices and links are equal there is nothing to arrange: the last step is
only taken if there is time to fill.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from planner.cost import CostModel
from planner.search import Request, SearchResult
from planner.search.arranging.fleets import list_choices
from planner.search.arranging.groups import group_devices
from planner.search.base import finish
from planner.search.expert import ExpertPartitioner
from policies.partition.problem import Problem
from policies.partition.proposing import Proposer, SearchConfig
from policies.partition.refining import Known, refined
from policies.partition.saved import load_network

__all__ = ["LearnedPartitioner", "SearchConfig"]

#: Share of the time that proposing may take, the rest is for evolving; and the share
#: after which evolving is not begun any more.
_PROPOSING, _TOO_LATE = 0.4, 0.9


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
        share = _PROPOSING if self._config.generations else 1.0
        groups = group_devices(request.setting)
        problem = Problem(
            request=request,
            groups=groups,
            choices=list_choices(request, groups),
            until=None if budget is None else started + share * budget,
            ends=None if budget is None else started + budget,
        )
        known = Known(model=CostModel(request.setting))
        with torch.inference_mode():
            Proposer(problem, saved, self._config, known).propose()
        if self._goes_on(problem, known, started):
            rounds = None if budget is not None else self._config.generations
            refined(request, known, started, rounds)
        candidates = known.candidates
        if not any(one.cost.fits for one in candidates):
            # What no mesh fits by closed forms may still fit stage by stage; and
            # where nothing does, it says what comes closest.
            found = ExpertPartitioner().search(request)
            for kind, number in found.evaluations.items():
                known.model.evaluations[kind] += number
            near = [found.nearest] if found.nearest else []
            candidates = [*candidates, *found.candidates, *near]
        return finish(
            self.name, request, known.model, candidates, started, saved.checkpoint
        )

    def _goes_on(self, problem: Problem, known: Known, started: float) -> bool:
        """Whether there is anything to evolve, and time for it."""
        request = problem.request
        if not self._config.generations:
            return False
        budget = request.time_budget_s
        if budget is not None:
            return time.perf_counter() - started < _TOO_LATE * budget
        fits = any(one.cost.fits for one in known.candidates)
        spent = known.model.evaluations["simulated"]
        left = request.evaluation_budget is None or spent < request.evaluation_budget
        return left and (problem.order_matters or not fits)
