"""Launchers that a plan can be exported to, and the limits of each.

Declarations alone, no writing of files: searches keep within the limits of a target,
exporters report its violations.
"""

from planner.targets.base import (
    EVERYTHING,
    FIELDS,
    Case,
    Field,
    Rule,
    Target,
    Violation,
    get_target,
    target_names,
    value_of,
)
from planner.targets.layers import (
    StageLayers,
    layer_stem,
    layers_of_stages,
    may_be_even,
)
from planner.targets.nearest import nearest_expressible
from planner.targets.rules import Placement, placement_of, same_on_every_host

__all__ = [
    "EVERYTHING",
    "FIELDS",
    "Case",
    "Field",
    "Placement",
    "Rule",
    "StageLayers",
    "Target",
    "Violation",
    "get_target",
    "layer_stem",
    "layers_of_stages",
    "may_be_even",
    "nearest_expressible",
    "placement_of",
    "same_on_every_host",
    "target_names",
    "value_of",
]
