"""Simulated annealing of device orders and strategies together."""

from __future__ import annotations

import numpy as np

from planner.search.base import Request, SearchResult
from planner.search.campaign import Campaign
from planner.search.starts import begin

__all__ = ["AnnealPartitioner"]

#: Chains that run side by side: many solutions are priced at once.
_CHAINS = 64
#: Steps of every chain without a time budget.
_STEPS = 60
#: Temperature at first and in the end: relative loss that a step may accept.
_HOT, _COLD = 0.2, 0.002
#: Share of the time for the chains; the rest is for the finalists.
_SHARE = 0.9
#: Steps after which the worst chains continue from the best ones.
_REGROUP = 10


class AnnealPartitioner:
    """Chains of random moves that accept losses less and less often.

    It starts from the same solutions as
    :class:`planner.search.evolutionary.EvolutionaryPartitioner`. A step changes the
    order of devices or the row of the table, is priced by closed forms and accepted
    with probability exp(-(relative loss) / temperature); the simulator prices the best
    after every step. Source: Kirkpatrick, Gelatt, Vecchi
    1983, Optimization by Simulated Annealing.
    """

    name = "anneal"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        campaign = Campaign(request)
        begin(campaign)
        known = campaign.best(_CHAINS)
        chains = [known[place % len(known)] for place in range(_CHAINS if known else 0)]
        steps, step = campaign.rounds(_STEPS), 0
        while chains and not campaign.is_over(step, _STEPS, _SHARE):
            step += 1
            done = campaign.elapsed_share(_SHARE) if steps is None else step / steps
            temperature = _HOT * (_COLD / _HOT) ** done
            campaign.find_neighbours(chains)
            moved = [campaign.moved(one) for one in chains]
            scores = np.log(campaign.price([*chains, *moved]))
            before, after = scores[: len(chains)], scores[len(chains) :]
            draws = campaign.rng.random(len(chains))
            taken = np.log(draws) * temperature < before - after
            for place in np.flatnonzero(taken).tolist():
                chains[place] = moved[place]
            if step % _REGROUP == 0:
                order = np.argsort(np.where(taken, after, before), kind="stable")
                quarter = len(chains) // 4
                for bad, good in zip(
                    order[-quarter:].tolist(), order[:quarter].tolist(), strict=True
                ):
                    chains[bad] = chains[good]
            campaign.simulate_best(campaign.share_of(_STEPS))
        campaign.finish()
        return campaign.result(self.name)
