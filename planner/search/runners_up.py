"""Runners-up of a search, each with the reason why it was not chosen."""

from __future__ import annotations

from collections.abc import Sequence

from planner.schema import Alternative
from planner.schema.describe import PART_NAMES
from planner.search.base import Candidate, Objective, SearchResult, preference
from planner.units import format_bytes, format_seconds

__all__ = ["runners_up"]

_SHOWN = 8
#: Most runners-up with one mesh, so that the list shows different ones.
_PER_MESH = 2
#: Relative difference below which times and sizes are called equal.
_EQUAL = 5e-4
#: Parts of the step are named if they changed by this share of the largest change.
_NAMED = 0.25


def runners_up(
    results: Sequence[SearchResult], best: Candidate, objective: Objective
) -> tuple[Alternative, ...]:
    """Return the best candidates that were not chosen, best first.

    Args:
        results: Results of all partitioners that were run.
        best: The candidate that was chosen.
        objective: The request's objective.
    """
    # A label omits the cut alone: two cuts of one strategy are one line.
    shown = {best.strategy.label()}
    of_mesh: dict[tuple[int, ...], int] = {}
    chosen: list[Alternative] = []
    everything = sorted(
        (c for result in results for c in result.candidates),
        key=lambda candidate: preference(candidate, objective),
    )
    for candidate in everything:
        mesh = candidate.strategy.mesh.degrees
        if of_mesh.get(mesh, 0) == _PER_MESH:
            continue
        label = candidate.strategy.label()
        if label in shown:
            continue
        shown.add(label)
        of_mesh[mesh] = of_mesh.get(mesh, 0) + 1
        chosen.append(
            Alternative(
                label=label,
                step_time_s=candidate.cost.step_time_s,
                peak_memory_bytes=candidate.cost.peak_memory_bytes,
                reason=_reason(candidate, best, objective),
            )
        )
        if len(chosen) == _SHOWN:
            break
    return tuple(chosen)


def _reason(other: Candidate, best: Candidate, objective: Objective) -> str:
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
