"""The space of strategies: tables of them, and the rules that they keep."""

from planner.space.build import build_strategy, patterns_for, skeleton
from planner.space.enumerate import (
    enumerate_meshes,
    enumerate_strategies,
    expand_meshes,
)
from planner.space.facts import (
    OWN_TARGETS,
    Facts,
    LayerRun,
    find_layers,
    gather_facts,
)
from planner.space.pins import (
    Pin,
    normalize_pins,
    pin_text,
    read_pins,
)
from planner.space.regime import Regime
from planner.space.rules import RULES, Rule, check, legal, violations, zero_fits
from planner.space.table import MESH_COLUMNS, RECOMPUTE_NAMES, StrategyTable
from planner.space.target import with_expressible_streams

__all__ = [
    "MESH_COLUMNS",
    "OWN_TARGETS",
    "RECOMPUTE_NAMES",
    "RULES",
    "Facts",
    "LayerRun",
    "Pin",
    "Regime",
    "Rule",
    "StrategyTable",
    "build_strategy",
    "check",
    "enumerate_meshes",
    "enumerate_strategies",
    "expand_meshes",
    "find_layers",
    "gather_facts",
    "legal",
    "normalize_pins",
    "patterns_for",
    "pin_text",
    "read_pins",
    "skeleton",
    "violations",
    "with_expressible_streams",
    "zero_fits",
]
