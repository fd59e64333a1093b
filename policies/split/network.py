"""A graph network that puts the groups of a task in order, and says what to move.

It reads the graph along the edges and against them, once a task. Its heads' scores give
orders; heads start as the priors (depth first, longest paths) and learn what to change.
For a split that there is, a smaller part scores moves of groups. Weights depend on no
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from planner.errors import StrategyError
from policies.split.features import FEATURES, PRIORS, Observation
from policies.split.reader import GraphReader
from policies.split.standing import STANDING

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

    def each(self, values: Tensor) -> tuple[Tensor, ...]:
        """The part of each task. Shapes [groups of it, ...]."""
        return torch.split_with_sizes(values, list(self.sizes))


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


class SplitNetwork(GraphReader):
    """Scores of groups to come next, and of moves.

    Args:
        config: Sizes.
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        config = config or NetworkConfig()
        width = config.width
        super().__init__(len(FEATURES), width, config.layers)
        self.config = config
        self.last = nn.Linear(width, config.heads)
        heads = torch.arange(config.heads) % len(PRIORS)
        self.steep = nn.Parameter(
            config.steep * nn.functional.one_hot(heads, len(PRIORS)).float()
        )
        self.stands = nn.Linear(len(STANDING), width)
        self.stands_down = SAGEConv(len(STANDING), width, root_weight=False)
        self.stands_up = SAGEConv(len(STANDING), width, root_weight=False)
        self.mixed = nn.Linear(2 * width, width)
        self.moved = nn.Linear(width, 2)
        # At first heads are the priors, and all moves are as likely.
        for layer in (self.last, self.moved):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def encode(self, batch: Batch) -> Tensor:
        """Read tasks: what the other methods need of each group. Shape [n, width]."""
        sizes = len(batch.sizes)
        return self.read(batch.nodes, batch.edges, batch.owner, sizes)

    def orders(self, batch: Batch, encoded: Tensor) -> Tensor:
        """Log odds of each group to come next, by head.

        Args:
            batch: Tasks.
            encoded: By :meth:`encode`. Shape [n, width].

        Returns:
            Shape [n, heads].
        """
        scores: Tensor = self.last(encoded) + batch.priors @ self.steep.T
        return scores

    def moves(self, batch: Batch, encoded: Tensor, standing: Tensor) -> Tensor:
        """Log odds of each group to be moved forward and back.

        Args:
            batch: Tasks.
            encoded: By :meth:`encode`. Shape [n, width].
            standing: Of one split of each task. Shape [n, standing].

        Returns:
            Shape [n, 2].
        """
        near = self.stands_down(standing, batch.edges)
        near = near + self.stands_up(standing, batch.edges.flip(0))
        read = torch.relu(self.stands(standing) + near)
        read = torch.relu(self.mixed(torch.cat([encoded, read], dim=1)))
        scores: Tensor = self.moved(read)
        return scores
