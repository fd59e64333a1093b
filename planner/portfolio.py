"""Several partitioners asked the same question, one after the other."""

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

__all__ = ["AUTO", "best_answer", "names_of", "run_partitioners"]

#: What ``partitioner="auto"`` asks; the best answer wins.
AUTO = ("expert", "learned", "exhaustive")
#: On a clock each gets its share of the time that is left. Where all devices and links
#: are equal the exhaustive search, exact there, soon ends in small spaces; elsewhere it
#: knows but a few orders of the devices. (On 50 uniform validation worlds the best of
#: four tenths of a second of the learned one and six of the exhaustive one was 0.8 %
#: above the exhaustive one without a clock, of nine and one 0.1 % below it.)
_UNIFORM = {"expert": 0.05, "learned": 0.9, "exhaustive": 1.0}
_UNEVEN = {"expert": 0.05, "learned": 1.0, "exhaustive": 1.0}
#: Rules of thumb have an answer within some 0.05 s, and within up to a second where
#: memory is short, which is when the learned one needs all of the time. With more
#: seconds than this it is asked without them: on 200 validation worlds at 1 s one of
#: its answers was worse than theirs, by 0.4 %.
_LONG_S = 0.3
#: Who looks, when nothing fits, through the whole space whatever the clock says.
_LOOKS_EVERYWHERE = {"learned"}
#: With less than this share of the clock left nobody else is asked: a first look at the
#: space takes longer.
_TOO_LITTLE = 0.02


def names_of(partitioner: str | Sequence[str]) -> tuple[str, ...]:
    """Registered names behind what ``plan`` was given."""
    names = [partitioner] if isinstance(partitioner, str) else list(partitioner)
    return tuple(
        dict.fromkeys(
            one for name in names for one in (AUTO if name == "auto" else (name,))
        )
    )


def run_partitioners(
    request: Request, partitioner: str | Sequence[str]
) -> list[SearchResult]:
    """Answers of all partitioners that were named.

    Args:
        request: The question. Its time is shared: by equal parts of what is left, in
            ``auto`` by who is good at what.
        partitioner: A name, several, or ``auto``.

    Raises:
        NoFeasiblePlanError: If none found anything that fits.
        UnknownNameError: If none of that name is installed.
    """
    hurried = partitioner == "auto" and request.time_budget_s is not None
    asked = _chosen(request, hurried, names_of(partitioner))
    started = time.perf_counter()
    results: list[SearchResult] = []
    for waiting, one in zip(range(len(asked), 0, -1), asked, strict=True):
        question = request
        if request.time_budget_s is not None:
            left = request.time_budget_s - (time.perf_counter() - started)
            little = left <= _TOO_LITTLE * request.time_budget_s
            if little and (_found(results) or _LOOKS_EVERYWHERE & _names(results)):
                break
            uniform = request.setting.cluster.is_uniform
            shares = _UNIFORM if uniform else _UNEVEN
            share = shares[one.name] if partitioner == "auto" else 1 / waiting
            question = replace(request, time_budget_s=max(0.0, left * share))
        answer = one.search(question)
        if request.launcher_limits is not None:
            # Also of partitioners that do not end in planner.search.base.finish.
            kept = expressible(request.launcher_limits, answer.candidates)
            answer = replace(answer, candidates=kept)
        results.append(answer)
    if hurried and not _found(results) and not _LOOKS_EVERYWHERE & _names(results):
        # A late plan is better than the claim that there is none.
        results = [one for one in results if one.partitioner != "expert"]
        results.append(ExpertPartitioner().search(request))
    if not _found(results):
        raise no_feasible_plan(request, results)
    return results


def _chosen(request: Request, hurried: bool, names: Sequence[str]) -> list[Partitioner]:
    """Return the partitioners to run: those named, or those worth their time."""
    if not hurried:
        return [get_partitioner(name) for name in names]
    if "learned" in names and (request.time_budget_s or 0.0) >= _LONG_S:
        names = [name for name in names if name != "expert"]
    # Where no rule of thumb fits, looking for the least departure from them would
    # eat the others' time.
    by_rules = ExpertPartitioner(widen=False)
    return [by_rules if name == "expert" else get_partitioner(name) for name in names]


def _found(results: Sequence[SearchResult]) -> bool:
    return any(result.candidates for result in results)


def _names(results: Sequence[SearchResult]) -> set[str]:
    return {result.partitioner for result in results}


def best_answer(
    results: Sequence[SearchResult], objective: Objective
) -> tuple[SearchResult, Candidate]:
    """The best candidate of all partitioners; the earlier one among equals."""
    found = [(result, c) for result in results for c in result.candidates[:1]]
    return min(found, key=lambda pair: preference(pair[1], objective))
