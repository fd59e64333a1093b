"""Labels of decisions by rollouts, and the fit of a scorer to them.

A label is the number of jobs that each candidate would block. Rollouts use a scorer
themselves, so that a new one, fitted to them, is a step of policy iteration; the first
ones use a simple rule. The fit is weighted least squares of the differences within a
decision.

Source: Bertsekas 2020, "Rollout, policy iteration, and distributed reinforcement
learning".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from planner.errors import StrategyError
from policies.scorer import Scorer, check_scorer

__all__ = [
    "FitConfig",
    "LabelConfig",
    "LabelWorld",
    "Labels",
    "MadeLabels",
    "ScorerNetwork",
    "fit",
    "fit_loss",
]

Array = NDArray[np.float64]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]


class Labels(NamedTuple):
    """Labelled decisions. n decisions of a candidates.

    Attributes:
        features: Features of the candidates. Shape [n, a, f].
        history: Features that the candidates of a decision share. Shape [n, s].
        possible: Shape [n, a].
        costs: Jobs blocked, less the mean of the possible candidates; 0 where one is
            not possible. Shape [n, a].
        variances: Variances of the costs over the streams. Shape [n, a].
    """

    features: Floats
    history: Floats
    possible: Flags
    costs: Floats
    variances: Floats

    @staticmethod
    def joined(parts: Sequence[Labels]) -> Labels:
        """Concatenate labels."""
        return Labels(*(np.concatenate(part) for part in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConfig:
    """Settings of labelling.

    Attributes:
        futures: Streams for a decision.
        arrivals: Most jobs in each stream.
        labelled: Share of the decisions that are labelled.
        explored: Share of the decisions that are taken at random, so that a scorer
            sees states that it would not reach.
        other_laws: In the replay, share of episodes with other deadlines, loads and
            processes than the benchmark's.
    """

    futures: int = 8
    arrivals: int = 48
    labelled: float = 0.1
    explored: float = 0.05
    other_laws: float = 0.3

    def __post_init__(self) -> None:
        for name in ("labelled", "explored", "other_laws"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise StrategyError(
                    f"{name}={getattr(self, name)}; a share is from 0 to 1"
                )
        if self.futures < 2 or self.arrivals < 1:
            raise StrategyError(
                f"futures={self.futures} are at least 2, arrivals={self.arrivals} at "
                f"least 1"
            )


class LabelWorld(Protocol):
    """Source of labels. It is sent to other processes, and so has no state."""

    def draw_labels(
        self,
        actor: Scorer | None,
        base: Scorer | None,
        config: LabelConfig,
        episodes: int,
        seed: int | Sequence[int],
    ) -> Labels:
        """Play episodes, and label a part of their decisions.

        Args:
            actor: Decides, so that labelled states are those that the fitted scorer
                will reach. None for a simple rule.
            base: Decides in rollouts. None for a simple rule.
            config: Settings of labelling.
            episodes: Number of episodes.
            seed: Seed of everything that is drawn.
        """
        ...


class MadeLabels:
    """Collects labels, decision by decision."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[np.generic], ...]] = []

    def add(
        self,
        features: Floats,
        shared: Floats,
        possible: Flags,
        costs: Array,
        variances: Array,
    ) -> None:
        """Add a copy of the labels of one decision.

        Args:
            features: Features of its candidates. Shape [a, f].
            shared: Features that its candidates share. Shape [s].
            possible: Shape [a].
            costs: Any value where a candidate is not possible. Shape [a].
            variances: The same. Shape [a].
        """
        finite = np.where(possible, costs, 0.0)
        centred = np.where(possible, finite - finite.sum() / possible.sum(), 0.0)
        self._parts.append(
            (
                features.copy(),
                shared.copy(),
                possible.copy(),
                centred.astype(np.float32),
                np.where(possible, variances, 0.0).astype(np.float32),
            )
        )

    def labels(self) -> Labels:
        """Return all labels.

        Raises:
            StrategyError: If there are none.
        """
        if not self._parts:
            raise StrategyError(
                "no decision was labelled; play more episodes, or label a larger share"
            )
        return Labels(*(np.stack(part) for part in zip(*self._parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """Settings of a fit.

    Attributes:
        hidden: Units of each of the two hidden layers.
        steps: Steps of the optimizer.
        batch: Decisions in a step.
        learning_rate: Learning rate at the start; it falls to 0 as a cosine.
        weight_decay: Weight decay of AdamW.
        noise: Variance added to that of a label before dividing by it, which limits
            the weight of a label.
    """

    hidden: int = 32
    steps: int = 2000
    batch: int = 1024
    learning_rate: float = 2e-3
    weight_decay: float = 1e-4
    noise: float = 0.05

    def __post_init__(self) -> None:
        for name in ("hidden", "steps", "batch", "learning_rate", "noise"):
            if not 0 < getattr(self, name) < math.inf:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of a fit; give a positive number"
                )


class ScorerNetwork(nn.Module):
    """The network of a Scorer, to be fitted.

    Args:
        inputs: Number of features of a candidate, the shared ones included.
        hidden: Units of each of the two hidden layers.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        # Candidates of a decision are compared: a bias would cancel.
        self.last = nn.Linear(hidden, 1, bias=False)

    def forward(self, features: Tensor, history: Tensor) -> Tensor:
        """Score candidates.

        Args:
            features: Shape [n, a, f].
            history: Shape [n, s].
        Returns:
            Shape [n, a].
        """
        shared = history[:, None, :].expand(*features.shape[:2], -1)
        hidden = self.first(torch.cat([features, shared], dim=-1)).relu()
        scores: Tensor = self.last(self.second(hidden).relu()).squeeze(-1)
        return scores

    @staticmethod
    def of(scorer: Scorer) -> ScorerNetwork:
        """Make a network of given weights."""
        network = ScorerNetwork(*scorer.first.shape)
        with torch.no_grad():
            network.first.weight.copy_(torch.from_numpy(scorer.first.T))
            network.first.bias.copy_(torch.from_numpy(scorer.first_bias))
            network.second.weight.copy_(torch.from_numpy(scorer.second.T))
            network.second.bias.copy_(torch.from_numpy(scorer.second_bias))
            network.last.weight.copy_(torch.from_numpy(scorer.last[None]))
        return network

    def scorer(self) -> Scorer:
        """Copy the weights for compiled code."""
        with torch.no_grad():
            parts = (
                self.first.weight.T,
                self.first.bias,
                self.second.weight.T,
                self.second.bias,
                self.last.weight[0],
            )
            found = Scorer(*(part.numpy().copy() for part in parts))
            return check_scorer(found, self.first.in_features)


def fit_loss(scores: Tensor, possible: Tensor, costs: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean square error of the differences within decisions.

    Args:
        scores: Shape [n, a].
        possible: 1 or 0. Shape [n, a].
        costs: Relative to the mean of the possible ones. Shape [n, a].
        weight: Weight of each decision. Shape [n].
    """
    count = possible.sum(dim=1, keepdim=True)
    centred = scores - (scores * possible).sum(dim=1, keepdim=True) / count
    wrong = ((centred - costs) ** 2 * possible).sum(dim=1) * weight
    return wrong.sum() / (possible.sum(dim=1) * weight).sum()


def _weights(labels: Labels, noise: float) -> Tensor:
    """Weight of each decision: one over the mean variance of its labels."""
    possible = labels.possible
    variance = (labels.variances * possible).sum(axis=1) / possible.sum(axis=1)
    weight = 1.0 / (noise + variance)
    return torch.from_numpy((weight / weight.mean()).astype(np.float32))


def fit(
    labels: Labels, config: FitConfig, start: Scorer | None = None, seed: int = 0
) -> tuple[Scorer, float]:
    """Fit a scorer.

    Args:
        labels: Labels to fit to.
        config: Settings.
        start: Initial weights; random ones if None.
        seed: Seed of the weights, and of the order of the labels.
    Returns:
        The scorer, and the mean loss over the last tenth of the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inputs = labels.features.shape[2] + labels.history.shape[1]
        network = ScorerNetwork(inputs, config.hidden)
    if start is not None:
        network = ScorerNetwork.of(start)
    features, history = (
        torch.from_numpy(labels.features),
        torch.from_numpy(labels.history),
    )
    possible = torch.from_numpy(labels.possible).float()
    costs, weight = torch.from_numpy(labels.costs), _weights(labels, config.noise)
    optimizer = torch.optim.AdamW(
        network.parameters(),
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    losses = []
    for _ in range(config.steps):
        rows = torch.randint(len(costs), (config.batch,), generator=generator)
        scores = network(features[rows], history[rows])
        loss = fit_loss(scores, possible[rows], costs[rows], weight[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, len(losses) // 10) :]
    return network.scorer(), sum(last) / len(last)
