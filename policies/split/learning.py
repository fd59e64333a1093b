"""What a step of training wants: orders that do better, moves that were hits.

Scores of orders learn by REINFORCE from orders that they draw; scores of moves learn by
the likelihood of moves that made a split better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planner.split import Groups, best_along, best_linear
from planner.split.task import Array
from policies.split.features import Observation, observe
from policies.split.hits import Hits, find_hits
from policies.split.network import SplitNetwork, batch_of
from policies.split.orders import sample_orders
from policies.split.worlds import WorldConfig, draw_groups

__all__ = ["WORST", "Lesson", "credit", "draw_lessons", "hits_loss", "order_slopes"]

#: Times the load along standard orders: what is worse counts as this.
WORST = 1.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """A task to learn from.

    Attributes:
        groups: What it is.
        seen: What is seen of it.
        load_ms: Along standard orders.
        hits: Splits of it, and what makes them better.
    """

    groups: Groups
    seen: Observation
    load_ms: float
    hits: tuple[Hits, ...] = ()


def draw_lessons(
    count: int,
    part: str,
    world: WorldConfig,
    *,
    seed: int = 0,
    splits: int = 0,
    tries: int = 96,
) -> list[Lesson]:
    """Lessons of tasks drawn by chance; those that no standard order splits are none.

    Args:
        count: Of tasks.
        part: One of :data:`policies.split.worlds.PARTS`.
        world: What tasks are drawn from.
        seed: Of the hits.
        splits: Most splits of a task that hits are looked for from.
        tries: Orders looked at for each.
    """
    found = []
    for number, groups in enumerate(draw_groups(0, count, part, world)):
        split = best_linear(groups)
        if split is None:
            continue
        rng = np.random.default_rng([seed, number])
        hits = tuple(find_hits(groups, splits=splits, tries=tries, rng=rng))
        found.append(
            Lesson(
                groups=groups, seen=observe(groups), load_ms=split.load_ms, hits=hits
            )
        )
    return found


def credit(rewards: Array, best_share: float) -> Array:
    """How much more likely each order of a task should become.

    One part is the reward over the mean of the same head's other orders; the other is
    what the best reward of all would lose without the order, which makes the heads
    differ. Both have the expectation of a gradient: of the mean, and of the best.

    Args:
        rewards: Shape [heads, samples], 2 samples at least.
        best_share: Weight of the second part, 0 to 1.

    Returns:
        Shape [heads, samples], about 1 in size where rewards differ.
    """
    samples = rewards.shape[1]
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (samples - 1)
    flat = np.sort(rewards, axis=None)
    alone = np.where(rewards == flat[-1], flat[-1] - flat[-2], 0.0)
    mixed = (1 - best_share) * (rewards - others) + best_share * rewards.size * alone
    found: Array = mixed / (float(rewards.std()) + 1e-2)
    return found


def order_slopes(
    lesson: Lesson,
    scores: Array,
    *,
    samples: int,
    best_share: float,
    rng: np.random.Generator,
) -> tuple[Array, float]:
    """Draw orders, cut them, and say where the scores should go.

    Args:
        lesson: The task.
        scores: Of orders. Shape [heads, m].
        samples: Orders by each head.
        best_share: See :func:`credit`.
        rng: What is left to chance.

    Returns:
        Slope of the objective by the scores, shape [heads, m], and the mean reward:
        log of the load along standard orders over an order's.
    """
    heads = len(scores)
    orders, slopes = sample_orders(
        lesson.groups, np.repeat(scores, samples, axis=0), rng
    )
    bound = WORST * lesson.load_ms
    rewards = np.full(len(orders), -np.log(WORST))
    for row, order in enumerate(orders):
        split = best_along(lesson.groups, order, bound, check=False)
        if split is not None:
            rewards[row] = np.log(lesson.load_ms / split.load_ms)
    weights = credit(rewards.reshape(heads, samples), best_share).reshape(-1, 1)
    slope = (weights * slopes).reshape(heads, samples, -1).mean(axis=1)
    return slope, float(rewards.mean())


def hits_loss(
    network: SplitNetwork, examples: Sequence[tuple[Observation, Hits]]
) -> Tensor:
    """How much less likely hits are made than they could be: mean cross-entropy.

    Args:
        network: That scores moves.
        examples: Tasks, and hits from one split of each.

    Returns:
        A number; the log of the number of moves, on the mean, if all are as likely.
    """
    batch = batch_of([seen for seen, _ in examples])
    standing = torch.from_numpy(np.concatenate([hits.standing for _, hits in examples]))
    odds = network.moves(batch, network.encode(batch), standing)
    losses = [
        -(torch.from_numpy(hits.share).flatten() * part.flatten().log_softmax(0)).sum()
        for part, (_, hits) in zip(batch.each(odds), examples, strict=True)
    ]
    return torch.stack(losses).mean()
