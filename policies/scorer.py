"""A small network over a candidate's features, for compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.features import NUM_FEATURES, Candidates
from envs.ramp.history import NUM_HISTORY
from planner.errors import StrategyError
from planner.simulate.compiled import compiled, copy_into, inlined

__all__ = [
    "Scorer",
    "averaged",
    "check_scorer",
    "decide",
    "no_scorer",
    "score",
    "scores",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]

#: Of the replay: features of a candidate, then those of the history.
_INPUTS = NUM_FEATURES + NUM_HISTORY


class Scorer(NamedTuple):
    """Weights of two hidden layers with ReLU and one output. h and g hidden units.

    The output is how many jobs the candidate is expected to block, up to a number that
    all candidates of a decision share: less is better.

    Attributes:
        first: Shape [features of a candidate + those that all share, h].
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


def no_scorer(inputs: int = _INPUTS) -> Scorer:
    """What stands for none, so that compiled code has one type to deal with."""
    none = np.zeros(0, dtype=np.float32)
    return Scorer(
        first=np.zeros((inputs, 0), dtype=np.float32),
        first_bias=none,
        second=np.zeros((0, 0), dtype=np.float32),
        second_bias=none,
        last=none,
    )


def averaged(scorers: Sequence[Scorer]) -> Scorer:
    """A scorer of all their units whose output is the mean of theirs.

    What fits to the same labels have wrong by chance is then less.

    Args:
        scorers: Of the same inputs.
    """
    hidden = sum(len(one.first_bias) for one in scorers)
    last = sum(len(one.second_bias) for one in scorers)
    # Units of one do not hear those of another.
    second = np.zeros((hidden, last), dtype=np.float32)
    row = column = 0
    for one in scorers:
        rows, columns = one.second.shape
        second[row : row + rows, column : column + columns] = one.second
        row, column = row + rows, column + columns
    return Scorer(
        first=np.concatenate([one.first for one in scorers], axis=1),
        first_bias=np.concatenate([one.first_bias for one in scorers]),
        second=second,
        second_bias=np.concatenate([one.second_bias for one in scorers]),
        last=np.concatenate([one.last / np.float32(len(scorers)) for one in scorers]),
    )


def check_scorer(scorer: Scorer, inputs: int = _INPUTS) -> Scorer:
    """The same weights as compiled code takes them.

    Args:
        scorer: The weights.
        inputs: How many numbers it is to look at; by default those of the replay.

    Raises:
        StrategyError: If shapes do not go together, or a weight is not a number.
    """
    hidden, last = len(scorer.first_bias), len(scorer.second_bias)
    wanted = ((inputs, hidden), (hidden,), (hidden, last), (last,), (last,))
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
        features: Of the candidate. Shape [f].
        history: What all candidates share, of the episode. Shape [s].
        first: Room for the first hidden layer. Shape [h].
        second: Room for the second. Shape [g].
    """
    copy_into(first, scorer.first_bias)
    count = len(features)
    # Most features are 0 most of the time, and cost nothing that way.
    for index in range(count + len(history)):
        value = features[index] if index < count else history[index - count]
        if value != 0.0:
            for unit in range(len(first)):
                first[unit] += value * scorer.first[index, unit]
    copy_into(second, scorer.second_bias)
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


@compiled
def scores(scorer: Scorer, candidates: Candidates, history: Floats) -> Array:
    """Of the candidates of b decisions, infinite where one is not possible.

    Args:
        scorer: The weights.
        candidates: Of the decisions, with their features. Shapes [b, a, ...].
        history: Of their episodes. Shape [b, NUM_HISTORY].
    Returns:
        Shape [b, a].
    """
    found = np.full(candidates.possible.shape, np.inf)
    first = np.empty_like(scorer.first_bias)
    second = np.empty_like(scorer.second_bias)
    for row in range(len(history)):
        for choice in range(candidates.possible.shape[1]):
            if candidates.possible[row, choice]:
                features = candidates.features[row, choice]
                found[row, choice] = score(
                    scorer, features, history[row], first, second
                )
    return found


def decide(scorer: Scorer, candidates: Candidates, history: Floats) -> Index:
    """The possible candidate of least score in each of b decisions.

    Args:
        scorer: The weights.
        candidates: Of the decisions, with their features. Shapes [b, a, ...].
        history: Of their episodes. Shape [b, NUM_HISTORY].
    Returns:
        Actions. Shape [b].
    """
    found = scores(scorer, candidates, history)
    return np.asarray(found.argmin(axis=1), dtype=np.int64)
