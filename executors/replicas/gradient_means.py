"""Means of a stage's gradients over replicas that may lack some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["GradientMeans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMeans:
    """Means of a stage's gradients over its replicas.

    Attributes:
        group: Replicas of the stage.
        dtype: In which gradients are summed.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype

    @torch.no_grad()
    def of(
        self, grads: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Average gradients in one all-reduce; collective.

        Args:
            grads: Of this replica, by name; those that it does not have are zeros.
            weights: All that are trained, equal names on all replicas.

        Returns:
            Means, of the weights' dtypes, of those that any replica has.
        """
        sizes = [weight.numel() for weight in weights.values()]
        device = next(iter(weights.values())).device
        flat = torch.zeros(sum(sizes) + len(sizes), dtype=self.dtype, device=device)
        *views, has = torch.split(flat, [*sizes, len(sizes)])
        has.copy_(torch.tensor([float(name in grads) for name in weights]))
        for name, view in zip(weights, views, strict=True):
            if name in grads:
                view.copy_(grads[name].reshape(-1))
        # Divided first, so that no sum overflows where the mean would not.
        dist.all_reduce(flat.div_(self.group.size()), group=self.group)
        return {
            name: view.view_as(weight).to(weight.dtype)
            for (name, weight), view, any_has in zip(
                weights.items(), views, has, strict=True
            )
            # A dry run's tensors have no value to look at.
            if name in grads or any_has
        }
