"""Graph networks over a job's ops and over the cluster's devices.

Weights depend on neither the size of a job nor that of a cluster. Layers are those of
GraphSAGE with means. Source: Hamilton, Ying and Leskovec 2017, "Inductive
representation learning on large graphs".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv, global_max_pool, global_mean_pool

from envs.ramp.graphs import NUM_OP_FEATURES, OpGraph
from planner.errors import StrategyError

__all__ = ["DeviceEncoder", "JobEncoder"]


class JobEncoder(nn.Module):
    """Encodes jobs by the numbers of their graphs.

    Observations carry numbers, not graphs: each distinct job is encoded once a batch,
    however many of the batch's decisions are about it.

    Args:
        graphs: Op graph of every job, in the order of their numbers.
        width: Of the layers and of what comes out.
        layers: Of the network.

    Raises:
        StrategyError: If there are no graphs.
    """

    nodes: Tensor
    edge_index: Tensor
    owner: Tensor

    def __init__(
        self, graphs: Sequence[OpGraph], width: int = 32, layers: int = 2
    ) -> None:
        super().__init__()
        if not graphs:
            raise StrategyError("there are no op graphs; give one of each job")
        sizes = [NUM_OP_FEATURES] + [width] * layers
        self.convolutions = nn.ModuleList(
            SAGEConv(size, width) for size in sizes[:layers]
        )
        self.pooled = nn.Linear(2 * width, width)
        self.set_graphs(graphs)

    def set_graphs(self, graphs: Sequence[OpGraph]) -> None:
        """Encode other jobs from now on, with the same weights."""
        first = np.cumsum([0] + [len(graph.nodes) for graph in graphs])
        edges = [
            graph.edge_index + start
            for graph, start in zip(graphs, first[:-1], strict=True)
        ]
        owner = np.repeat(np.arange(len(graphs)), np.diff(first))
        device = self.pooled.weight.device
        for name, part in (
            ("nodes", np.concatenate([graph.nodes for graph in graphs])),
            ("edge_index", np.concatenate(edges, axis=1)),
            ("owner", owner),
        ):
            # Not among the weights: they are the world's.
            held = torch.from_numpy(np.ascontiguousarray(part)).to(device)
            self.register_buffer(name, held, persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """Encode jobs.

        Args:
            numbers: Of their graphs. Shape [b].
        Returns:
            Shape [b, width].
        """
        wanted, where = torch.unique(numbers.long(), return_inverse=True)
        hidden, edges, owner = self.nodes, self.edge_index, self.owner
        for layer in self.convolutions:
            hidden = layer(hidden, edges).relu()
        means, most = global_mean_pool(hidden, owner), global_max_pool(hidden, owner)
        encoded: Tensor = self.pooled(torch.cat([means, most], dim=1)[wanted])
        return encoded.relu()[where]


class DeviceEncoder(nn.Module):
    """Encodes the devices of a cluster, in many states at once.

    Args:
        edge_index: Neighbours among the devices. Shape [2, edges].
        features: Of a device.
        width: Of the layers and of what comes out.
        layers: Of the network.
    """

    edge_index: Tensor

    def __init__(
        self,
        edge_index: NDArray[np.int64],
        features: int,
        width: int = 32,
        layers: int = 2,
    ) -> None:
        super().__init__()
        sizes = [features] + [width] * layers
        self.convolutions = nn.ModuleList(
            SAGEConv(size, width) for size in sizes[:layers]
        )
        self.set_edges(edge_index)

    def set_edges(self, edge_index: NDArray[np.int64]) -> None:
        """Encode another cluster from now on, with the same weights."""
        held = torch.from_numpy(np.ascontiguousarray(edge_index, dtype=np.int64))
        device = next(self.convolutions.parameters()).device
        self.register_buffer("edge_index", held.to(device), persistent=False)

    def forward(self, devices: Tensor) -> Tensor:
        """Encode states.

        Args:
            devices: Features. Shape [b, n, features].
        Returns:
            Shape [b, n, width].
        """
        # One graph for all states: layers take nodes on the axis before the last.
        hidden = devices
        for layer in self.convolutions:
            hidden = layer(hidden, self.edge_index).relu()
        return hidden
