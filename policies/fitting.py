"""Fit a scorer to labels by weighted least squares of differences in a decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from planner.errors import StrategyError
from policies.labels import Labels
from policies.scorer import Scorer, check_scorer

__all__ = ["FitConfig", "ScorerNetwork", "fit", "fit_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """How a scorer is fitted.

    Attributes:
        hidden: Units of each of the two hidden layers.
        steps: Of the optimizer.
        batch: Decisions a step.
        learning_rate: At the start; it falls to 0 as a cosine.
        weight_decay: Of AdamW.
        noise: Variance that is added to a label's own before it is divided by: no
            label counts more than one that varies by this.
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
    """A Scorer's network, to be fitted.

    Args:
        inputs: Features of a candidate, and those that all share.
        hidden: Units of each of the two hidden layers.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, hidden)
        self.second = nn.Linear(hidden, hidden)
        # Candidates of a decision are compared: what all share is of no account.
        self.last = nn.Linear(hidden, 1, bias=False)

    def forward(self, features: Tensor, history: Tensor) -> Tensor:
        """Scores of candidates.

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
        """The network of weights that exist."""
        network = ScorerNetwork(*scorer.first.shape)
        with torch.no_grad():
            network.first.weight.copy_(torch.from_numpy(scorer.first.T))
            network.first.bias.copy_(torch.from_numpy(scorer.first_bias))
            network.second.weight.copy_(torch.from_numpy(scorer.second.T))
            network.second.bias.copy_(torch.from_numpy(scorer.second_bias))
            network.last.weight.copy_(torch.from_numpy(scorer.last[None]))
        return network

    def scorer(self) -> Scorer:
        """The weights for compiled code; copies."""
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
    """Weighted mean square of what is wrong about differences within decisions.

    Args:
        scores: Shape [n, a].
        possible: 1 or 0. Shape [n, a].
        costs: Centred on the mean of the possible ones. Shape [n, a].
        weight: Of each decision. Shape [n].
    """
    count = possible.sum(dim=1, keepdim=True)
    centred = scores - (scores * possible).sum(dim=1, keepdim=True) / count
    wrong = ((centred - costs) ** 2 * possible).sum(dim=1) * weight
    return wrong.sum() / (possible.sum(dim=1) * weight).sum()


def _weights(labels: Labels, noise: float) -> Tensor:
    """Of each decision: one over its labels' mean variance."""
    possible = labels.possible
    variance = (labels.variances * possible).sum(axis=1) / possible.sum(axis=1)
    weight = 1.0 / (noise + variance)
    return torch.from_numpy((weight / weight.mean()).astype(np.float32))


def fit(
    labels: Labels, config: FitConfig, start: Scorer | None = None, seed: int = 0
) -> tuple[Scorer, float]:
    """Fit a scorer.

    Args:
        labels: To be fitted to.
        config: How.
        start: Weights to go on from; random ones if None.
        seed: Of the weights, and of the order of the labels.
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
