"""A small network over a candidate's features, for compiled code.

It is a policy by itself (:class:`ScorerPolicy`) and decides in rollouts, whose results
are weighed against it by :func:`combined`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.features import NUM_FEATURES, Candidates
from envs.ramp.history import NUM_HISTORY
from planner.errors import StrategyError
from planner.simulate.compiled import compiled, copy_into, inlined
from policies.baselines import Observation

__all__ = [
    "Scorer",
    "ScorerPolicy",
    "averaged",
    "batched",
    "candidates_of",
    "check_scorer",
    "combined",
    "decide",
    "no_scorer",
    "score",
    "scores",
    "shortlist",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Index = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Inputs in the replay: features of a candidate, then those of the history.
_INPUTS = NUM_FEATURES + NUM_HISTORY


class Scorer(NamedTuple):
    """Weights of two hidden layers with ReLU and one output. h and g hidden units.

    The output is the number of jobs that the candidate is expected to block, up to a
    number that all candidates of a decision share: less is better.

    Attributes:
        first: Shape [features of a candidate + shared features, h].
        first_bias: Shape [h]; h is 0 if there is no scorer.
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
    """Return an empty scorer, so that compiled code has one type for both cases."""
    none = np.zeros(0, dtype=np.float32)
    return Scorer(
        first=np.zeros((inputs, 0), dtype=np.float32),
        first_bias=none,
        second=np.zeros((0, 0), dtype=np.float32),
        second_bias=none,
        last=none,
    )


def averaged(scorers: Sequence[Scorer]) -> Scorer:
    """Join scorers into one whose output is the mean of theirs.

    The mean of several fits to the same labels has a smaller error by chance.

    Args:
        scorers: With the same inputs.
    """
    hidden = sum(len(one.first_bias) for one in scorers)
    last = sum(len(one.second_bias) for one in scorers)
    # Units of different scorers are not connected.
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
    """Check weights and return them in the layout of compiled code.

    Args:
        scorer: The weights.
        inputs: Number of inputs; by default that of the replay.

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
    """Score one candidate.

    Args:
        scorer: The weights.
        features: Features of the candidate. Shape [f].
        history: Features that all candidates share. Shape [s].
        first: Scratch for the first hidden layer. Shape [h].
        second: Scratch for the second. Shape [g].
    """
    copy_into(first, scorer.first_bias)
    count = len(features)
    # Most features are 0 most of the time, and are skipped.
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
    """Score the candidates of b decisions; infinite where one is not possible.

    Args:
        scorer: The weights.
        candidates: Candidates with their features. Shapes [b, a, ...].
        history: Features that the candidates of a decision share. Shape [b, s].
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
    """Choose the possible candidate of least score in each of b decisions.

    Args:
        scorer: The weights.
        candidates: Candidates with their features. Shapes [b, a, ...].
        history: Features that the candidates of a decision share. Shape [b, s].
    Returns:
        Actions. Shape [b].
    """
    found = scores(scorer, candidates, history)
    return np.asarray(found.argmin(axis=1), dtype=np.int64)


def batched(
    obs: Observation, masks: Flags
) -> tuple[Mapping[str, Floats], Flags, tuple[int, ...]]:
    """Add a batch axis to observations and masks; return the shape of the answer, too.

    Raises:
        StrategyError: If turning a job away is forbidden.
    """
    flags = np.asarray(masks, dtype=np.bool_)
    if not flags[..., 0].all():
        raise StrategyError("action_masks forbid turning a job away; it always may be")
    if flags.ndim == 2:
        return obs, flags, flags.shape[:1]
    return {name: part[None] for name, part in obs.items()}, flags[None], ()


class ScorerPolicy:
    """Policy that takes the candidate of least score.

    Args:
        scorer: The weights. Beside the candidates it reads the history and, if it has
            as many inputs, the job.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = check_scorer(scorer, scorer.first.shape[0])

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`.

        Raises:
            StrategyError: If the scorer is for observations of other sizes.
        """
        seen, masks, shape = batched(obs, action_masks)
        found = scores(self.scorer, *candidates_of(self.scorer, seen, masks))
        return np.asarray(found.argmin(axis=1), dtype=np.int64).reshape(shape)


def candidates_of(
    scorer: Scorer, obs: Observation, masks: Flags
) -> tuple[Candidates, Floats]:
    """Turn observations into the inputs of a scorer.

    Args:
        scorer: The scorer.
        obs: Observations of b decisions.
        masks: Actions that are allowed. Shape [b, a].
    Returns:
        Candidates, and features that those of a decision share, shape [b, s].

    Raises:
        StrategyError: If the scorer is for observations of other sizes.
    """
    features, shared = np.ascontiguousarray(obs["candidates"]), obs["history"]
    if features.shape[2] + shared.shape[1] < scorer.first.shape[0]:
        shared = np.concatenate([shared, obs["job"]], axis=1)
    found = features.shape[2] + shared.shape[1]
    if found != scorer.first.shape[0]:
        raise StrategyError(
            f"a scorer of {scorer.first.shape[0]} inputs for observations of {found}; "
            f"give the weights that were trained in this world"
        )
    none = np.zeros(masks.shape)
    candidates = Candidates(
        possible=masks, servers=none.astype(np.uint64), jct_s=none, features=features
    )
    return candidates, np.ascontiguousarray(shared)


#: Candidates that a scorer expects to block so many more jobs than the best one are not
#: followed: rollouts were never seen to prefer them, and the time is better spent on
#: more futures.
_FAR = 0.6
#: Variance of a scorer's error in the differences of candidates. Source: residual of a
#: fit (about 0.07) less the variance of its labels (0.05), rounds 8 to 16 of the
#: training of the shipped policy.
_DOUBT = 0.02


def shortlist(believed: Array, far: float = _FAR) -> Flags:
    """Select the candidates that are worth following in rollouts.

    Args:
        believed: Scores; infinite if a candidate is not possible. Shape [a].
        far: Distance from the best score that is too large.
    Returns:
        Shape [a].
    """
    found: Flags = believed <= believed.min() + far
    return found


def combined(
    believed: Array, costs: Array, variances: Array, doubt: float = _DOUBT
) -> Array:
    """Combine a scorer's estimate with that of rollouts, weighted by variances.

    Args:
        believed: Jobs that each candidate blocks, up to a number that all share, by the
            scorer. Shape [a].
        costs: The same by rollouts. Shape [a].
        variances: Variances of the differences by rollouts. Shape [a].
        doubt: Variance of the differences by the scorer.
    Returns:
        Jobs blocked, relative to the mean of the candidates. Shape [a].
    """
    weight = doubt / (doubt + np.maximum(variances, 1e-12))
    rolled, thought = costs - costs.mean(), believed - believed.mean()
    found: Array = weight * rolled + (1.0 - weight) * thought
    return found
