"""Where two plans differ, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.schema.plan import Plan

__all__ = ["diff"]

_ABSENT = object()
#: Fields and mappings of fields whose numbers have a unit.
_UNITS = {"_s": format_seconds, "_bytes": format_bytes}
#: Longer lists of names are told by their ends.
_LONG = 4


def diff(ours: Plan, theirs: Plan) -> tuple[str, ...]:
    """Fields in which two plans differ; clock times are left out.

    Lists of objects that differ in length, and runners-up, are told as a whole; numbers
    have their unit and the change in percent.
    """
    left, right = (
        {k: v for k, v in plan.to_data().items() if k not in plan.CLOCK_FIELDS}
        for plan in (ours, theirs)
    )
    return tuple(_differences(left, right, ""))


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _differences(
                ours.get(key, _ABSENT),
                theirs.get(key, _ABSENT),
                f"{path}.{key}" if path else key,
            )
    elif _objects(ours) and _objects(theirs) and _alike(ours, theirs):
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(left, right, f"{path}[{index}]")
    else:
        left, right = (_shown(value, path) for value in (ours, theirs))
        yield f"{path}: {left} -> {right}{_change(ours, theirs)}"


def _alike(ours: list[Any], theirs: list[Any]) -> bool:
    """True if entries have a counterpart: runners-up are told as a whole."""
    return len(ours) == len(theirs) and not _labelled(ours)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _shown(value: Any, path: str) -> str:
    if value is _ABSENT:
        return "(absent)"
    if _labelled(value):
        more = f" and {len(value) - 1} more" if len(value) > 1 else ""
        return f"{value[0]['label']}{more}"
    if isinstance(value, list) and (_objects(value) or len(value) > _LONG):
        plain = [part for part in value if not isinstance(part, dict | list)]
        count = f"{len(value)} {'entry' if len(value) == 1 else 'entries'}"
        return f"{plain[0]} to {plain[-1]}, {count}" if plain else count
    if isinstance(value, float):
        return _number(value, path)
    return str(value)


def _labelled(value: Any) -> bool:
    return _objects(value) and all("label" in part for part in value)


def _number(value: float, path: str) -> str:
    names = path.split(".")[-2:]
    if any(name.endswith("_per_s") for name in names):
        return f"{value:,.0f}/s" if value >= 1000 else f"{value:.4g}/s"
    for ending, form in _UNITS.items():
        if any(name.endswith(ending) for name in names):
            return form(value)
    return f"{value:.4g}"


def _change(ours: Any, theirs: Any) -> str:
    """Relative change of numbers that were measured or predicted."""
    if not (isinstance(ours, float) and isinstance(theirs, float) and ours):
        return ""
    percent = 100 * (theirs / ours - 1)
    return f" ({percent:+.1f}%)" if abs(percent) >= 0.1 else f" ({percent:+.1g}%)"
