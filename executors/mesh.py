"""The processes of a plan, arranged on a device mesh, and the device of this one."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.errors import ExecutionError
from planner.schema import AXES, Mesh, Strategy

__all__ = [
    "ProcessMesh",
    "arrange",
    "choose_device",
    "effective_mesh",
    "process_group",
]


@dataclass(frozen=True, kw_only=True)
class ProcessMesh:
    """Where this process stands among all processes of a plan.

    Attributes:
        device: Device this process computes on.
        mesh: Named axes that processes communicate along; axes of degree 1 are left
            out, except where mixed precision needs one.
        degrees: Degrees by axis, as communicated (see :func:`effective_mesh`).
        rank: Rank in the whole group.
    """

    device: torch.device
    mesh: DeviceMesh
    degrees: Mesh
    rank: int

    @property
    def names(self) -> tuple[str, ...]:
        """Axes that the mesh has, outermost first."""
        return tuple(self.mesh.mesh_dim_names or ())

    def size(self, axis: str) -> int:
        """Degree along an axis."""
        return self.degrees.degrees[AXES.index(axis)]

    def index(self, axis: str) -> int:
        """Coordinate of this process along an axis."""
        return self.degrees.coordinates(self.rank)[axis]

    @property
    def data_index(self) -> int:
        """Which slice of the global batch this process trains on."""
        return self.index("dp_replicate") * self.size("dp_shard") + self.index(
            "dp_shard"
        )

    def along(self, *axes: str) -> DeviceMesh:
        """Sub-mesh of one or more axes that the mesh has."""
        return self.mesh[axes]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Group along an axis; None where the axis has one process."""
        return self.mesh.get_group(axis) if self.size(axis) > 1 else None


def effective_mesh(strategy: Strategy) -> Mesh:
    """Degrees as communicated: shards that shard nothing (ZeRO-0) are replicas.

    dp_replicate and dp_shard are neighbours, so that no rank moves.
    """
    mesh = strategy.mesh
    if strategy.zero_stage == 0 and mesh.dp_shard > 1:
        replicas = mesh.dp_replicate * mesh.dp_shard
        return mesh.model_copy(update={"dp_replicate": replicas, "dp_shard": 1})
    return mesh


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
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
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


def arrange(strategy: Strategy, device: torch.device) -> ProcessMesh:
    """Lay the processes of the current group out as the strategy's mesh.

    Args:
        strategy: Whose mesh to build.
        device: Device of this process.

    Raises:
        ExecutionError: If there are more or fewer processes than the mesh needs.
    """
    have, want = dist.get_world_size(), strategy.mesh.num_devices
    if have != want:
        raise ExecutionError(
            f"{have} processes were started, the plan's mesh ({strategy.label()}) "
            f"needs {want}; start it with torchrun --nproc-per-node {want}"
        )
    degrees = effective_mesh(strategy)
    casts = strategy.precision.compute != strategy.precision.parameter
    names, sizes = [], []
    for axis, degree in zip(AXES, degrees.degrees, strict=True):
        # fully_shard over one process is how one process gets mixed precision.
        lone = axis == "dp_shard" and degrees.dp_replicate == 1 and casts
        if degree > 1 or lone:
            names.append(axis)
            sizes.append(degree)
    if not names:
        names, sizes = ["dp_shard"], [1]
    mesh = init_device_mesh(device.type, tuple(sizes), mesh_dim_names=tuple(names))
    return ProcessMesh(device=device, mesh=mesh, degrees=degrees, rank=dist.get_rank())
