"""A graph network that scores the groups of a task, a few ways at once.

It reads the graph along the edges and against them. Each head's scores give an order;
heads start as the priors (depth first, longest paths) and learn what to change. Weights
depend on no size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv, global_mean_pool

from planner.errors import StrategyError
from policies.split.features import FEATURES, PRIORS, Observation

__all__ = ["Batch", "NetworkConfig", "SplitNetwork", "batch_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes.

    Attributes:
        width: Of the graph layers.
        layers: How many there are.
        heads: Ways to score.
        steep: How much the whole range of a prior counts at first, as log odds.
    """

    width: int = 48
    layers: int = 3
    heads: int = 4
    steep: float = 30.0

    def __post_init__(self) -> None:
        if min(self.width, self.layers, self.heads) < 1:
            raise StrategyError(
                f"width={self.width}, layers={self.layers}, heads={self.heads} of a "
                f"network are at least 1"
            )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Batch:
    """Tasks side by side.

    Attributes:
        nodes: Shape [n, features].
        priors: Shape [n, priors].
        edges: Shape [2, e].
        owner: Task of each group. Shape [n].
        sizes: Groups of each task.
    """

    nodes: Tensor
    priors: Tensor
    edges: Tensor
    owner: Tensor
    sizes: tuple[int, ...]


def batch_of(observations: Sequence[Observation]) -> Batch:
    """Put tasks side by side."""
    sizes = [len(one.nodes) for one in observations]
    first = np.cumsum([0, *sizes])
    edges = [one.edges + at for one, at in zip(observations, first, strict=False)]
    return Batch(
        nodes=torch.from_numpy(np.concatenate([one.nodes for one in observations])),
        priors=torch.from_numpy(np.concatenate([one.priors for one in observations])),
        edges=torch.from_numpy(np.concatenate(edges, axis=1)),
        owner=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
        sizes=tuple(sizes),
    )


class SplitNetwork(nn.Module):
    """Scores of groups, the highest first.

    Args:
        config: Sizes.
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        width = config.width
        self.first = nn.Linear(len(FEATURES), width)
        self.down = nn.ModuleList(SAGEConv(width, width) for _ in range(config.layers))
        self.up = nn.ModuleList(
            SAGEConv(width, width, root_weight=False) for _ in range(config.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.layers))
        self.whole = nn.Linear(width, width)
        self.hidden = nn.Linear(width, width)
        self.last = nn.Linear(width, config.heads)
        heads = torch.arange(config.heads) % len(PRIORS)
        self.steep = nn.Parameter(
            config.steep * nn.functional.one_hot(heads, len(PRIORS)).float()
        )
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, batch: Batch) -> Tensor:
        """Score.

        Args:
            batch: Tasks.

        Returns:
            Log odds to come next, by group and head. Shape [n, heads].
        """
        hidden = torch.relu(self.first(batch.nodes))
        against = batch.edges.flip(0)
        for down, up, norm in zip(self.down, self.up, self.norms, strict=True):
            read = down(hidden, batch.edges) + up(hidden, against)
            hidden = hidden + torch.relu(norm(read))
        means = global_mean_pool(hidden, batch.owner, len(batch.sizes))
        hidden = torch.relu(self.hidden(hidden) + self.whole(means)[batch.owner])
        scores: Tensor = self.last(hidden) + batch.priors @ self.steep.T
        return scores
