"""Whole numbers that people give: how many nodes, which devices."""

from __future__ import annotations

import operator
from typing import Any

from planner.errors import ClusterError

__all__ = ["whole_number"]


def whole_number(what: str, value: Any, least: int | None = 1) -> int:
    """A number that counts something.

    Args:
        what: For the message: ``"nodes"``.
        value: An int, also of numpy; no bool, and no float even if it is whole.
        least: Smallest that makes sense; None for any.

    Raises:
        ClusterError: If it is none, or below ``least``.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ClusterError(f"{what}={value!r} is no whole number; give an int")
    if least is not None and number < least:
        raise ClusterError(f"{what}={number}; use at least {least}")
    return number
