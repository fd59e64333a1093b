"""Pricing of rules by which a batch becomes new weights, one file a method.

Each file holds a :class:`LearningPricing`, made from the method's document, which knows
how the pipeline of a schedule is priced under the rule.
"""

from __future__ import annotations

from typing import Protocol

from planner.cost.pipelines import PipelinePricing
from planner.plugins import load_object
from planner.schema.methods import Learning, method_of

__all__ = ["LearningPricing", "learning_pricing"]


class LearningPricing(Protocol):
    """Price of one rule."""

    def of(self, plain: PipelinePricing) -> PipelinePricing:
        """Return the pricing of a pipeline; one object for those priced alike.

        Args:
            plain: Its pricing under backpropagation.
        """
        ...


def learning_pricing(learning: Learning) -> LearningPricing:
    """Return the pricing of a rule."""
    found = load_object(method_of("learning", learning).prices)
    pricing: LearningPricing = found(learning)
    return pricing
