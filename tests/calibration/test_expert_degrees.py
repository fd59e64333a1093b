"""Experts of rows that say, or do not, how they were spread."""

from __future__ import annotations

import pytest

from planner.calibration.expert_degrees import expert_degree
from planner.calibration.frameworks import FRAMEWORKS
from tests.calibration.rows import small


@pytest.mark.parametrize(
    ("framework", "given", "experts", "ways", "ep"),
    [
        # Not given: within a host, as far as ranks and experts go.
        ("megatron", None, 128, 64, 8),
        ("megatron-2025", None, 8, 64, 8),
        ("megatron", None, 60, 8, 4),
        ("megatron", None, 128, 2, 2),
        # Others gather all; models without experts have nothing to spread.
        ("torchtitan", None, 128, 64, 1),
        ("alpa", None, 16, 8, 1),
        ("megatron", None, 0, 64, 1),
        # Given: as it says, or the most that plans can.
        ("megatron", 1, 128, 64, 1),
        ("megatron", 64, 128, 64, 64),
        ("torchtitan", 64, 128, 16, 16),
    ],
)
def test_experts_are_spread_over(
    framework: str, given: int | None, experts: int, ways: int, ep: int
) -> None:
    why: list[str] = []
    row = small(ep=given)
    found = expert_degree(row, experts, FRAMEWORKS[framework], ways, why)
    assert found == ep
    assumed = given is None and framework.startswith("megatron") and experts > 0
    assert bool(why) == (assumed or (given is not None and given != ep))
