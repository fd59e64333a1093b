"""Groups over which runs shard, where notes name them."""

from __future__ import annotations

import pytest

from planner.calibration.shard_groups import replicated_and_sharded
from tests.calibration.rows import small


@pytest.mark.parametrize(
    ("notes", "zero", "tp", "found"),
    [
        ("", 1, 1, (1, 64)),
        ("", 0, 1, (64, 1)),
        ("optimizer-state shard group zero1=8 (-1 = all)", 1, 1, (8, 8)),
        ("zero1 group=4, packed samples", 1, 2, (16, 4)),
        ("optimizer-state shard group zero1=-1 (-1 = all)", 1, 1, (1, 64)),
        ("sharding HSDP", 3, 1, (8, 8)),
        ("sharding HSDP", 3, 4, (32, 2)),
        ("HYBRID_SHARD within a host", 3, 1, (8, 8)),
        # Not what a row without ZeRO, or with fewer replicas, can do.
        ("zero1=8", 0, 1, (64, 1)),
        ("zero1=64", 1, 1, (1, 64)),
        ("dp_shard=24", 3, 1, (1, 64)),
    ],
)
def test_groups(notes: str, zero: int, tp: int, found: tuple[int, int]) -> None:
    why: list[str] = []
    assert replicated_and_sharded(small(notes=notes), zero, 64, tp, why) == found
    assert bool(why) == (1 not in found)
