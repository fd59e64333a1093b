"""Learn meshes and orders of device groups from examples, and validate a network.

Meshes are few enough to be priced all at once, so that the gradient of the expected
reward needs no sampling: the network is drawn towards the softmax of the rewards.
Orders are drawn, priced and reinforced against the mean of those drawn for the same
mesh. Search makes the best of them better still, and the network follows what search
found, as search begins with what the network draws.

Source: Williams 1992, "Simple statistical gradient-following algorithms for
connectionist reinforcement learning"; baseline of several draws a problem: Kool, van
Hoof and Welling 2019, "Buy 4 REINFORCE samples, get a baseline for free"; imitation
of search: Anthony, Tian and Barber 2017, "Thinking fast and slow with deep
learning and tree search".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.partition.decoding import draw_orders, log_likelihood
from policies.partition.examples import Example
from policies.partition.network import Encoded, PartitionNetwork
from policies.partition.settings import LearningConfig

__all__ = [
    "MESHES",
    "Judged",
    "Learned",
    "judge",
    "mesh_regret",
    "orders_matter",
    "study",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Losses and rewards of one example.

    Attributes:
        loss: To be minimised.
        mesh_loss: Part of the loss from meshes.
        reward: Mean log of the plain orders' price over the drawn ones'; None if no
            orders were drawn.
        best: The same for the best draw of each mesh.
    """

    loss: Tensor
    mesh_loss: float
    reward: float | None
    best: float | None


def _mesh_loss(
    network: PartitionNetwork, example: Example, encoded: Encoded, softness: float
) -> Tensor:
    """Cross entropy from the softmax of rewards to the network's choice."""
    logits = network.mesh_logits(example.seen, encoded)[
        torch.from_numpy(example.priced)
    ]
    ratio = np.log(example.score / example.score.min())
    wanted = torch.softmax(torch.from_numpy(-ratio / softness).float(), dim=0)
    return -(wanted * torch.log_softmax(logits, dim=0)).sum()


def mesh_regret(
    network: PartitionNetwork, example: Example, counts: tuple[int, ...]
) -> Array:
    """Log ratio of the best of the network's first meshes to the best of all.

    Infinite where none of the first fits. Shape [counts].
    """
    with torch.no_grad():
        logits = network.mesh_logits(example.seen, network.encode(example.seen)).numpy()
    ranked = np.argsort(-logits[example.priced], kind="stable")
    best = np.minimum.accumulate(example.score[ranked])
    at = np.minimum(np.array(counts), len(best)) - 1
    return np.asarray(np.log(best[at] / example.score.min()))


def _orders_loss(
    network: PartitionNetwork,
    example: Example,
    encoded: Encoded,
    config: LearningConfig,
    rng: np.random.Generator,
) -> tuple[Tensor, float, float]:
    """REINFORCE on the orders of a few good meshes."""
    layouts, many = example.pricer.layouts, len(example.groups)
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
        example.seen,
        frozen,
        example.groups,
        example.choices,
        layouts.choice[layout],
        rng,
        keep=True,
    )
    priced = example.pricer.price(layout, drawn.sequence)
    score = priced.score
    # An order that does not fit costs as much as the worst that are distinguished.
    ceiling = layouts.score[layout] * np.exp(-config.worst)
    reward = np.log(layouts.score[layout] / np.minimum(score, ceiling))
    rows = reward.reshape(number, draws)
    spread = rows.std(axis=1, keepdims=True)
    advantage = (rows - rows.mean(axis=1, keepdims=True)) / (spread + 0.02)
    logs, entropy = log_likelihood(network, example.seen, encoded, drawn)
    # Divided by the steps of the order, so that large clusters do not weigh more.
    taken = (drawn.sequence >= 0) if drawn.taken is None else (drawn.taken.T >= 0)
    steps = torch.from_numpy(taken.sum(axis=1).astype(np.float32))
    gain = torch.from_numpy(advantage.reshape(-1).astype(np.float32))
    loss = -(gain * logs / steps.sqrt()).mean() - config.entropy * entropy
    if not example.elites or rng.random() < config.searching:
        rounds = config.rounds * (1 if example.elites else 2)
        example.search(rounds, rng, [priced])
    loss = loss + config.imitation * _imitation(network, example, encoded, rng)
    return loss, float(rows.mean()), float(rows.max(axis=1).mean())


