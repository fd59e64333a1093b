"""The group of processes that a member of a federation is, and who leads it."""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from executors.federation.exchange import Place
from executors.launching.heartbeat import Heartbeat
from executors.launching.process_group import (
    own_numbers,
    ranks_of_processes,
    watched_group,
)
from executors.launching.rendezvous import Meeting, agree
from executors.replicas.membership import Membership
from planner.errors import ExecutionError
from planner.schema import Federation

__all__ = ["find_place", "make_membership", "member_group"]


def find_place(federation: Federation) -> Place:
    """Find out which process of which member this one is.

    Raises:
        ExecutionError: If there are more or fewer processes than the members need, or
            torchrun started them.
    """
    process, world = own_numbers()
    places = federation.processes
    if world != len(places):
        raise ExecutionError(
            f"{world} processes were started, the {len(federation.members)} members "
            f"have {len(places)}; start one for each of their devices"
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ExecutionError(
            "torchrun ends all its ranks when one fails, and has them start again in a "
            "store of old keys; use meshwright run, or start each process by itself "
            "with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if dist.is_initialized():
        raise ExecutionError(
            "a process group exists already, but members have groups of their own; "
            "leave it to run_federation() to make them"
        )
    member, index = places[process]
    mine = [number for number, (one, _) in enumerate(places) if one == member]
    ranks = ranks_of_processes(federation.members[member].processes)
    return Place(
        federation=federation,
        member=member,
        process=process,
        rank=ranks[index],
        leader=mine[0],
        followers=tuple(mine[1:]),
    )


def make_membership(
    place: Place, meeting: Meeting, silence_s: float, timeout_s: float
) -> Membership | None:
    """Agreement with the other members, for the process that leads this one."""
    federation = place.federation
    count = len(federation.members)
    if count == 1 or not place.leads:
        return None
    places = federation.processes
    leaders = sorted(
        next(n for n, (one, _) in enumerate(places) if one == member)
        for member in range(count)
    )
    return Membership(
        meeting,
        place.process,
        len(places),
        copy=place.member,
        numbers=leaders,
        fewest=federation.exchange.fewest_copies or count,
        silence_s=silence_s,
        timeout_s=timeout_s,
    )


@contextlib.contextmanager
def member_group(
    place: Place,
    store: Store,
    device: torch.device,
    rank_timeout_s: float,
    timeout: datetime.timedelta,
) -> Iterator[Store]:
    """Process group of the member for the block; yields a store of its attempt."""
    count, index = 1 + len(place.followers), 0
    if not place.leads:
        index = 1 + place.followers.index(place.process)
    mine = PrefixStore(f"member/{place.member}", store)
    word = uuid.uuid4().hex
    if count > 1:
        word = agree(mine, index, count, rank_timeout_s)
    own = PrefixStore(word, mine)
    heartbeat: Heartbeat | None = None
    if count > 1:
        meeting = Meeting(store=own, is_host=False)
        heartbeat = Heartbeat(meeting, index, count, rank_timeout_s)
    group = PrefixStore("group", own)
    with watched_group(device, group, place.rank, count, timeout, heartbeat):
        yield own
