"""The process group of a plan: made in the order of its devices, on a fresh store.

torchrun keeps one store through all its restarts (torch 2.13). A restarted rank may
then read there at which address a peer listened that was killed, and fails to connect,
as in two of three restarts tried. Its count of restarts does not tell attempts apart:
each node has its own. So ranks agree on a prefix that no earlier attempt has written
under. Source: github.com/pytorch/pytorch/issues/135712.
"""

from __future__ import annotations

import datetime
import gc
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from planner.errors import ExecutionError

__all__ = ["agree", "fresh_store", "process_group", "ranks_of_processes"]

_POLL_S = 0.02


def ranks_of_processes(device_ids: Sequence[int]) -> tuple[int, ...]:
    """Rank on the mesh of each process; process i has the i-th smallest device id.

    Args:
        device_ids: Device id of every rank.
    """
    return tuple(sorted(range(len(device_ids)), key=device_ids.__getitem__))


@contextmanager
def process_group(
    device: torch.device, *, timeout_s: float = 600.0, device_ids: Sequence[int] = ()
) -> Iterator[None]:
    """A process group for the block: gloo on CPUs, NCCL on GPUs.

    Ranks of the group are ranks of the mesh, whichever process a launcher has given
    them to: torch sorts the ranks of every subgroup, so that a mesh in another order
    than its group would deal out shards in the one and look for them in the other.
    One process may not run plans of two orders one after the other: torch keeps meshes
    by the ranks in them, and would take its place in the first for that in the second.

    A group that exists already is used and left alone. Without the environment of
    torchrun the group has this process alone.

    Args:
        device: Device of this process.
        timeout_s: How long a collective may wait for the others, in seconds.
        device_ids: Device id of every rank; () if processes are in their order.

    Raises:
        ExecutionError: If a group exists whose ranks are in another order.
    """
    process, world = _own_numbers()
    ranks = ranks_of_processes(device_ids)
    # A wrong number of processes is for build_mesh() to refuse.
    rank = ranks[process] if len(ranks) == world else process
    if dist.is_initialized():
        if rank != process and dist.get_rank() == process:
            raise ExecutionError(
                f"process {process} is rank {rank} of the plan, whose device_ranges "
                f"are out of order, but rank {process} of the process group that "
                f"exists; leave it to run() to make the group"
            )
        yield
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=_store(timeout),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    finally:
        # DDP's reducer must go while others still hold the group. If it is the last
        # to let go of it, it joins gloo's threads under the GIL, and those wait for
        # the GIL to free their tensors: a deadlock in one run of five (torch 2.13).
        gc.collect()
        dist.destroy_process_group()


def _own_numbers() -> tuple[int, int]:
    """Number of this process, and of all processes, from torchrun's environment."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _store(timeout: datetime.timedelta) -> Store:
    if "WORLD_SIZE" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = fresh_store(timeout)
    if store is None:
        # As torch would make it; its host is process 0, whatever rank that has.
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
    return store


def fresh_store(timeout: datetime.timedelta) -> Store | None:
    """A store for the ranks of this attempt; None where any store is fresh.

    Args:
        timeout: How long to wait for the other ranks.

    Raises:
        ExecutionError: If they do not come in time.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,
        timeout=timeout,
    )
    return PrefixStore(agree(store, rank, world, timeout), store)


def agree(store: Store, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """Agree on a token that the living ranks share and dead ones never saw.

    Every rank leaves a token of its own; rank 0 answers each token that it sees, those
    of the dead too, until as many have heard the answer as there are others.

    Raises:
        ExecutionError: On rank 0, if they do not come in time.
    """
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"meshwright/rank/{rank}", token)
        word = str(store.get(f"meshwright/answer/{token}"), "ascii")
        store.add(f"{word}/heard", 1)
        return word
    word, answered = f"meshwright/{uuid.uuid4().hex}", set()
    deadline = time.monotonic() + timeout.total_seconds()
    while (heard := store.add(f"{word}/heard", 0)) < world - 1:
        for other in range(1, world):
            key = f"meshwright/rank/{other}"
            said = str(store.get(key), "ascii") if store.check([key]) else None
            if said is not None and said not in answered:
                store.set(f"meshwright/answer/{said}", word)
                answered.add(said)
        if time.monotonic() > deadline:
            raise ExecutionError(
                f"{heard + 1} of {world} ranks started within "
                f"{timeout.total_seconds():g} s; see the output of the others"
            )
        time.sleep(_POLL_S)
    return word
