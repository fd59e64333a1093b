"""The processes of a plan, arranged on a device mesh, and the device of this one."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executors.launching.rendezvous import fresh_store
from planner.errors import ExecutionError, StrategyError
from planner.schema import AXES, Mesh, Strategy

__all__ = [
    "ProcessMesh",
    "arrange",
    "choose_device",
    "communication_degrees",
    "process_group",
]


@dataclass(frozen=True, kw_only=True)
class ProcessMesh:
    """Where this process stands among all processes of a plan.

    The same processes are seen in up to three ways. Parameters are copied and sharded
    over ``pp, replicate, shard, tp``: ranks that share a sequence have equal
    parameters, so that cp is part of ``shard`` (of ``replicate`` without ZeRO).
    Sequences are shared along ``cp``. Experts live on ``replicate, expert_shard, ep``,
    ep being the innermost of ``shard``.

    Attributes:
        device: Device this process computes on.
        plan: Degrees of the plan.
        degrees: Number of processes along each of the axes named above.
        views: For each way that there is, a mesh of its axes; axes of degree 1 are
            left out, except where mixed precision needs one.
        rank: Rank in the whole group.
        apart: True if copies along ``replicate`` may differ between exchanges.
        replica: Ranks of this process's copy if copies are apart and it is not alone
            in it.
    """

    device: torch.device
    plan: Mesh
    degrees: Mapping[str, int]
    views: tuple[DeviceMesh, ...]
    rank: int
    apart: bool = False
    replica: dist.ProcessGroup | None = None

    def size(self, axis: str) -> int:
        """Degree along an axis."""
        return self.degrees[axis]

    def index(self, axis: str) -> int:
        """Coordinate of this process along an axis of the plan, or one named above."""
        if axis in AXES:
            return self.plan.coordinates(self.rank)[axis]
        return self.along(axis).get_local_rank() if self.size(axis) > 1 else 0

    @property
    def reduces(self) -> bool:
        """True if every step reduces gradients over copies."""
        return self.size("replicate") > 1 and not self.apart

    @property
    def data_index(self) -> int:
        """Which slice of the global batch this process trains on."""
        place = self.plan.coordinates(self.rank)
        return place["dp_replicate"] * self.plan.dp_shard + place["dp_shard"]

    def along(self, *axes: str) -> DeviceMesh:
        """Sub-mesh of one or more axes of the first view that has them all."""
        view = next(v for v in self.views if set(axes) <= set(v.mesh_dim_names or ()))
        return view[axes]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Group along an axis; None where the axis has one process."""
        return self.along(axis).get_group() if self.size(axis) > 1 else None


def communication_degrees(strategy: Strategy) -> dict[str, int]:
    """Processes along each axis of :class:`ProcessMesh`.

    Axes that are put together are neighbours, so that no rank moves.

    Raises:
        StrategyError: If ep does not divide the ranks that share a copy.
    """
    mesh = strategy.mesh
    shard = mesh.dp_shard * mesh.cp
    replicate = mesh.dp_replicate
    if strategy.zero_stage == 0:
        # Shards that shard nothing are replicas.
        shard, replicate = 1, replicate * shard
    if shard % mesh.ep:
        raise StrategyError(
            f"ep={mesh.ep} does not divide the {shard} ranks that ZeRO shards over "
            f"(dp_shard x cp); use an ep that does"
        )
    return {
        "pp": mesh.pp,
        "replicate": replicate,
        "shard": shard,
        "cp": mesh.cp,
        "expert_shard": shard // mesh.ep if mesh.ep > 1 else 1,
        "ep": mesh.ep,
        "tp": mesh.tp,
    }


