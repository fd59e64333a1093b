"""Resharding of a DTensor to another mesh, over gloo."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from planner.schema.resharding import MeshLayout, unit_tasks
from planner.simulate.resharding import plan_resharding
from tests.distributed.pool import Pool
from tests.marked import cases

#: Patterns of the nine published cases (tests/simulate/resharding_cases.py), on as few
#: devices as have them: hosts, devices a host and split of both meshes.
PATTERNS: dict[str, tuple[tuple[int, int, str, str], tuple[int, int, str, str]]] = {
    "1, rows to rows": ((2, 1, "h", ""), (2, 1, "h", "")),
    "2, replicas to rows": ((2, 1, "", ""), (2, 1, "h", "")),
    "3 and 9, columns to rows": ((2, 1, "", "h"), (2, 1, "h", "")),
    "4, all columns to all rows": ((2, 2, "", "hd"), (2, 2, "hd", "")),
    "5, devices to hosts": ((2, 2, "d", ""), (2, 1, "h", "")),
    "6, two rows to three": ((2, 1, "h", ""), (3, 1, "h", "")),
    "7 and 8, one host to replicas": ((1, 2, "d", ""), (2, 2, "", "")),
}
_SHAPE = (24, 16)


def _layout(hosts: int, each: int, *split: str) -> MeshLayout:
    return MeshLayout(hosts=hosts, devices_per_host=each, split=split)


def _reshard(pattern: str) -> dict[str, Any]:
    """The tile of this rank, what it should be, and the bytes that it sent."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from executors.communication.resharding import GroupWire, Resharder

    source, destination = (_layout(*one) for one in PATTERNS[pattern])
    sending, rank = source.num_devices, dist.get_rank()
    ranks = torch.arange(sending).view(source.hosts, source.devices_per_host)
    mesh = DeviceMesh("cpu", ranks)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(_SHAPE, generator=generator)
    local = None
    if rank < sending:
        placements = [
            next((Shard(d) for d, s in enumerate(source.split) if a in s), Replicate())
            for a in "hd"
        ]
        spread = distribute_tensor(whole, mesh, placements)
        local = spread.to_local()
        whole = spread.full_tensor()
    mine = Resharder(
        plan_resharding(_SHAPE, source, destination),
        range(sending),
        range(sending, sending + destination.num_devices),
        rank=rank,
        wire=GroupWire(),
    )
    # Twice: groups and buffers serve again.
    for _ in range(2):
        tile = mine.run(local)
    expected = None
    if rank >= sending:
        box = destination.tile(rank - sending, _SHAPE)
        expected = whole[tuple(slice(*one) for one in box)].numpy()
    return {
        "tile": None if tile is None else tile.numpy(),
        "expected": expected,
        "left": mine.bytes_across_hosts if rank < sending else 0,
    }


@pytest.mark.parametrize(
    "pattern",
    cases(
        PATTERNS,
        further=set(PATTERNS)
        - {"3 and 9, columns to rows", "7 and 8, one host to replicas"},
    ),
)
def test_tiles_are_slices_of_the_full_tensor(pool: Pool, pattern: str) -> None:
    source, destination = (_layout(*one) for one in PATTERNS[pattern])
    world = source.num_devices + destination.num_devices
    found = pool.run(_reshard, world, pattern)
    for rank, one in enumerate(found):
        assert (one["tile"] is None) == (rank < source.num_devices)
        if one["tile"] is not None:
            assert np.array_equal(one["tile"], one["expected"])
    tasks = unit_tasks(_SHAPE, source, destination)
    assert sum(one["left"] for one in found) == 2 * sum(4 * t.elements for t in tasks)
