"""Back-propagation: pipelines are priced as their schedules say."""

from __future__ import annotations

from planner.cost.pipelines import PipelinePricing
from planner.schema.methods import Learning

__all__ = ["BackpropagationPricing"]


class BackpropagationPricing:
    """Price of plain training."""

    def __init__(self, learning: Learning) -> None:
        pass

    def of(self, plain: PipelinePricing) -> PipelinePricing:
        """Return the pipeline's own pricing."""
        return plain
