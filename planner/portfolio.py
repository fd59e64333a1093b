"""Run several partitioners on one request, and choose the best of their answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from planner.diagnose import no_feasible_plan
from planner.search import (
    Candidate,
    Objective,
    Partitioner,
    Request,
    SearchResult,
    expressible,
    get_partitioner,
    preference,
)
from planner.search.expert import ExpertPartitioner
from planner.search.families import simplest
from planner.search.race import Racer, race

__all__ = ["AUTO", "best_answer", "names_of", "ranked_answers", "run_partitioners"]

#: Partitioners that race in ``partitioner="auto"``; the best answer wins.
AUTO = ("expert", "learned", "exhaustive", "evolutionary")
#: Share of the time budget below which no further partitioner is run: it would be over
#: before a first look at the space.
_TOO_LITTLE = 0.02


def names_of(partitioner: str | Sequence[str]) -> tuple[str, ...]:
    """Return the registered names of the partitioners that ``plan`` was given."""
    names = [partitioner] if isinstance(partitioner, str) else list(partitioner)
    return tuple(
        dict.fromkeys(
            one for name in names for one in (AUTO if name == "auto" else (name,))
        )
    )


def run_partitioners(
    request: Request, partitioner: str | Sequence[str]
) -> list[SearchResult]:
    """Run partitioners and return all of their answers.

    Those of ``auto`` race (:mod:`planner.search.race`); others that are named run one
    after the other.

    Args:
        request: The question. Each partitioner that is named gets an equal part of the
            time that is left. Its evaluation budget is that of each; racers share the
            sum.
        partitioner: A name, several, or ``auto``.

    Raises:
        NoFeasiblePlanError: If no partitioner found a plan that fits.
        UnknownNameError: If no partitioner of that name is installed.
    """
    chosen = [get_partitioner(name) for name in names_of(partitioner)]
    if partitioner == "auto":
        results = _raced(request, chosen)
    else:
        results = _one_by_one(request, chosen)
    if not _found(results):
        raise no_feasible_plan(request, results)
    return results


def _raced(request: Request, chosen: Sequence[Partitioner]) -> list[SearchResult]:
    racers = [one for one in chosen if isinstance(one, Racer)]
    results = race(request, racers, budgets=len(racers))
    if not _found(results):
        # A late plan is better than the claim that there is none.
        results = [one for one in results if one.partitioner != "expert"]
        results.insert(0, ExpertPartitioner().search(request))
    return results


def _one_by_one(request: Request, chosen: Sequence[Partitioner]) -> list[SearchResult]:
    started = time.perf_counter()
    results: list[SearchResult] = []
    for waiting, one in zip(range(len(chosen), 0, -1), chosen, strict=True):
        question = request
        if request.time_budget_s is not None:
            left = request.time_budget_s - (time.perf_counter() - started)
            if left <= _TOO_LITTLE * request.time_budget_s and _found(results):
                break
            question = replace(request, time_budget_s=max(0.0, left / waiting))
        answer = one.search(question)
        if request.launcher_limits is not None:
            # Partitioners of other packages may not end in planner.search.base.finish.
            kept = expressible(request.launcher_limits, answer.candidates)
            answer = replace(answer, candidates=kept)
        results.append(answer)
    return results


def _found(results: Sequence[SearchResult]) -> bool:
    return any(result.candidates for result in results)


def best_answer(
    results: Sequence[SearchResult], objective: Objective
) -> tuple[SearchResult, Candidate]:
    """Return the best candidate of all partitioners; the earlier one among equals."""
    found = [(result, c) for result in results for c in result.candidates[:1]]
    return min(found, key=lambda pair: preference(pair[1], objective))


def ranked_answers(
    results: Sequence[SearchResult], objective: Objective
) -> list[tuple[SearchResult, Candidate]]:
    """Return the candidates of all partitioners, the one to choose first.

    That is :func:`planner.search.families.simplest`; the others follow by preference.
    """
    found = [(result, c) for result in results for c in result.candidates]
    found.sort(key=lambda pair: preference(pair[1], objective))
    best = simplest([candidate for _, candidate in found], objective)
    chosen = next(pair for pair in found if pair[1] is best)
    return [chosen, *(pair for pair in found if pair is not chosen)]