def _imitation(
    network: PartitionNetwork,
    example: Example,
    encoded: Encoded,
    rng: np.random.Generator,
) -> Tensor:
    """Negative log likelihood of the best known orders, per step."""
    (elites,) = example.elites
    choice = example.pricer.layouts.choice[elites.layout]
    followed = draw_orders(
        network,
        example.seen,
        encoded,
        example.groups,
        example.choices,
        choice,
        rng,
        forced=elites.sequence,
    )
    logs, _ = log_likelihood(network, example.seen, encoded, followed)
    ratio = np.log(elites.score / elites.score.min())
    weight = torch.from_numpy(np.exp(-ratio / 0.1).astype(np.float32))
    steps = torch.from_numpy((followed.sequence >= 0).sum(axis=1).astype(np.float32))
    return -(weight * logs / steps).sum() / weight.sum()


def study(
    network: PartitionNetwork,
    example: Example,
    config: LearningConfig,
    rng: np.random.Generator,
    *,
    orders: bool,
) -> Learned:
    """Compute the loss of one example.

    Args:
        network: In training.
        example: The problem.
        config: Settings of the step.
        rng: Draws orders.
        orders: Whether to learn orders, too; on a uniform cluster all are equal.
    """
    encoded = network.encode(example.seen)
    loss = mesh_loss = _mesh_loss(network, example, encoded, config.softness)
    reward = best = None
    if orders and len(example.groups) > 1:
        of_orders, reward, best = _orders_loss(network, example, encoded, config, rng)
        loss = loss + of_orders
    return Learned(
        loss=loss, mesh_loss=float(mesh_loss.detach()), reward=reward, best=best
    )


#: Numbers of the network's first meshes that the regret is computed for.
MESHES = (1, 4, 12, 32)
#: The one by which networks are compared: as many are priced within about a second.
_CHOOSING = MESHES.index(12)
#: Regret where none of the meshes fits.
_WORST = 2.0
#: Orders drawn for a mesh.
_DRAWS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Result of a validation, as natural logarithms of ratios of step times.

    Attributes:
        regret: The best of the network's first 1, 4, 12 and 32 meshes over the best
            mesh; 2 where none fits. Means over the worlds.
        reward: Plain order of a mesh over the orders drawn from the network, the mean
            of the draws; means over the worlds where orders matter.
        best: The same for the best draw.
    """

    regret: tuple[float, ...]
    reward: float
    best: float

    @property
    def value(self) -> float:
        """Figure by which networks are compared; more is better.

        Search draws many orders and goes on from the best. Their mean says little about
        that: a few that do not fit outweigh the rest, and bolder draws find better
        orders while the mean falls.
        """
        return self.best - self.regret[_CHOOSING]

    def as_data(self) -> dict[str, float]:
        """Return the figures by name, for logs and notes."""
        named = {
            f"regret_at_{count}": round(regret, 5)
            for count, regret in zip(MESHES, self.regret, strict=True)
        }
        return {
            **named,
            "orders_mean": round(self.reward, 5),
            "orders_best": round(self.best, 5),
        }


def orders_matter(example: Example) -> bool:
    """Return True if one order of the device groups can be better than another."""
    groups = example.groups
    if len(groups) < 2:
        return False
    several = any(len(subset.sequences) > 1 for subset in example.choices.subsets)
    return several or len(np.unique(groups.sizes)) > 1


def judge(
    network: PartitionNetwork, examples: Sequence[Example], config: LearningConfig
) -> Judged:
    """Validate a network; the examples do not change.

    Args:
        network: To be validated.
        examples: At least one, none of them trained on.
        config: Number of orders drawn, and the price of one that does not fit.
    """
    regret = np.stack([mesh_regret(network, one, MESHES) for one in examples])
    regret[~np.isfinite(regret)] = _WORST
    orders = [
        _orders(network, example, config)
        for example in examples
        if orders_matter(example)
    ]
    reward, best = np.mean(orders, axis=0) if orders else (0.0, 0.0)
    return Judged(
        regret=tuple(regret.mean(axis=0).tolist()),
        reward=float(reward),
        best=float(best),
    )


@torch.no_grad()
def _orders(
    network: PartitionNetwork, example: Example, config: LearningConfig
) -> tuple[float, float]:
    """Mean and best log reward of the orders that are drawn for the best meshes."""
    layouts = example.pricer.layouts
    number = min(config.meshes, len(layouts))
    layout = np.repeat(np.argsort(layouts.score, kind="stable")[:number], _DRAWS)
    drawn = draw_orders(
        network,
        example.seen,
        network.encode(example.seen),
        example.groups,
        example.choices,
        layouts.choice[layout],
        np.random.default_rng(0),
    )
    plain = layouts.score[layout]
    score = example.pricer.price(layout, drawn.sequence).score
    reward = np.log(plain / np.minimum(score, plain * np.exp(-config.worst)))
    rows = reward.reshape(number, _DRAWS)
    return float(rows.mean()), float(rows.max(axis=1).mean())
