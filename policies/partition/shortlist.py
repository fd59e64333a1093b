"""Which meshes are priced with all their rows: the network's best, and a glance's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.arranging.misses import (
    Miss,
    Settled,
    nearest_misses,
    settle_misses,
)
from planner.search.arranging.screening import Screened, screen
from planner.search.arranging.settling import Settler
from policies.partition.problem import Problem, share_of

__all__ = ["Shortlist", "shortlist"]

Index = NDArray[np.int64]

#: Share of the time that a glance at all meshes may take; of what is left then, that
#: cutting near misses may, and that it may where all that fits is far from what they
#: promise; and of a number of simulations.
_GLANCING, _MENDING, _MENDED = 0.5, (0.4, 0.8), 1 / 8
#: Meshes of near misses that fit and are opened.
_OPENED = 4
#: Meshes that look this much worse than a near miss that fits are not opened. (All
#: their rows are better than the few that were glanced at, up to threefold.)
_FAR = 3.0
#: Of the network's best as many are glanced at where no order matters.
_GLANCED = 160
#: Of the meshes that are priced with all rows: the network's best, and the glance's.
_RANKED, _SEEN = 12, 20


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Shortlist:
    """Meshes worth a closer look.

    Attributes:
        chosen: Indices into the problem's choices. Shape [n].
        seen: What a glance at all meshes found.
        settled: What cutting near misses found.
    """

    chosen: Index
    seen: Screened
    settled: Settled


def shortlist(problem: Problem, settler: Settler, ranked: Index) -> Shortlist:
    """Near misses that fit, the network's best, then what looks best by closed forms.

    Args:
        problem: The question.
        settler: Cuts and simulates near misses.
        ranked: All choices, the network's best first. Shape [choices].
    """
    until = share_of(problem.until, _GLANCING)
    asked = (problem.request, settler.model, problem.groups, problem.choices)
    # Where no order matters the network knows its way about.
    found = screen(*asked, ranked[: None if problem.order_matters else _GLANCED], until)
    settled = _mend(problem, settler, nearest_misses(*asked, found), found)
    limit = _FAR * settled.best
    fitting = found.choice[np.isfinite(found.score) & (found.score <= limit)]
    best = found.choice[np.argsort(found.score, kind="stable")]
    first = ranked[np.isin(ranked, fitting)][:_RANKED]
    mended = settled.choices[:_OPENED]
    both = [*mended, *first.tolist(), *best[: min(_SEEN, len(fitting))].tolist()]
    chosen = np.array(list(dict.fromkeys(both)), dtype=np.int64)
    return Shortlist(chosen=chosen, seen=found, settled=settled)


def _mend(
    problem: Problem, settler: Settler, misses: list[Miss], seen: Screened
) -> Settled:
    """Find out which of those that lack memory fit once they are cut by it."""
    far = seen.hope.min(initial=np.inf) * _FAR < seen.score.min(initial=np.inf)
    budget = problem.request.evaluation_budget
    most = 2 * len(misses) if budget is None else int(_MENDED * budget)
    until = share_of(problem.until, _MENDING[int(far)])
    return settle_misses(settler, misses, until, most)
