"""Policies that were learned, deciding as the baselines do."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from envs.ramp.features import Candidates
from planner.errors import StrategyError
from policies.baselines import Flags, Index, Observation
from policies.pointer import PointerNetwork
from policies.scorer import Scorer, check_scorer, decide

__all__ = ["PointerDecider", "ScorerPolicy"]

Floats = NDArray[np.float32]


def _batched(
    obs: Observation, masks: Flags
) -> tuple[Mapping[str, Floats], Flags, tuple[int, ...]]:
    """Observations and masks with a leading axis, and the shape of the answer."""
    flags = np.asarray(masks, dtype=np.bool_)
    if not flags[..., 0].all():
        raise StrategyError("action_masks forbid turning a job away; it always may be")
    if flags.ndim == 2:
        return obs, flags, flags.shape[:1]
    return {name: part[None] for name, part in obs.items()}, flags[None], ()


class ScorerPolicy:
    """Takes the candidate of least score.

    Args:
        scorer: The weights.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = check_scorer(scorer)

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`."""
        seen, masks, shape = _batched(obs, action_masks)
        features = np.ascontiguousarray(seen["candidates"])
        none = np.zeros(masks.shape)
        candidates = Candidates(
            possible=masks,
            servers=none.astype(np.uint64),
            jct_s=none,
            features=features,
        )
        return decide(self.scorer, candidates, seen["history"]).reshape(shape)


class PointerDecider:
    """Takes the candidate of the largest logit.

    Args:
        network: That is asked; on any device.
    """

    def __init__(self, network: PointerNetwork) -> None:
        self.network = network.eval()

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`."""
        seen, masks, shape = _batched(obs, action_masks)
        device = self.network.log_temperature.device
        with torch.no_grad():
            logits, _ = self.network(
                {name: torch.from_numpy(part).to(device) for name, part in seen.items()}
            )
        values = np.where(masks, logits.cpu().numpy(), -np.inf)
        return np.asarray(values.argmax(axis=1), dtype=np.int64).reshape(shape)
