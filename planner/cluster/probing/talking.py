"""How fast ranks talk: messages between neighbours, and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from planner.cluster.fit import fit_line
from planner.cluster.probing.session import Session
from planner.schema.cluster import CollectiveKind, MeasuredCollective
from planner.schema.probe import MeasuredLink

__all__ = ["collectives", "links"]

#: Bytes of messages and of full tensors.
_MESSAGES = (4_096, 65_536, 1 << 20, 8 << 20)
_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)


def links(session: Session, budget_s: float) -> tuple[MeasuredLink, ...]:
    """Rings of messages: inside each host, and from host to host."""
    rings = {"host": _ring_inside(session), "network": _ring_across(session)}
    used = {scope: ring for scope, ring in rings.items() if ring is not None}
    found = []
    for scope, (target, origin) in used.items():
        times = []
        for size in _MESSAGES:
            out = torch.zeros(size, dtype=torch.uint8, device=session.device)
            into = torch.empty_like(out)

            def exchange(
                out: torch.Tensor = out,
                into: torch.Tensor = into,
                target: int = target,
                origin: int = origin,
            ) -> None:
                _exchange(out, into, target, origin)

            share = budget_s / (len(used) * len(_MESSAGES))
            times.append(session.median_together(exchange, share))
        alpha, bandwidth = fit_line(_MESSAGES, times)
        found.append(
            MeasuredLink.model_validate(
                {"scope": scope, "alpha_s": alpha, "bandwidth_bytes_per_s": bandwidth}
            )
        )
    return tuple(found)


def _exchange(out: torch.Tensor, into: torch.Tensor, target: int, origin: int) -> None:
    import torch.distributed as dist

    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, target), dist.P2POp(dist.irecv, into, origin)]
    )
    for work in works:
        work.wait()


def _ring_inside(session: Session) -> tuple[int, int] | None:
    """Next and previous rank of this host; None if some host has a single rank."""
    counts = [session.host_of_rank.count(h) for h in set(session.host_of_rank)]
    if min(counts) == 1:
        return None
    ranks = session.ranks_of_host
    place = ranks.index(session.rank)
    return ranks[(place + 1) % len(ranks)], ranks[place - 1]


def _ring_across(session: Session) -> tuple[int, int] | None:
    """Same place on the next and the previous host; None for one host."""
    counts = {session.host_of_rank.count(h) for h in set(session.host_of_rank)}
    if len(session.host_hashes) == 1:
        return None
    stride = counts.pop() if len(counts) == 1 else 1
    size = session.world_size
    return (session.rank + stride) % size, (session.rank - stride) % size


def _group_sizes(world_size: int) -> tuple[int, ...]:
    """2, 4, 8 … as far as they divide the world, and the world itself."""
    powers = (2**i for i in range(1, math.ceil(math.log2(max(world_size, 2))) + 1))
    sizes = {size for size in powers if world_size % size == 0}
    if world_size > 1:
        sizes.add(world_size)
    return tuple(sorted(sizes))


def collectives(session: Session, budget_s: float) -> tuple[MeasuredCollective, ...]:
    """All groups of one size at a time, each kind, over a ladder of tensors."""
    import torch.distributed as dist

    sizes = _group_sizes(session.world_size)
    if not sizes:
        return ()
    share = budget_s / (len(sizes) * len(_KINDS) * len(_MESSAGES))
    found = []
    for group_size in sizes:
        mine = None
        for start in range(0, session.world_size, group_size):
            # Every rank must take part in making every group.
            group = dist.new_group(list(range(start, start + group_size)))
            if start <= session.rank < start + group_size:
                mine = group
        for kind in _KINDS:
            ladder = [size // group_size * group_size for size in _MESSAGES]
            times = [
                session.median_together(
                    _collective(session, kind, mine, group_size, size), share
                )
                for size in ladder
            ]
            alpha, bandwidth = fit_line(ladder, times)
            found.append(
                MeasuredCollective(
                    kind=kind,
                    group_size=group_size,
                    alpha_s=alpha,
                    bandwidth_bytes_per_s=bandwidth,
                )
            )
        dist.destroy_process_group(mine)
    return tuple(found)


def _collective(
    session: Session, kind: CollectiveKind, group: Any, group_size: int, size: int
) -> Callable[[], object]:
    """A call that runs one collective over a full tensor of ``size`` bytes."""
    import torch.distributed as dist

    part = max(1, size // group_size // 4)
    full = torch.zeros(part * group_size, device=session.device)
    shard = torch.zeros(part, device=session.device)
    other = torch.zeros_like(full)
    # torch 2.13 deprecates the names that torch 2.11 knows.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[CollectiveKind, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: gather(full, shard, group=group),
        "reduce_scatter": lambda: scatter(shard, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
    }
    return calls[kind]
