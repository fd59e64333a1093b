"""Graph layers that read along the edges and against them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv, global_mean_pool

__all__ = ["GraphReader"]


class GraphReader(nn.Module):
    """What is read of each node, its neighbourhood and the graph as a whole.

    Args:
        features: Numbers of a node.
        width: Of the layers.
        layers: How many there are.
    """

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.down = nn.ModuleList(SAGEConv(width, width) for _ in range(layers))
        self.up = nn.ModuleList(
            SAGEConv(width, width, root_weight=False) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.whole = nn.Linear(width, width)
        self.hidden = nn.Linear(width, width)

    def read(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        """Read graphs that lie side by side.

        Args:
            nodes: Shape [n, features].
            edges: Producers and consumers. Shape [2, e].
            owner: Graph of each node. Shape [n].
            graphs: How many there are.

        Returns:
            Shape [n, width], not negative.
        """
        hidden = torch.relu(self.first(nodes))
        against = edges.flip(0)
        for down, up, norm in zip(self.down, self.up, self.norms, strict=True):
            found = down(hidden, edges) + up(hidden, against)
            hidden = hidden + torch.relu(norm(found))
        means = global_mean_pool(hidden, owner, graphs)
        return torch.relu(self.hidden(hidden) + self.whole(means)[owner])

    def forward(
        self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int
    ) -> Tensor:
        """The same as :meth:`read`."""
        return self.read(nodes, edges, owner, graphs)
