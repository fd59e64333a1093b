"""Small tasks drawn by chance, and a network that makes something of them."""

from __future__ import annotations

import pytest
import torch

from planner.split import Groups
from policies.split.network import NetworkConfig, SplitNetwork
from policies.split.worlds import WorldConfig, draw_groups


@pytest.fixture(scope="session")
def pool() -> list[Groups]:
    return draw_groups(0, 12, "test", WorldConfig(least=16, most=60))


@pytest.fixture
def network() -> SplitNetwork:
    """With weights by chance everywhere, so that all parts count."""
    torch.manual_seed(0)
    made = SplitNetwork(NetworkConfig(width=8, layers=2))
    for layer in (made.last, made.moved):
        torch.nn.init.normal_(layer.weight)
    return made.eval()
