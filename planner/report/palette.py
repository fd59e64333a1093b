"""Colours of the report, from its style sheet: one place for page and figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from planner.report.frame import asset

__all__ = ["palette"]


@cache
def palette() -> Mapping[str, str]:
    """Name of a colour to ``#rrggbb``, of the light theme; after Okabe and Ito."""
    found: dict[str, str] = {}
    for name, colour in re.findall(
        r"--([\w-]+):\s*(#[0-9a-f]{6});", asset("report.css")
    ):
        # The light theme comes first; others repeat its names.
        found.setdefault(name, colour)
    return MappingProxyType(found)