def choose_device(name: str | None = None) -> torch.device:
    """Device of this process: the LOCAL_RANK-th GPU if there are GPUs, else the CPU.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:3``; None to choose.

    Raises:
        ExecutionError: If the device does not exist here.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device(name or ("cuda" if count else "cpu"))
    if device.type != "cuda":
        return device
    index = (
        int(os.environ.get("LOCAL_RANK", "0")) if device.index is None else device.index
    )
    if index >= count:
        raise ExecutionError(
            f"device cuda:{index} is asked for, this machine has {count} GPUs; start "
            f"at most {count} processes here or use device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def process_group(device: torch.device, *, timeout_s: float = 600.0) -> Iterator[None]:
    """A process group for the block: gloo on CPUs, NCCL on GPUs.

    A group that exists already is used and left alone. Without the environment of
    torchrun the group has this process alone.

    Args:
        device: Device of this process.
        timeout_s: How long a collective may wait for the others, in seconds.
    """
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    device_id = device if device.type == "cuda" else None
    if "WORLD_SIZE" in os.environ:
        store = fresh_store(timeout)
        # Without a store of ours torch makes one, and wants no ranks then.
        numbers = (-1, -1) if store is None else _own_numbers()
        dist.init_process_group(
            backend,
            store=store,
            rank=numbers[0],
            world_size=numbers[1],
            timeout=timeout,
            device_id=device_id,
        )
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
            device_id=device_id,
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
    """Rank and number of processes, as torchrun says them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def arrange(
    strategy: Strategy, device: torch.device, *, apart: bool = False
) -> ProcessMesh:
    """Lay the processes of the current group out as the strategy's mesh.

    Args:
        strategy: Whose mesh to build.
        device: Device of this process.
        apart: See :class:`ProcessMesh`.

    Raises:
        ExecutionError: If there are more or fewer processes than the mesh needs.
    """
    have, want = dist.get_world_size(), strategy.mesh.num_devices
    if have != want:
        raise ExecutionError(
            f"{have} processes were started, the plan's mesh ({strategy.label()}) "
            f"needs {want}; start it with torchrun --nproc-per-node {want}"
        )
    degrees = communication_degrees(strategy)
    casts = strategy.precision.compute != strategy.precision.parameter
    # fully_shard over one process is how one process gets mixed precision.
    alone = apart or degrees["replicate"] == 1
    lone = {"shard"} if casts and alone else set()
    views = [_view(device, degrees, ("pp", "replicate", "shard", "tp"), lone)]
    if degrees["cp"] > 1:
        outer = {"outer": have // (degrees["cp"] * degrees["tp"])}
        views.append(_view(device, degrees | outer, ("outer", "cp", "tp"), set()))
    if degrees["ep"] > 1:
        axes = ("pp", "replicate", "expert_shard", "ep", "tp")
        views.append(_view(device, degrees, axes, {"expert_shard"}))
    return ProcessMesh(
        device=device,
        plan=strategy.mesh,
        degrees=degrees,
        views=tuple(views),
        rank=dist.get_rank(),
        apart=apart,
        replica=_replica_group(degrees) if apart else None,
    )


def _replica_group(degrees: Mapping[str, int]) -> dist.ProcessGroup | None:
    """Group of the ranks of this process's copy; None if it is alone."""
    axes = ("pp", "replicate", "shard", "tp")
    ranks = torch.arange(dist.get_world_size()).view([degrees[axis] for axis in axes])
    mine = None
    for copy in ranks.unbind(1):
        members = copy.flatten().tolist()
        # new_group is collective over the world: every rank makes every group.
        group = dist.new_group(members) if len(members) > 1 else None
        if dist.get_rank() in members:
            mine = group
    return mine


def _view(
    device: torch.device,
    degrees: Mapping[str, int],
    axes: Sequence[str],
    kept: Collection[str],
) -> DeviceMesh:
    """All processes as a mesh, without the axes of one process that are not kept."""
    names = [axis for axis in axes if degrees[axis] > 1 or axis in kept]
    names = names or ["shard"]
    sizes = tuple(degrees[name] for name in names)
    return init_device_mesh(device.type, sizes, mesh_dim_names=tuple(names))
