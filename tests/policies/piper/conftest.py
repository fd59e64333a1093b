"""Tasks drawn by chance that something fits."""

from __future__ import annotations

import pytest
import torch

from policies.piper.learning import Lesson, draw_lessons
from policies.piper.network import NetworkConfig, PiperNetwork
from policies.piper.worlds import PiperWorld

SMALL = PiperWorld(least=12, most=32, devices=32)


@pytest.fixture(scope="session")
def lessons() -> list[Lesson]:
    return draw_lessons(12, "test", SMALL)


@pytest.fixture
def network() -> PiperNetwork:
    torch.manual_seed(0)
    made = PiperNetwork(NetworkConfig(width=8, layers=1))
    with torch.no_grad():
        for part in made.parameters():
            part += 0.1 * torch.randn_like(part)
    return made.eval()
