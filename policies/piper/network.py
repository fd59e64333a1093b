"""A graph network that says where a pipeline is worth cutting, and how fast it gets.

It reads the layers along the edges and against them. A suffix is scored by the layers
on both sides of its cut. Weights depend on no size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import global_mean_pool

from planner.errors import StrategyError
from policies.piper.features import CUTS, LAYERS, WHOLE, Observation
from policies.split.reader import GraphReader

__all__ = ["Batch", "NetworkConfig", "PiperNetwork", "batch_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Sizes.

    Attributes:
        width: Of the graph layers.
        layers: How many there are.
    """

    width: int = 64
    layers: int = 3

    def __post_init__(self) -> None:
        if min(self.width, self.layers) < 1:
            raise StrategyError(
                f"width={self.width}, layers={self.layers} of a network are at least 1"
            )


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Batch:
    """Tasks side by side.

    Attributes:
        nodes: Shape [n, layers].
        edges: Shape [2, e].
        owner: Task of each layer. Shape [n].
        whole: Shape [tasks, whole].
        cuts: Of each task. Shapes [s, cuts].
        crossing: Of each task. Shapes [s, e].
        edge_counts: Edges of each task.
    """

    nodes: Tensor
    edges: Tensor
    owner: Tensor
    whole: Tensor
    cuts: tuple[Tensor, ...]
    crossing: tuple[Tensor, ...]
    edge_counts: tuple[int, ...]


def batch_of(observations: Sequence[Observation]) -> Batch:
    """Put tasks side by side."""
    sizes = [len(one.nodes) for one in observations]
    first = np.cumsum([0, *sizes])
    edges = [one.edges + at for one, at in zip(observations, first, strict=False)]
    return Batch(
        nodes=torch.from_numpy(np.concatenate([one.nodes for one in observations])),
        edges=torch.from_numpy(np.concatenate(edges, axis=1)),
        owner=torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)),
        whole=torch.from_numpy(np.stack([one.whole for one in observations])),
        cuts=tuple(torch.from_numpy(one.cuts) for one in observations),
        crossing=tuple(torch.from_numpy(one.crossing) for one in observations),
        edge_counts=tuple(one.edges.shape[1] for one in observations),
    )


class PiperNetwork(nn.Module):
    """Scores of cuts, and what time per sample to ask for.

    Args:
        config: Sizes.
    """

    def __init__(self, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetworkConfig()
        width = config.width
        self.reader = GraphReader(len(LAYERS), width, config.layers)
        self.cut = nn.Sequential(
            nn.Linear(3 * width + len(CUTS), width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.time = nn.Sequential(
            nn.Linear(width + len(WHOLE), width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, batch: Batch) -> tuple[tuple[Tensor, ...], Tensor]:
        """Score the cuts of tasks.

        Args:
            batch: Tasks.

        Returns:
            Log odds of each suffix to be of use, shapes [s] by task, and the log of
            the best time per sample over what the work alone would take, [tasks].
        """
        encoded = self.reader(batch.nodes, batch.edges, batch.owner, len(batch.whole))
        means = global_mean_pool(encoded, batch.owner, len(batch.whole))
        sides = encoded[batch.edges.T].flatten(1)
        parts = torch.split_with_sizes(sides, list(batch.edge_counts))
        scores = []
        for k, (cuts, crossing) in enumerate(
            zip(batch.cuts, batch.crossing, strict=True)
        ):
            around = means[k].expand(len(cuts), -1)
            read = torch.cat([crossing @ parts[k], around, cuts], dim=1)
            scores.append(self.cut(read)[:, 0])
        times: Tensor = self.time(torch.cat([means, batch.whole], dim=1))[:, 0]
        return tuple(scores), times
