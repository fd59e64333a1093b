"""Runners-up of a search, one of each family, with why they were not chosen."""

from __future__ import annotations

from collections.abc import Sequence

from planner.schema import Alternative
from planner.schema.describe import PART_NAMES
from planner.search.base import (
    Candidate,
    Objective,
    Request,
    SearchResult,
    preference,
)
from planner.search.families import PLAIN, data_parallel_alone, family
from planner.units import format_bytes, format_seconds

__all__ = ["runners_up"]

_SHOWN = 8
#: Relative difference below which times and sizes are called equal.
_EQUAL = 5e-4
#: Parts of the step are named if they changed by this share of the largest change.
_NAMED = 0.25


def runners_up(
    request: Request, results: Sequence[SearchResult], best: Candidate
) -> tuple[Alternative, ...]:
    """Return candidates that were not chosen: the best of each family, best first.

    Data parallelism alone is always among them, if it is legal: it is the first that
    people ask for. Where it does not fit, it comes last.

    Args:
        request: The question.
        results: Results of all partitioners that were run.
        best: The candidate that was chosen.
    """
    objective = request.objective
    found = [c for result in results for c in result.candidates]
    families = {family(c.strategy) for c in found}
    if results and results[0].partitioner != "given" and PLAIN not in families:
        plain = data_parallel_alone(request)
        found += [plain] if plain is not None else []
    found.sort(key=lambda c: (not c.cost.fits, *preference(c, objective)))
    chosen: dict[str, Candidate] = {}
    for candidate in found:
        # A label omits the cut alone: two cuts of one strategy are one line.
        if candidate.strategy.label() != best.strategy.label():
            chosen.setdefault(family(candidate.strategy), candidate)
    return tuple(
        Alternative(
            label=candidate.strategy.label(),
            family=kind,
            step_time_s=candidate.cost.step_time_s,
            peak_memory_bytes=candidate.cost.peak_memory_bytes,
            reason=_reason(candidate, best, objective),
        )
        for kind, candidate in list(chosen.items())[:_SHOWN]
    )


def _reason(other: Candidate, best: Candidate, objective: Objective) -> str:
    lack = other.cost.lack_bytes
    if lack > 0:
        return f"does not fit: {format_bytes(lack)} over the limit"
    faster = other.cost.step_time_s < best.cost.step_time_s * (1 - _EQUAL)
    if objective == "throughput" and faster:
        ahead = preference(best, objective)[0] < preference(other, objective)[0]
        behind = "less certain" if ahead else "less simple"
        return f"{_speed(other, best)} by prediction, but {behind}"
    speed, memory = _speed(other, best), _memory(other, best)
    if objective == "memory" and memory:
        return f"{memory}, {speed}"
    if objective == "throughput_per_device":
        here, there = (c.strategy.mesh.num_devices for c in (other, best))
        if here != there:
            return f"{speed} on {here} devices instead of {there}"
    causes = _causes(other, best)
    if causes:
        return f"{speed}: {causes}"
    sent, least = (sum(c.cost.link_bytes.values()) for c in (other, best))
    if sent > least * (1 + _EQUAL):
        traffic = f"{format_bytes(sent - least)} more to send"
        return f"{speed}, with {memory + ', but ' if memory else ''}{traffic}"
    return f"{speed}, with {memory or 'as much memory'}"


def _speed(other: Candidate, best: Candidate) -> str:
    ratio = other.cost.step_time_s / best.cost.step_time_s
    if abs(ratio - 1) < _EQUAL:
        return "as fast"
    if ratio >= 2:
        return f"takes {ratio:.1f} times as long"
    return f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"


def _memory(other: Candidate, best: Candidate) -> str:
    """Describe the difference on the fullest device; empty if it is negligible."""
    more = other.cost.peak_memory_bytes - best.cost.peak_memory_bytes
    if abs(more) < _EQUAL * best.cost.peak_memory_bytes:
        return ""
    word = "more" if more > 0 else "less"
    return f"{format_bytes(abs(more))} {word} memory per device"


def _causes(other: Candidate, best: Candidate) -> str:
    """Name the parts of the step that grew or shrank; empty if it is not slower."""
    seconds = other.cost.step_time_s - best.cost.step_time_s
    if seconds < _EQUAL * best.cost.step_time_s:
        return ""
    changes = {
        part: spent - best.cost.breakdown_s.get(part, 0.0)
        for part, spent in other.cost.breakdown_s.items()
    }
    floor = _NAMED * max(map(abs, changes.values()))
    told = sorted(
        (item for item in changes.items() if abs(item[1]) >= floor),
        key=lambda item: -item[1],
    )
    return ", ".join(
        f"{PART_NAMES.get(part, part)} {'+' if change > 0 else '-'}"
        f"{format_seconds(abs(change))}"
        for part, change in told
    )
