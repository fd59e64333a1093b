"""Beam search on moves of device orders and strategies."""

from __future__ import annotations

from planner.search.base import Request, SearchResult
from planner.search.campaign import Campaign
from planner.search.moves import Solution, block_sizes, swapped
from planner.search.starts import begin

__all__ = ["BeamPartitioner"]

#: Solutions that are expanded in a round, and most of them with one mesh.
_WIDTH, _PER_MESH = 8, 2
#: Rounds without a time budget.
_ROUNDS = 20
#: Exchanges of blocks of one size, and random moves, for one solution.
_SWAPS, _RANDOM = 24, 8
#: Share of the time for the beam; the rest is for the finalists.
_SHARE = 0.9


class BeamPartitioner:
    """Beam search: the best few solutions are expanded in every round.

    It starts from the same solutions as
    :class:`planner.search.evolutionary.EvolutionaryPartitioner`. Expansion tries all
    legal rows next to a solution's, and exchanges of its devices. Every round keeps the
    best by closed forms, few with one mesh, and the simulator prices the best of them.
    No solution is expanded twice, so that the beam widens where it has come to an end.
    """

    name = "beam"

    def search(self, request: Request) -> SearchResult:
        """Answer a request; see :class:`planner.search.base.Partitioner`."""
        campaign = Campaign(request)
        begin(campaign)
        expanded: set[object] = set()
        turn = 0
        while not campaign.is_over(turn, _ROUNDS, _SHARE):
            beam = _beam(campaign, expanded)
            if not beam:
                break
            turn += 1
            for one in beam:
                expanded.add(one.key)
                campaign.price(_next(campaign, one))
                if campaign.is_late(_SHARE):
                    break
            campaign.simulate_best(4 * campaign.share_of(_ROUNDS * 4))
        campaign.finish()
        return campaign.result(self.name)


def _beam(campaign: Campaign, expanded: set[object]) -> list[Solution]:
    """Return the best solutions that were not expanded, few with one mesh."""
    found: list[Solution] = []
    of_mesh: dict[tuple[int, ...], int] = {}
    for one in campaign.best(50 * _WIDTH):
        if of_mesh.get(one.mesh, 0) < _PER_MESH and one.key not in expanded:
            of_mesh[one.mesh] = of_mesh.get(one.mesh, 0) + 1
            found.append(one)
        if len(found) == _WIDTH:
            break
    return found


def _next(campaign: Campaign, one: Solution) -> list[Solution]:
    """Expand a solution: neighbouring rows, exchanges of blocks, random moves."""
    rows = campaign.neighbours(one)
    made = (
        []
        if rows is None
        else [Solution(order=one.order, row=row) for row in rows.rows()]
    )
    for size in block_sizes(one.row, campaign.host_devices):
        count = len(one.order) // size
        pairs = count * (count - 1) // 2
        step = max(1, -(-pairs // _SWAPS))
        first = int(campaign.rng.integers(step))
        orders = swapped(one.order, size, first, step)
        made += [Solution(order=order, row=one.row) for order in orders]
    made += [campaign.moved(one) for _ in range(_RANDOM)]
    return made
