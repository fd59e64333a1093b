"""What may be chosen: strategies, one by one and as tables, and their rules."""

from planner.space.build import build_strategy, patterns_for, skeleton
from planner.space.enumerate import (
    MESH_COLUMNS,
    enumerate_meshes,
    enumerate_strategies,
    expand_meshes,
)
from planner.space.facts import Facts, gather_facts
from planner.space.pins import (
    PINNABLE,
    Pin,
    normalize_pins,
    pin_text,
    read_pins,
)
from planner.space.rules import RULES, Rule, broken_rules, check, legal
from planner.space.table import RECOMPUTE_NAMES, StrategyTable

__all__ = [
    "MESH_COLUMNS",
    "PINNABLE",
    "RECOMPUTE_NAMES",
    "RULES",
    "Facts",
    "Pin",
    "Rule",
    "StrategyTable",
    "broken_rules",
    "build_strategy",
    "check",
    "enumerate_meshes",
    "enumerate_strategies",
    "expand_meshes",
    "gather_facts",
    "legal",
    "normalize_pins",
    "patterns_for",
    "pin_text",
    "read_pins",
    "skeleton",
]
