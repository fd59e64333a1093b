"""Processors of devices."""

from __future__ import annotations

import pytest

from planner.cluster import device_type, device_type_names


@pytest.mark.parametrize("name", device_type_names())
def test_every_chip_says_how_many_processors_it_has(name: str) -> None:
    found = device_type(name).processors
    assert found is not None
    # From one die of a K80 (13) to the MI325X (304).
    assert 13 <= found <= 304
