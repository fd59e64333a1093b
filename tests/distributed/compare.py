"""Distance of training by a plan from plain training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from planner.schema import Plan
from tests.distributed.cases import make_plan, reference, train
from tests.distributed.pool import Pool

__all__ = ["STEPS", "Distance", "distance", "distance_of"]

#: Optimizer steps that every comparison makes: an error that one step hides, a later
#: one is computed with.
STEPS = 5


class Distance:
    """Largest relative differences over all steps; of tensors, to their maximum.

    Losses and gradients are those of every step, weights those after the last. The
    first step's gradients are of equal weights: they differ by its arithmetic alone.
    """

    def __init__(
        self, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
    ) -> None:
        self.loss = self.gradients = self.weights = self.norm = 0.0
        self.first_gradients = _far(ours[0]["grads"], theirs[0]["grads"])
        for mine, plain in zip(ours, theirs, strict=True):
            # Not a number is no larger than any difference.
            assert math.isfinite(mine["loss"])
            assert math.isfinite(plain["loss"])
            self.loss = max(self.loss, abs(mine["loss"] / plain["loss"] - 1))
            if plain["norm"] is not None:
                self.norm = max(self.norm, abs(mine["norm"] / plain["norm"] - 1))
            self.gradients = max(self.gradients, _far(mine["grads"], plain["grads"]))
        self.weights = _far(ours[-1]["weights"], theirs[-1]["weights"])

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.weights, self.norm)


def _far(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    if not ours:
        # Gradients that are handed on at once are gone behind a step.
        return math.inf
    assert sorted(ours) == sorted(theirs), set(ours) ^ set(theirs)
    # Where the true gradient is zero (a key's bias under softmax) all is rounding.
    floor = 1e-3 * max(float(value.abs().max()) for value in theirs.values())
    worst = 0.0
    for name, expected in theirs.items():
        expected = expected.numpy()
        assert ours[name].shape == expected.shape
        gap = np.abs(ours[name] - expected).max()
        assert np.isfinite(gap), name
        worst = max(worst, float(gap / max(np.abs(expected).max(), floor)))
    return worst


def distance(
    pool: Pool, model: str, *, steps: int = STEPS, tied: bool = False, **changes: Any
) -> Distance:
    """Train both ways and compare."""
    plan = make_plan(model, tied=tied, **changes)
    return distance_of(pool, plan, steps=steps, tied=tied)


def distance_of(
    pool: Pool, plan: Plan, *, steps: int = STEPS, tied: bool = False
) -> Distance:
    """The same for a plan that is there."""
    world = plan.strategy.mesh.num_devices
    ours = pool.run(train, world, plan.to_json(), steps, tied)[0]
    threads = torch.get_num_threads()
    # As the ranks have: convolutions add up in another order on more threads, which
    # batch norms over few values make much of.
    torch.set_num_threads(1)
    try:
        return Distance(ours, reference(plan, steps, tied=tied))
    finally:
        torch.set_num_threads(threads)
