"""Price of a strategy in time and memory, without running it."""

from planner.cost.context import PricingContext
from planner.cost.evidence import Evidence, Risk
from planner.cost.model import CostModel
from planner.cost.recipes import RECIPES, Recipe, get_recipe
from planner.cost.result import PARTS, Cost, CostTable
from planner.cost.strategy.step import StepTimeline

__all__ = [
    "PARTS",
    "RECIPES",
    "Cost",
    "CostModel",
    "CostTable",
    "Evidence",
    "PricingContext",
    "Recipe",
    "Risk",
    "StepTimeline",
    "get_recipe",
]
