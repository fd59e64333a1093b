"""One step of learning from one problem: which meshes, and which orders of groups.

Meshes are few enough to be priced all at once, so that the gradient of the expected
reward needs no sampling: the network is drawn towards the softmax of the rewards.
Orders are drawn, priced and reinforced against the mean of those drawn for the same
mesh. Search makes the best of them better still, and the network follows what search
found, as search begins with what the network draws.
Source: Williams 1992, "Simple statistical gradient-following algorithms for
connectionist reinforcement learning"; baseline of several draws a problem: Kool, van
Hoof and Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free"; search
as the teacher: Anthony, Tian and Barber 2017, "Thinking fast and slow with deep
learning and tree search".
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.partition.decoding import draw_orders, log_likelihood
from policies.partition.lessons import Lesson
from policies.partition.network import Encoded, PartitionNetwork

__all__ = ["Learned", "LearningConfig", "mesh_regret", "study"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """How one step learns.

    Attributes:
        softness: Log reward by which a mesh may be worse and still be wanted by 1/e.
        meshes: Meshes of one problem that orders are drawn for.
        draws: Orders drawn for each.
        entropy: Weight of the entropy of a step's choice.
        imitation: Weight of following the best orders that search has found.
        searching: How often a studied problem is searched further.
        rounds: Of such a search.
        worst: Log reward of an arrangement that does not fit; others are no worse.
        most_steps: Groups times orders beyond which fewer orders are drawn.
    """

    softness: float = 0.06
    meshes: int = 3
    draws: int = 10
    entropy: float = 0.01
    imitation: float = 0.3
    searching: float = 0.2
    rounds: int = 6
    worst: float = -2.0
    most_steps: int = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a step saw.

    Attributes:
        loss: To be made small.
        mesh_loss: Its part from meshes.
        reward: Mean log of the plain orders' price over the drawn ones'; None if no
            orders were drawn.
        best: Of the best draw of each mesh, likewise.
    """

    loss: Tensor
    mesh_loss: float
    reward: float | None
    best: float | None


def _mesh_loss(
    network: PartitionNetwork, lesson: Lesson, encoded: Encoded, softness: float
) -> Tensor:
    """Cross entropy from the softmax of rewards to the network's choice."""
    logits = network.mesh_logits(lesson.seen, encoded)[torch.from_numpy(lesson.priced)]
    ratio = np.log(lesson.score / lesson.score.min())
    wanted = torch.softmax(torch.from_numpy(-ratio / softness).float(), dim=0)
    return -(wanted * torch.log_softmax(logits, dim=0)).sum()


def mesh_regret(
    network: PartitionNetwork, lesson: Lesson, counts: tuple[int, ...]
) -> Array:
    """By how much the best of the network's first meshes is above the best. [counts].

    Natural logarithms; infinite where none of them fits.
    """
    with torch.no_grad():
        logits = network.mesh_logits(lesson.seen, network.encode(lesson.seen)).numpy()
    ranked = np.argsort(-logits[lesson.priced], kind="stable")
    best = np.minimum.accumulate(lesson.score[ranked])
    at = np.minimum(np.array(counts), len(best)) - 1
    return np.asarray(np.log(best[at] / lesson.score.min()))


def _orders_loss(
    network: PartitionNetwork,
    lesson: Lesson,
    encoded: Encoded,
    config: LearningConfig,
    rng: np.random.Generator,
) -> tuple[Tensor, float, float]:
    """REINFORCE on the orders of a few good meshes."""
    layouts, many = lesson.arranger.layouts, len(lesson.groups)
    draws = int(np.clip(config.most_steps / (config.meshes * many**2), 4, config.draws))
    ratio = np.log(layouts.score / layouts.score.min())
    weight = np.exp(-ratio / 0.15)
    number = min(config.meshes, len(layouts))
    picked = rng.choice(
        len(layouts), size=number, replace=False, p=weight / weight.sum()
    )
    layout = np.repeat(picked, draws)
    with torch.no_grad():
        frozen = Encoded(encoded.groups.detach(), encoded.world.detach())
    drawn = draw_orders(
        network,
        lesson.seen,
        frozen,
        lesson.groups,
        lesson.choices,
        layouts.choice[layout],
        rng,
        keep=True,
    )
    priced = lesson.arranger.price(layout, drawn.sequence)
    score = priced.score
    # What does not fit costs as much as the worst that is told apart.
    ceiling = layouts.score[layout] * np.exp(-config.worst)
    reward = np.log(layouts.score[layout] / np.minimum(score, ceiling))
    rows = reward.reshape(number, draws)
    spread = rows.std(axis=1, keepdims=True)
    advantage = (rows - rows.mean(axis=1, keepdims=True)) / (spread + 0.02)
    logs, entropy = log_likelihood(network, lesson.seen, encoded, drawn)
    # A long order has a long sum: by its steps, so that large clusters weigh no more.
    taken = (drawn.sequence >= 0) if drawn.taken is None else (drawn.taken.T >= 0)
    steps = torch.from_numpy(taken.sum(axis=1).astype(np.float32))
    gain = torch.from_numpy(advantage.reshape(-1).astype(np.float32))
    loss = -(gain * logs / steps.sqrt()).mean() - config.entropy * entropy
    if not lesson.elites or rng.random() < config.searching:
        rounds = config.rounds * (1 if lesson.elites else 2)
        lesson.search(rounds, rng, [priced])
    loss = loss + config.imitation * _imitation(network, lesson, encoded, rng)
    return loss, float(rows.mean()), float(rows.max(axis=1).mean())


def _imitation(
    network: PartitionNetwork,
    lesson: Lesson,
    encoded: Encoded,
    rng: np.random.Generator,
) -> Tensor:
    """How unlikely the network makes the best orders known, by step."""
    (elites,) = lesson.elites
    choice = lesson.arranger.layouts.choice[elites.layout]
    followed = draw_orders(
        network,
        lesson.seen,
        encoded,
        lesson.groups,
        lesson.choices,
        choice,
        rng,
        forced=elites.sequence,
    )
    logs, _ = log_likelihood(network, lesson.seen, encoded, followed)
    ratio = np.log(elites.score / elites.score.min())
    weight = torch.from_numpy(np.exp(-ratio / 0.1).astype(np.float32))
    steps = torch.from_numpy((followed.sequence >= 0).sum(axis=1).astype(np.float32))
    return -(weight * logs / steps).sum() / weight.sum()


def study(
    network: PartitionNetwork,
    lesson: Lesson,
    config: LearningConfig,
    rng: np.random.Generator,
    *,
    orders: bool,
) -> Learned:
    """The loss of one problem.

    Args:
        network: To be learned.
        lesson: The problem.
        config: How.
        rng: Of the draws.
        orders: Whether to learn orders, too; on a uniform cluster all are alike.
    """
    encoded = network.encode(lesson.seen)
    loss = mesh_loss = _mesh_loss(network, lesson, encoded, config.softness)
    reward = best = None
    if orders and len(lesson.groups) > 1:
        of_orders, reward, best = _orders_loss(network, lesson, encoded, config, rng)
        loss = loss + of_orders
    return Learned(
        loss=loss, mesh_loss=float(mesh_loss.detach()), reward=reward, best=best
    )
