"""What other launchers can say of a plan. One file a target; data, no writing.

Searches keep to a target's limits by these declarations, exporters refuse by them.
"""

from planner.targets.base import Case, Refusal, Rule, Target
from planner.targets.fields import EVERYTHING, FIELDS, Field, value_of
from planner.targets.layers import (
    StageLayers,
    layer_stem,
    layers_of_stages,
    may_be_even,
)
from planner.targets.nearest import nearest_expressible
from planner.targets.placement import Placement, placement_of, same_on_every_host
from planner.targets.registry import get_target, target_names

__all__ = [
    "EVERYTHING",
    "FIELDS",
    "Case",
    "Field",
    "Placement",
    "Refusal",
    "Rule",
    "StageLayers",
    "Target",
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
