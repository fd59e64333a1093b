"""Over how many of its replicas a measured run shards their state."""

from __future__ import annotations

import re

from planner.calibration.points import Point

__all__ = ["replicated_and_sharded"]

#: What InternEvo calls the ranks over which ZeRO 1 splits, and a hybrid's degree.
_STATED = re.compile(r"\b(?:zero1(?: group)?|dp_shard|shard_group)\s*=\s*(\d+)")

#: Fully sharded inside of a host, copies across: torch's HYBRID_SHARD takes the ranks
#: of a host where it is told no other group. Source: torch.distributed.fsdp.api,
#: ShardingStrategy.
_HYBRID = re.compile(r"\bhsdp\b|\bhybrid[ _-]shard")

#: Devices of such a host: an assumption.
_HOST = 8


def replicated_and_sharded(
    point: Point, zero: int, ways: int, tp: int, why: list[str]
) -> tuple[int, int]:
    """The row's dp_replicate and dp_shard.

    Args:
        point: The row, whose notes may name a group.
        zero: ZeRO stage.
        ways: Replicas, the product of both.
        tp: Ranks of a replica on its host.
        why: Takes what was assumed.
    """
    if not zero:
        return ways, 1
    notes = point.notes.lower()
    stated, hybrid = _STATED.search(notes), _HYBRID.search(notes)
    if stated:
        size = int(stated[1])
    elif hybrid:
        size = max(1, _HOST // tp)
    else:
        return 1, ways
    if size < 1 or size >= ways or ways % size:
        return 1, ways
    why.append(f"sharded over {size} of {ways} replicas, copies of that")
    return ways // size, size
