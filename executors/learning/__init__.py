"""Rules by which a batch becomes new weights, one file a method.

The registry of methods (:mod:`planner.schema.methods`) names the class of each, which
is made from the strategy's document.
"""

from __future__ import annotations

from executors.steps import Step
from planner.plugins import load_object
from planner.schema import Strategy
from planner.schema.methods import method_of

__all__ = ["step_of"]


def step_of(strategy: Strategy) -> Step:
    """Make the rule of a strategy's steps.

    Raises:
        UnknownNameError: If its learning is not registered.
    """
    learning = strategy.learning
    method = method_of("learning", learning)
    assert method.runs is not None, "it has no executor, a violation"
    found: Step = load_object(method.runs)(learning)
    return found
