"""Graph layers on plain torch: convolutions that take means, and pooling.

Source: Hamilton, Ying and Leskovec 2017, "Inductive representation learning on large
graphs", algorithm 1 with the mean as the aggregator.
"""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["SAGEConv", "max_pool", "mean_pool"]


class SAGEConv(nn.Module):
    """GraphSAGE convolution: own features and the mean over the neighbours.

    y_i = W_l mean_{j -> i} x_j + b + W_r x_i

    Weights have the names that torch-geometric's layer of this name gives them.

    Args:
        features: Features of a node.
        width: Features of the result.
    """

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.lin_l = nn.Linear(features, width)
        self.lin_r = nn.Linear(features, width, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        """Convolve.

        Args:
            nodes: Shape [..., n, features].
            edges: Source and target of each edge. Shape [2, edges].
        Returns:
            Shape [..., n, width]; the mean of no neighbours is 0.
        """
        source, target = edges
        means = mean_pool(nodes.index_select(-2, source), target, nodes.shape[-2])
        made: Tensor = self.lin_l(means) + self.lin_r(nodes)
        return made


def mean_pool(nodes: Tensor, owner: Tensor, count: int) -> Tensor:
    """Mean of the nodes of each owner; 0 for an owner of none.

    Args:
        nodes: Shape [..., n, features].
        owner: Shape [n].
        count: Number of owners.
    Returns:
        Shape [..., count, features].
    """
    size = (*nodes.shape[:-2], count, nodes.shape[-1])
    sums = nodes.new_zeros(size).scatter_add_(-2, _spread(owner, nodes), nodes)
    of_owner = nodes.new_zeros(count).scatter_add_(0, owner, nodes.new_ones(len(owner)))
    return sums / of_owner.clamp(min=1)[:, None]


def max_pool(nodes: Tensor, owner: Tensor, count: int) -> Tensor:
    """Largest of the nodes of each owner, feature by feature; shapes as in the mean."""
    size = (*nodes.shape[:-2], count, nodes.shape[-1])
    return nodes.new_zeros(size).scatter_reduce_(
        -2, _spread(owner, nodes), nodes, reduce="amax", include_self=False
    )


def _spread(owner: Tensor, nodes: Tensor) -> Tensor:
    """Owner of each single feature, as scattering takes it."""
    return owner[:, None].expand_as(nodes)
