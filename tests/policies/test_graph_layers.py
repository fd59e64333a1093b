"""Graph layers against numbers by hand."""

from __future__ import annotations

import torch

from policies.graph_layers import SAGEConv, max_pool, mean_pool

#: 0 and 1 point at 2, 1 twice; 2 points at 0; nothing points at 1 and 3.
EDGES = torch.tensor([[0, 1, 1, 2], [2, 2, 2, 0]])
NODES = torch.tensor([[1.0, -3.0], [4.0, 0.0], [0.0, 5.0], [7.0, 7.0]])


def test_convolution_adds_own_features_to_the_mean_over_neighbours() -> None:
    layer = SAGEConv(2, 2)
    with torch.no_grad():
        layer.lin_l.weight.copy_(torch.eye(2))
        layer.lin_l.bias.copy_(torch.tensor([10.0, 20.0]))
        layer.lin_r.weight.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        made = layer(NODES, EDGES)
        both = layer(torch.stack([NODES, 2 * NODES]), EDGES)
    expected = torch.tensor([[7.0, 26.0], [10.0, 24.0], [18.0, 19.0], [17.0, 27.0]])
    assert torch.equal(made, expected)
    assert torch.equal(both[0], expected)
    bias = layer.lin_l.bias.detach()
    assert torch.equal(both[1], 2 * (expected - bias) + bias)


def test_weights_have_the_names_of_those_that_ship() -> None:
    names = ["lin_l.weight", "lin_l.bias", "lin_r.weight"]
    assert list(SAGEConv(3, 4).state_dict()) == names


def test_pools_take_each_owner_by_itself() -> None:
    owner = torch.tensor([2, 0, 2, 0])
    means = torch.tensor([[5.5, 3.5], [0.0, 0.0], [0.5, 1.0]])
    assert torch.equal(mean_pool(NODES, owner, 3), means)
    most = torch.tensor([[7.0, 7.0], [0.0, 0.0], [1.0, 5.0]])
    assert torch.equal(max_pool(NODES, owner, 3), most)
    assert torch.equal(max_pool(-NODES, owner, 3)[2], torch.tensor([0.0, 3.0]))
