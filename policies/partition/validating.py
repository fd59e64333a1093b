"""How good a network is on worlds that it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from policies.partition.decoding import draw_orders
from policies.partition.learning import LearningConfig, mesh_regret
from policies.partition.lessons import Lesson
from policies.partition.network import PartitionNetwork

__all__ = ["MESHES", "Judged", "judge", "orders_matter"]

#: How many of the network's first meshes the regret is of.
MESHES = (1, 4, 12, 32)
#: Which of them chooses among networks: about as many are priced within a second.
_CHOOSING = MESHES.index(12)
#: Regret where none of the meshes fits.
_WORST = 2.0
#: Orders that are drawn for a mesh.
_DRAWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What validation found; natural logarithms of ratios of step times.

    Attributes:
        regret: The best of the network's first 1, 4, 12 and 32 meshes over the best
            mesh; 2 where none fits. Means over the worlds.
        reward: The plain orders of a mesh over those drawn from the network, the mean
            of the draws; means over the worlds where orders matter.
        best: The same of the best draw.
    """

    regret: tuple[float, ...]
    reward: float
    best: float

    @property
    def value(self) -> float:
        """By which networks are chosen; more is better.

        Search draws many orders and goes on from the best. The mean of them says little
        of that: a few that do not fit outweigh the rest, and a network that draws more
        boldly finds better ones while its mean falls.
        """
        return self.best - self.regret[_CHOOSING]

    def as_data(self) -> dict[str, float]:
        """Figures by name, for logs and notes."""
        named = {
            f"regret_at_{count}": round(regret, 5)
            for count, regret in zip(MESHES, self.regret, strict=True)
        }
        return {
            **named,
            "orders_mean": round(self.reward, 5),
            "orders_best": round(self.best, 5),
        }


def orders_matter(lesson: Lesson) -> bool:
    """Whether one order of the device groups can be better than another."""
    groups = lesson.groups
    if len(groups) < 2:
        return False
    several = any(len(fleet.sequences) > 1 for fleet in lesson.choices.fleets)
    return several or len(np.unique(groups.sizes)) > 1


def judge(
    network: PartitionNetwork, lessons: Sequence[Lesson], config: LearningConfig
) -> Judged:
    """Validate a network; the lessons stay as they are.

    Args:
        network: To be judged.
        lessons: At least one, none of them trained on.
        config: How many orders are drawn, and what one that does not fit costs.
    """
    regret = np.stack([mesh_regret(network, one, MESHES) for one in lessons])
    regret[~np.isfinite(regret)] = _WORST
    orders = [
        _orders(network, lesson, config) for lesson in lessons if orders_matter(lesson)
    ]
    reward, best = np.mean(orders, axis=0) if orders else (0.0, 0.0)
    return Judged(
        regret=tuple(regret.mean(axis=0).tolist()),
        reward=float(reward),
        best=float(best),
    )


@torch.no_grad()
def _orders(
    network: PartitionNetwork, lesson: Lesson, config: LearningConfig
) -> tuple[float, float]:
    """Mean and best log reward of the orders that are drawn for the best meshes."""
    layouts = lesson.arranger.layouts
    number = min(config.meshes, len(layouts))
    layout = np.repeat(np.argsort(layouts.score, kind="stable")[:number], _DRAWS)
    drawn = draw_orders(
        network,
        lesson.seen,
        network.encode(lesson.seen),
        lesson.groups,
        lesson.choices,
        layouts.choice[layout],
        np.random.default_rng(0),
    )
    plain = layouts.score[layout]
    score = lesson.arranger.price(layout, drawn.sequence).score
    reward = np.log(plain / np.minimum(score, plain * np.exp(-config.worst)))
    rows = reward.reshape(number, _DRAWS)
    return float(rows.mean()), float(rows.max(axis=1).mean())
