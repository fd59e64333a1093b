"""Pointer networks that were learned, deciding as the baselines do."""

from __future__ import annotations

import numpy as np
import torch

from policies.baselines import Flags, Index, Observation
from policies.pointer import PointerNetwork
from policies.scored import batched

__all__ = ["PointerDecider"]


class PointerDecider:
    """Takes the candidate of the largest logit.

    Args:
        network: That is asked; on any device.
    """

    def __init__(self, network: PointerNetwork) -> None:
        self.network = network.eval()

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`."""
        seen, masks, shape = batched(obs, action_masks)
        device = self.network.log_temperature.device
        with torch.no_grad():
            logits, _ = self.network(
                {name: torch.from_numpy(part).to(device) for name, part in seen.items()}
            )
        values = np.where(masks, logits.cpu().numpy(), -np.inf)
        return np.asarray(values.argmax(axis=1), dtype=np.int64).reshape(shape)
