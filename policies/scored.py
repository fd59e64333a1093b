"""A scorer as a policy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from envs.ramp.features import Candidates
from planner.errors import StrategyError
from policies.baselines import Flags, Index, Observation
from policies.scorer import Scorer, check_scorer, scores

__all__ = ["ScorerPolicy", "batched", "candidates_of"]

Floats = NDArray[np.float32]


def batched(
    obs: Observation, masks: Flags
) -> tuple[Mapping[str, Floats], Flags, tuple[int, ...]]:
    """Observations and masks with a leading axis, and the shape of the answer.

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
    """Takes the candidate of least score.

    Args:
        scorer: The weights. Beside the candidates it looks at the history and, if it
            has as many inputs, at the job.
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
    """Observations as a scorer's code takes them.

    Args:
        scorer: That is to look at them.
        obs: Of b decisions.
        masks: Which actions are allowed. Shape [b, a].
    Returns:
        Candidates, and what those of a decision share, shape [b, s].

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
