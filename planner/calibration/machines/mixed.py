"""Rows whose devices are of several kinds: ``16xA100 + 16xV100``."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.calibration.machines.gpu_names import chips_named, read_device
from planner.calibration.points import Point
from planner.errors import CalibrationError

__all__ = ["of_one_kind"]

_BETWEEN = re.compile(r"\s*(?:[+&,;/]|\band\b)\s*")
_IN_FRONT = re.compile(r"^\(?(\d+)\s*(?:[x×*]|gpus? of)?\s*(.*)")
_BEHIND = re.compile(r"(?:(?<![a-z])[x×*]\s*|\()(\d+)\)?$")


def of_one_kind(point: Point) -> tuple[tuple[Point, ...], tuple[str, ...]]:
    """A row as rows of one kind each, in the order in which it names them.

    Kinds stand apart by ``+``, ``&``, ``/``, a comma or "and"; each may say how many
    there are, for all of them or in proportion. Where none does, there are as many of
    each.

    Returns:
        The row itself where it names one kind; and what had to be assumed.

    Raises:
        CalibrationError: If the counts do not add up to ``n_gpus``.
    """
    parts = [part for part in _BETWEEN.split(point.gpu.lower()) if chips_named(part)]
    kinds = {read_device(part, None)[0].name for part in parts}
    if len(kinds) < 2:
        return (point,), ()
    counts = [_count(part) for part in parts]
    if any(count is None for count in counts):
        counts = [1] * len(parts)
    said = [count or 1 for count in counts]
    times, rest = divmod(point.n_gpus, sum(said))
    if rest:
        raise CalibrationError(
            f"point {point.point_id}: gpu={point.gpu!r} and n_gpus={point.n_gpus} do "
            "not say how many there are of each kind; write both, as in "
            "'16xA100 + 8xV100'"
        )
    rows = tuple(
        replace(point, gpu=part, n_gpus=count * times)
        for part, count in zip(parts, said, strict=True)
    )
    shares = ", ".join(f"{row.n_gpus} of {row.gpu}" for row in rows)
    return rows, () if times == 1 else (f"{shares}: shares of n_gpus={point.n_gpus}",)


def _count(part: str) -> int | None:
    front = _IN_FRONT.search(part)
    # The number in "2080 ti" is the chip's.
    if front and chips_named(front[2]) == chips_named(part):
        return int(front[1])
    behind = _BEHIND.search(part)
    return int(behind[1]) if behind else None
