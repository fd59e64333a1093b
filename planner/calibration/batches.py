"""Into how many microbatches of how many samples a measured run cut its batch."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.calibration.frameworks import Framework
from planner.calibration.points import Point

__all__ = ["batches"]

#: Samples of a microbatch, at most, where a row leaves it out: an assumption.
_MOST = 4


def batches(
    point: Point, framework: Framework, ways: int, why: list[str]
) -> tuple[int, int]:
    """Samples of a microbatch, and microbatches of a step.

    Args:
        point: The row.
        framework: That it ran in.
        ways: Replicas, dp.
        why: Takes what was assumed.
    """
    pp = point.pp or 1
    point = _as_cut(point, framework, ways, why)
    microbatch, total = point.microbatch, point.global_batch
    if microbatch is None:
        most = None if framework.microbatches == "whole" else _MOST
        microbatch = _unstated((total or ways) / ways, most) if pp == 1 else 1
        why.append(f"microbatch {microbatch}, not given")
    stated = re.search(r"(\d+) grad-accum|grad accumulation (\d+)", point.notes.lower())
    if total is None and stated:
        return microbatch, int(stated[1] or stated[2])
    if total is None:
        count = 4 * pp if pp > 1 else 1
        why.append(f"{count} microbatches a step, global batch not given")
        return microbatch, count
    exact = total / (microbatch * ways)
    if exact < 1:
        why.append(f"global batch {total} is less than {microbatch} on each replica")
    elif exact != int(exact):
        why.append(f"{exact:.2f} microbatches a step taken as {round(exact)}")
    return microbatch, max(1, round(exact))


def _as_cut(point: Point, framework: Framework, ways: int, why: list[str]) -> Point:
    """The row with the framework's microbatch where its own is a guess."""
    notes, pp = point.notes.lower(), point.pp or 1
    given = point.microbatch is not None and "inferred" not in notes
    if framework.microbatches != "stages" or pp == 1 or given:
        return point
    found = re.search(r"local batch (\d+)", notes)
    if found is None and point.global_batch is None:
        return point
    each = int(found[1]) if found else (point.global_batch or ways) // ways
    if each % pp:
        return point
    why.append(f"{pp} microbatches of {each // pp}, as many as stages")
    return replace(
        point, microbatch=each // pp, global_batch=point.global_batch or each * ways
    )


def _unstated(each: float, most: int | None) -> int:
    """Of the ``each`` samples a step that a replica without a pipeline has.

    As many as divide them; where the replicas do not divide the batch, as many as may
    be: under ZeRO 3 every microbatch gathers the model, so that one sample at a time
    would be the slowest guess.
    """
    whole = max(1, round(each))
    if most is None or each != int(each):
        return min(whole, most or whole)
    return next(size for size in range(min(whole, most), 0, -1) if each % size == 0)
