"""Pointer networks that were learned, deciding as the baselines do."""

from __future__ import annotations

import numpy as np

from policies.baselines import Flags, Index, Observation
from policies.compact import CompactPointer
from policies.pointer import PointerNetwork
from policies.scored import batched

__all__ = ["PointerDecider"]


class PointerDecider:
    """Takes the candidate of the largest logit.

    Args:
        network: Whose weights decide, as they are now; on any device.
    """

    def __init__(self, network: PointerNetwork) -> None:
        self._network = CompactPointer(network.eval())

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`."""
        seen, masks, shape = batched(obs, action_masks)
        values = np.where(masks, self._network.logits(seen), -np.inf)
        return np.asarray(values.argmax(axis=1), dtype=np.int64).reshape(shape)
