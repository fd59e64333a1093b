"""The process group of a plan: made in the order of its devices, watched to its end."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from executors.launching.heartbeat import Heartbeat
from executors.launching.rendezvous import meet
from planner.errors import ExecutionError

__all__ = [
    "RANK_TIMEOUT_S",
    "own_numbers",
    "process_group",
    "ranks_of_processes",
    "watched_group",
]

#: Silence after which a rank counts as missing or lost, in seconds.
RANK_TIMEOUT_S = 60.0


def ranks_of_processes(device_ids: Sequence[int]) -> tuple[int, ...]:
    """Rank on the mesh of each process; process i has the i-th smallest device id.

    Args:
        device_ids: Device id of every rank.
    """
    return tuple(sorted(range(len(device_ids)), key=device_ids.__getitem__))


@contextmanager
def process_group(
    device: torch.device,
    *,
    timeout_s: float = 600.0,
    rank_timeout_s: float = RANK_TIMEOUT_S,
    device_ids: Sequence[int] = (),
    alone: bool = False,
    variables: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A process group for the block: gloo on CPUs, NCCL on GPUs.

    Ranks of the group are ranks of the mesh, whichever process a launcher has given
    them to: torch sorts the ranks of every subgroup, so that a mesh in another order
    than its group would deal out shards in the one and look for them in the other.
    One process may not run plans of two orders one after the other: torch keeps meshes
    by the ranks in them, and would take its place in the first for that in the second.

    Ranks that do not come, or are lost later, are named on all others. A group that
    exists already is used, left alone, and not watched. Without the environment of
    torchrun the group has this process alone.

    Args:
        device: Device of this process.
        timeout_s: How long a collective may wait for the others, in seconds.
        rank_timeout_s: Silence after which a rank counts as missing (at the start,
            from the last rank that came) or lost (later), in seconds.
        device_ids: Device id of every rank; () if processes are in their order.
        alone: Whether the group has this process alone, whatever the environment says.
        variables: Of the environment, that NCCL finds when groups are made in the
            block; those that are set stay as they are.

    Raises:
        RankFailedError: If a rank does not come, or its failure ends the block.
        ExecutionError: If a group exists whose ranks are in another order.
    """
    process, world = (0, 1) if alone else own_numbers()
    ranks = () if alone else ranks_of_processes(device_ids)
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
    if rank_timeout_s <= 0:
        raise ExecutionError(
            f"rank_timeout_s={rank_timeout_s:g}; give a number of seconds above 0"
        )
    timeout = datetime.timedelta(seconds=timeout_s)
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(_set(variables or {}))
        heartbeat: Heartbeat | None = None
        store: Store = dist.HashStore()  # type: ignore[attr-defined]
        if world > 1:
            meeting = meet(
                process, world, rank_timeout_s=rank_timeout_s, timeout=timeout
            )
            store = meeting.store
            heartbeat = Heartbeat(meeting, process, world, rank_timeout_s)
        stack.enter_context(
            watched_group(device, store, rank, world, timeout, heartbeat)
        )
        yield


@contextmanager
def watched_group(
    device: torch.device,
    store: Store,
    rank: int,
    world: int,
    timeout: datetime.timedelta,
    heartbeat: Heartbeat | None,
) -> Iterator[None]:
    """The default process group for the block, whose failure is told to the others.

    Args:
        device: Of this process.
        store: Of this group alone.
        rank: In the group.
        world: Processes of the group.
        timeout: How long a collective may wait for the others.
        heartbeat: Watches the others; None where there are none.
    """
    with heartbeat or nullcontext():
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=rank,
                world_size=world,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            yield
        except BaseException as error:
            if heartbeat is not None:
                heartbeat.fail(error)
            raise
        finally:
            # DDP's reducer must go while others still hold the group. If it is the
            # last to let go of it, it joins gloo's threads under the GIL, and those
            # wait for the GIL to free their tensors: a deadlock in one run of five
            # (torch 2.13).
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set those variables of the environment for the block that have no value."""
    ours = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def own_numbers() -> tuple[int, int]:
    """Number of this process, and of all processes, from torchrun's environment."""
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
