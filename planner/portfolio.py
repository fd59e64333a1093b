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

__all__ = ["AUTO", "best_answer", "names_of", "ranked_answers", "run_partitioners"]

#: Partitioners that ``partitioner="auto"`` runs; the best answer wins.
AUTO = ("expert", "learned", "exhaustive")
#: Share of the time that is left which each partitioner gets under a time budget. Where
#: all devices and links are equal, the exhaustive search is exact and soon ends in
#: small spaces; elsewhere it tries only a few orders of the devices. (On 50 uniform
#: validation worlds, 0.4 s of the learned and 0.6 s of the exhaustive partitioner gave
#: plans 0.8 % slower than the exhaustive one without a budget; 0.9 s and 0.1 s gave
#: plans 0.1 % faster.)
_UNIFORM = {"expert": 0.05, "learned": 0.9, "exhaustive": 1.0}
_UNEVEN = {"expert": 0.05, "learned": 1.0, "exhaustive": 1.0}
#: Time budget from which on ``auto`` leaves out the rules of thumb (``expert``). They
#: answer within 0.05 s, but take up to a second where memory is short, which is when
#: the learned partitioner needs all of the time. On 200 validation worlds at 1 s the
#: rules of thumb were better than the learned partitioner once, by 0.4 %.
_LONG_S = 0.3
#: Partitioners that search the whole space if nothing fits, even beyond the time
#: budget.
_LOOKS_EVERYWHERE = {"learned"}
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
    """Run partitioners one after the other and return all of their answers.

    Args:
        request: The question. Each partitioner gets an equal part of the time that is
            left; under ``auto`` the parts depend on the cluster.
        partitioner: A name, several, or ``auto``.

    Raises:
        NoFeasiblePlanError: If no partitioner found a plan that fits.
        UnknownNameError: If no partitioner of that name is installed.
    """
    timed = partitioner == "auto" and request.time_budget_s is not None
    chosen = _choose(request, timed, names_of(partitioner))
    started = time.perf_counter()
    results: list[SearchResult] = []
    for waiting, one in zip(range(len(chosen), 0, -1), chosen, strict=True):
        question = request
        if request.time_budget_s is not None:
            left = request.time_budget_s - (time.perf_counter() - started)
            little = left <= _TOO_LITTLE * request.time_budget_s
            if little and (_found(results) or _LOOKS_EVERYWHERE & _names(results)):
                break
            uniform = request.context.cluster.is_uniform
            shares = _UNIFORM if uniform else _UNEVEN
            share = shares[one.name] if partitioner == "auto" else 1 / waiting
            question = replace(request, time_budget_s=max(0.0, left * share))
        answer = one.search(question)
        if request.launcher_limits is not None:
            # Partitioners of other packages may not end in planner.search.base.finish.
            kept = expressible(request.launcher_limits, answer.candidates)
            answer = replace(answer, candidates=kept)
        results.append(answer)
    if timed and not _found(results) and not _LOOKS_EVERYWHERE & _names(results):
        # A late plan is better than the claim that there is none.
        results = [one for one in results if one.partitioner != "expert"]
        results.append(ExpertPartitioner().search(request))
    if not _found(results):
        raise no_feasible_plan(request, results)
    return results


def _choose(request: Request, timed: bool, names: Sequence[str]) -> list[Partitioner]:
    """Return the partitioners to run: those named, or those worth their time."""
    if not timed:
        return [get_partitioner(name) for name in names]
    if "learned" in names and (request.time_budget_s or 0.0) >= _LONG_S:
        names = [name for name in names if name != "expert"]
    # Where no rule of thumb fits, widening the search would take the others' time.
    by_rules = ExpertPartitioner(widen=False)
    return [by_rules if name == "expert" else get_partitioner(name) for name in names]


def _found(results: Sequence[SearchResult]) -> bool:
    return any(result.candidates for result in results)


def _names(results: Sequence[SearchResult]) -> set[str]:
    return {result.partitioner for result in results}


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
