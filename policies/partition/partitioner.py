"""The learned partitioner: the network proposes, prices decide.

1. The network scores every mesh. Its best, and the best of a screening by closed forms
   (:mod:`planner.search.device_order.screening`), are priced with all their rows.
2. It draws orders of the device groups for the best of those.
3. The drawn orders and the plain ones are improved by small changes, priced by closed
   forms.
4. The best are cut exactly and simulated.
5. From there the proposals race (:mod:`planner.search.race`) with the whole space under
   plain orders and with an evolution of orders and strategies together, which starts
   from what all of them find.

Steps 1 to 4 are :class:`policies.partition.proposing.Proposer`. There is an answer at
every point; time or the number of simulations ends the search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.cost import CostModel
from planner.schema.schedules import schedule_spec
from planner.search import Candidate, Request, SearchResult
from planner.search.base import finish
from planner.search.campaign import Campaign
from planner.search.device_order.groups import group_devices
from planner.search.device_order.near_feasible import best_score
from planner.search.device_order.subsets import list_choices
from planner.search.evolutionary import EvolutionaryPartitioner
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.expert import ExpertPartitioner
from planner.search.moves import USUAL, Solution
from planner.search.race import race
from policies.partition.group_orders import draw_group_orders
from policies.partition.network import load_network
from policies.partition.proposing import Known, Problem, Proposer, SearchConfig

__all__ = [
    "LearnedPartitioner",
    "SearchConfig",
]

Index = NDArray[np.int64]

#: Codes of schedules whose time is a formula.
_USUAL = frozenset(schedule_spec(name).code for name in USUAL)

#: Part of a budget of simulations for proposing.
_PART = 4


class LearnedPartitioner:
    """Plans with the weights that ship, or with others.

    Args:
        folder: Weights that :func:`policies.partition.network.save_network` wrote.
        config: Effort.
    """

    name = "learned"
    first_share = 0.9

    def __init__(
        self, folder: str | Path | None = None, config: SearchConfig | None = None
    ) -> None:
        self._folder = None if folder is None else Path(folder)
        self._config = config or SearchConfig()

    @property
    def checkpoint(self) -> str:
        """Hash of the weights.

        Raises:
            StrategyError: If they cannot be read.
        """
        return load_network(self._folder).checkpoint

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`.

        Raises:
            StrategyError: If the weights cannot be read.
        """
        started = time.perf_counter()
        if self._config.generations:
            others = ExhaustivePartitioner(), EvolutionaryPartitioner()
            results = race(request, [self, *others])
        else:
            campaign = Campaign(request)
            list(self.contend(campaign))
            results = [campaign.result(self.name)]
        if not any(one.candidates for one in results):
            # A plan that no mesh fits by closed forms may still fit stage by stage; and
            # where nothing fits, the expert reports the nearest plan.
            results.append(ExpertPartitioner().search(request))
        evaluations = dict.fromkeys(("analytic", "simulated"), 0)
        for one in results:
            for kind in evaluations:
                evaluations[kind] += one.evaluations.get(kind, 0)
        near = [one.nearest for one in results if one.nearest is not None]
        found = finish(
            self.name,
            request,
            [],
            [*(c for one in results for c in one.candidates), *near],
            started,
            self.checkpoint,
        )
        return replace(found, evaluations=evaluations)

    def group_orders(self, request: Request, count: int) -> tuple[Index, ...]:
        """Draw orders of hosts; see :class:`planner.search.base.GroupOrderer`.

        Raises:
            StrategyError: If the weights cannot be read.
        """
        return draw_group_orders(load_network(self._folder), request, count)

    def contend(self, campaign: Campaign) -> Iterator[None]:
        """Take part in a race; see :class:`planner.search.race.Racer`.

        The proposals come first, and then the neighbours of the best plan.

        Raises:
            StrategyError: If the weights cannot be read.
        """
        request, total = campaign.request, campaign.total
        alone = not self._config.generations
        if request.evaluation_budget is not None and total is not None and not alone:
            part = -(-total // _PART)
            request = replace(request, evaluation_budget=min(part, campaign.left or 1))
        # A launcher's limits are on hosts.
        join = request.launcher_limits is None
        groups = group_devices(request.context, join=join)
        budget, now = request.time_budget_s, time.perf_counter()
        share = 1.0 if alone else self.first_share
        problem = Problem(
            request=request,
            groups=groups,
            choices=list_choices(request, groups),
            until=None if budget is None else now + share * budget,
            ends=campaign.until,
        )
        known = Known(model=CostModel(request.context))
        sharing = _Sharing(campaign, known)
        saved = load_network(self._folder)
        for _ in Proposer(problem, saved, self._config, known).steps():
            # Without a clock proposals count as one step, beside their simulations.
            if budget is not None:
                sharing.share()
                yield
        sharing.finish()
        yield
        if not alone:
            yield from campaign.polish()


class _Sharing:
    """Hands what the proposals find over to a campaign.

    Args:
        campaign: The race's.
        known: What the proposals have found so far.
    """

    def __init__(self, campaign: Campaign, known: Known) -> None:
        self._campaign, self._known = campaign, known
        self._kept: list[tuple[Solution, list[Candidate]]] = []
        self._seen = 0
        self._counted = dict(known.model.evaluations)

    def share(self) -> None:
        """Hand over new best plans, and keep back the rest."""
        campaign, known = self._campaign, self._known
        campaign.count(known.model, self._counted)
        self._counted = dict(known.model.evaluations)
        for one, cuts in known.found[self._seen :]:
            if best_score(campaign.request, cuts) < campaign.best_score:
                self._price([one])
                campaign.adopt(one, cuts)
            else:
                self._kept.append((one, cuts))
        self._seen = len(known.found)

    def finish(self) -> None:
        """Hand over the rest, priced together, and where evolution may start."""
        known = self._known
        found = [*self._kept, *known.found[self._seen :]]
        self._price([*known.solutions, *(one for one, _ in found)])
        self.share()
        for one, cuts in self._kept:
            self._campaign.adopt(one, cuts)

    def _price(self, solutions: list[Solution]) -> None:
        """Price solutions whose schedules have a formula; others take long."""
        usual = [one for one in solutions if one.row["schedule"] in _USUAL]
        self._campaign.price(usual)
