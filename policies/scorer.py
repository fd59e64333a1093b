"""A small network over a candidate's features, for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.features import NUM_FEATURES
from envs.ramp.history import NUM_HISTORY
from planner.errors import StrategyError
from planner.simulate.compiled import inlined

__all__ = ["Scorer", "check_scorer", "no_scorer", "score"]

Floats = NDArray[np.float32]

#: Features of a candidate, then those of the history.
_INPUTS = NUM_FEATURES + NUM_HISTORY


class Scorer(NamedTuple):
    """Weights of two hidden layers with ReLU and one output. h and g hidden units.

    The output is how many jobs the candidate is expected to block, up to a number that
    all candidates of a decision share: less is better.

    Attributes:
        first: Shape [NUM_FEATURES + NUM_HISTORY, h].
        first_bias: Shape [h]; of no units if there is no scorer.
        second: Shape [h, g].
        second_bias: Shape [g].
        last: Shape [g].
    """

    first: Floats
    first_bias: Floats
    second: Floats
    second_bias: Floats
    last: Floats


def no_scorer() -> Scorer:
    """What stands for none, so that compiled code has one type to deal with."""
    none = np.zeros(0, dtype=np.float32)
    return Scorer(
        first=np.zeros((_INPUTS, 0), dtype=np.float32),
        first_bias=none,
        second=np.zeros((0, 0), dtype=np.float32),
        second_bias=none,
        last=none,
    )


def check_scorer(scorer: Scorer) -> Scorer:
    """The same weights as compiled code takes them.

    Raises:
        StrategyError: If shapes do not go together, or a weight is not a number.
    """
    hidden, last = len(scorer.first_bias), len(scorer.second_bias)
    wanted = ((_INPUTS, hidden), (hidden,), (hidden, last), (last,), (last,))
    for name, part, shape in zip(Scorer._fields, scorer, wanted, strict=True):
        if part.shape != shape:
            raise StrategyError(
                f"{name} of a scorer has the shape {part.shape}; here it is {shape}"
            )
        if not np.isfinite(part).all():
            raise StrategyError(f"{name} of a scorer has weights that are not finite")
    return Scorer(*(np.ascontiguousarray(part, dtype=np.float32) for part in scorer))


@inlined
def score(
    scorer: Scorer, features: Floats, history: Floats, first: Floats, second: Floats
) -> float:
    """Of one candidate.

    Args:
        scorer: The weights.
        features: Of the candidate. Shape [NUM_FEATURES].
        history: Of the episode. Shape [NUM_HISTORY].
        first: Room for the first hidden layer. Shape [h].
        second: Room for the second. Shape [g].
    """
    first[:] = scorer.first_bias
    count = len(features)
    # Most features are 0 most of the time, and cost nothing that way.
    for index in range(count + len(history)):
        value = features[index] if index < count else history[index - count]
        if value != 0.0:
            for unit in range(len(first)):
                first[unit] += value * scorer.first[index, unit]
    second[:] = scorer.second_bias
    for index in range(len(first)):
        value = first[index]
        if value > 0.0:
            for unit in range(len(second)):
                second[unit] += value * scorer.second[index, unit]
    total = np.float32(0.0)
    for unit in range(len(second)):
        if second[unit] > 0.0:
            total += second[unit] * scorer.last[unit]
    return float(total)
