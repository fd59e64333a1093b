"""The plan itself, for Meshwright's own executors and for tools that read it."""

from __future__ import annotations

from planner.targets.base import Target
from planner.targets.fields import EVERYTHING

__all__ = ["TARGETS"]

TARGETS = (
    Target(
        name="json",
        title="Meshwright plan",
        version="1",
        runs="itself",
        says=EVERYTHING,
        check="the plan's own schema",
    ),
)
