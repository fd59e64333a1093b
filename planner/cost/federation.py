"""Time and bytes of an exchange between the members of a federation.

A weight has one owner in each member; those of one tuple of owners are averaged in a
ring of their own, and all rings run at once. For C members a ring of W bytes has every
owner send 2 (C - 1)/C W to the owner in the next member, so that an exchange takes

t = max_nodes sum_rings (2 (C - 1)/C W / bandwidth) + 2 (C - 1) pieces latency

Inside a member the owner collects the parts of a weight that is divided, and sends the
mean to all that hold it. Source: Menon et al. 2024, Ravnest (2401.01728), section 3.3:
parallel multi-ring all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Cluster
from planner.graph import ModelGraph
from planner.schema import Plan
from planner.schema.federation import assign_owners, rings_of
from planner.schema.methods.local_steps import LocalSteps
from planner.units import dtype_bytes

__all__ = ["ExchangeCost", "price_exchange"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """Price of one exchange.

    Attributes:
        seconds: From its beginning until the last device has the mean.
        sent_bytes: Most that one device of each member sends to other members.
        rings: Number of rings.
    """

    seconds: float
    sent_bytes: tuple[float, ...]
    rings: int


def price_exchange(
    graph: ModelGraph, fleet: Cluster, plans: Sequence[tuple[tuple[int, ...], Plan]]
) -> ExchangeCost:
    """Price an exchange of all trained weights.

    Args:
        graph: The model.
        fleet: The machines.
        plans: Fleet id of each rank, and the plan, of each member.
    """
    count = len(plans)
    if count == 1:
        return ExchangeCost(seconds=0.0, sent_bytes=(0.0,), rings=0)
    each = dtype_bytes(plans[0][1].strategy.precision.parameter)
    sizes = {p.name: p.numel * each for p in graph.parameters if p.trainable}
    holders = [_holders(graph, plan, sizes) for _, plan in plans]
    owners = [assign_owners(sizes, one) for one in holders]
    rings = rings_of(owners)
    share = 2 * (count - 1) / count
    seconds: dict[tuple[int, int], float] = {}
    sent: dict[tuple[int, int], float] = {}
    latency_s = 0.0
    for ring, names in rings.items():
        weight_bytes = share * sum(sizes[name] for name in names)
        pieces = math.ceil(weight_bytes / share / LocalSteps.PIECE_BYTES)
        nodes = [plans[member][0][rank] for member, rank in enumerate(ring)]
        for member, rank in enumerate(ring):
            following = nodes[(member + 1) % count]
            bandwidth, wait_s = fleet.link(nodes[member], following)
            key = (member, rank)
            seconds[key] = seconds.get(key, 0.0) + weight_bytes / bandwidth
            sent[key] = sent.get(key, 0.0) + weight_bytes
            latency_s = max(latency_s, 2 * (count - 1) * pieces * wait_s)
    inside = [
        _inside_s(fleet, ids, plan, sizes, held, mine)
        for (ids, plan), held, mine in zip(plans, holders, owners, strict=True)
    ]
    most = tuple(
        max(value for (member, _), value in sent.items() if member == index)
        for index in range(count)
    )
    return ExchangeCost(
        seconds=max(seconds.values()) + latency_s + max(inside),
        sent_bytes=most,
        rings=len(rings),
    )


def _holders(
    graph: ModelGraph, plan: Plan, names: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Ranks that hold each weight, or a part of it."""
    strategy = plan.strategy
    stage = {name: one.rank for one in strategy.stages for name in one.modules}
    stride = strategy.mesh.num_devices // strategy.mesh.pp
    found = {}
    for parameter in graph.parameters:
        if parameter.name not in names:
            continue
        blocks = parameter.readers or (parameter.block,)
        units = {graph.unit_names[graph.unit_of_block[block]] for block in blocks}
        stages = sorted({stage.get(unit, 0) for unit in units})
        found[parameter.name] = tuple(
            rank for pp in stages for rank in range(pp * stride, (pp + 1) * stride)
        )
    return found


def _inside_s(
    fleet: Cluster,
    ids: tuple[int, ...],
    plan: Plan,
    sizes: dict[str, int],
    holders: dict[str, tuple[int, ...]],
    owners: dict[str, int],
) -> float:
    """Seconds in which a member's owners collect weights, and hand out the mean."""
    strategy = plan.strategy
    divided = strategy.mesh.tp > 1 or (
        strategy.zero_stage > 0 and strategy.mesh.shards > 1
    )
    loads: dict[tuple[int, tuple[int, ...]], float] = {}
    for name, owner in owners.items():
        if len(holders[name]) > 1:
            key = (owner, holders[name])
            loads[key] = loads.get(key, 0.0) + sizes[name]
    total = 0.0
    for (owner, held), weight_bytes in loads.items():
        slowest = min(
            fleet.link(ids[owner], ids[rank])[0] for rank in held if rank != owner
        )
        # A tree of messages each way.
        turns = math.ceil(math.log2(len(held))) + divided
        total += turns * weight_bytes / slowest
    return total
