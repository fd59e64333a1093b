"""The learned partitioner: the network proposes, prices decide.

1. The network scores every mesh. Its best, and the best of a screening by closed forms
   (:mod:`planner.search.device_order.screening`), are priced with all their rows.
2. It draws orders of the device groups for the best of those.
3. The drawn orders and the plain ones are improved by small changes, priced by closed
   forms.
4. The best are cut exactly and simulated.
5. From there orders and strategies evolve together; the simulator decides.

Steps 1 to 4 are :class:`policies.partition.proposing.Proposer`. There is an answer at
every point; time or the number of simulations ends the search. Where all devices and
links are equal there is nothing to arrange, and step 5 only fills time that is left.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from planner.cost import CostModel
from planner.search import Request, SearchResult
from planner.search.base import finish
from planner.search.campaign import Campaign
from planner.search.device_order.groups import group_devices
from planner.search.device_order.subsets import list_choices
from planner.search.evolutionary import evolve
from planner.search.expert import ExpertPartitioner
from planner.search.moves import Solution
from planner.search.starts import begin, grid_orders
from policies.partition.network import load_network
from policies.partition.proposing import Known, Problem, Proposer, SearchConfig

__all__ = [
    "LearnedPartitioner",
    "SearchConfig",
]


#: Best solutions whose order is tried in every way of laying a grid over the devices.
_LAID = 24
#: Share of the time for proposing, the rest is for evolution; and the share after which
#: evolution is not begun any more.
_PROPOSING, _TOO_LATE = 0.4, 0.9


class LearnedPartitioner:
    """Plans with the weights that ship, or with others.

    Args:
        folder: Weights that :func:`policies.partition.network.save_network` wrote.
        config: Effort.
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
        groups = group_devices(request.context)
        problem = Problem(
            request=request,
            groups=groups,
            choices=list_choices(request, groups),
            until=None if budget is None else started + share * budget,
            ends=None if budget is None else started + budget,
        )
        known = Known(model=CostModel(request.context))
        with torch.inference_mode():
            Proposer(problem, saved, self._config, known).propose()
        if self._goes_on(problem, known, started):
            rounds = None if budget is not None else self._config.generations
            _evolve(request, known, started, rounds)
        candidates = known.candidates
        if not any(one.cost.fits for one in candidates):
            # A plan that no mesh fits by closed forms may still fit stage by stage; and
            # where nothing fits, the expert reports the nearest plan.
            found = ExpertPartitioner().search(request)
            for kind, number in found.evaluations.items():
                known.model.evaluations[kind] += number
            near = [found.nearest] if found.nearest else []
            candidates = [*candidates, *found.candidates, *near]
        return finish(
            self.name, request, known.model, candidates, started, saved.checkpoint
        )

    def _goes_on(self, problem: Problem, known: Known, started: float) -> bool:
        """True if there is something to evolve, and time for it."""
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


def _evolve(
    request: Request, known: Known, started: float, generations: int | None
) -> None:
    """Let orders and rows evolve from the proposals, until time or budget is used up.

    Where no proposal fits, evolution begins as without a policy: from rules of thumb
    and the best rows of the whole space. (Annealing instead was 0.8 % worse on 6 mixed
    validation worlds and 3.6 % on 5 of several sites.)

    Args:
        request: The question.
        known: Proposals; extended by the results.
        started: ``time.perf_counter`` at the start of the search.
        generations: Limit; None where the clock decides.
    """
    campaign = Campaign(request)
    campaign.started = started
    campaign.count(known.model)
    simulated = [(one, cuts) for one, cuts in known.found if cuts]
    begin(campaign)
    campaign.price([*known.solutions, *(one for one, _ in simulated)])
    for one, cuts in simulated:
        campaign.adopt(one, cuts)
    campaign.price(
        [
            Solution(order=made, row=one.row)
            for one in campaign.best(_LAID)
            for made in grid_orders(one.order, one.row)
        ]
    )
    evolve(campaign, generations)
    campaign.finish()
    known.model.evaluations.update(campaign.evaluations)
    known.evolved = campaign.candidates
