"""The processes of a plan, arranged on a device mesh, and the device of this one."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executors.launching.process_group import ranks_of_processes
from planner.errors import ExecutionError, StrategyError
from planner.schema import AXES, Mesh, Strategy

if TYPE_CHECKING:
    from executors.replicas.membership import Membership

__all__ = [
    "ProcessMesh",
    "build_mesh",
    "choose_device",
    "communication_degrees",
]


@dataclass(frozen=True, kw_only=True)
class ProcessMesh:
    """Position of this process among all processes of a plan.

    The same processes are seen in up to three ways. Parameters are copied and sharded
    over ``pp, replicate, shard, tp``: ranks that share a sequence have equal
    parameters, so that cp is part of ``shard`` (of ``replicate`` without ZeRO).
    Sequences are shared along ``cp``. Experts live on ``replicate, expert_shard, ep``,
    ep being the innermost of ``shard x tp``.

    Attributes:
        device: Device this process computes on.
        plan: Degrees of the plan.
        degrees: Number of processes along each of the axes named above.
        views: For each way that there is, a mesh of its axes; axes of degree 1 are
            left out, except where mixed precision needs one.
        rank: Rank on the plan's mesh, and in the whole group.
        process: Number of this process in the order of devices, which is the order
            that launchers count processes in. It differs from the rank where the
            plan's ``device_ranges`` are out of order.
        apart: True if copies along ``replicate`` may differ between exchanges.
        replica: Ranks of this process's copy if copies are apart and it is not alone
            in it.
        membership: Agreement with the other copies, where a run goes on without those
            that die: the processes are then those of this copy alone.
    """

    device: torch.device
    plan: Mesh
    degrees: Mapping[str, int]
    views: tuple[DeviceMesh, ...]
    rank: int
    process: int
    apart: bool = False
    replica: dist.ProcessGroup | None = None
    membership: Membership | None = None

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
        """Number of the slice of the global batch that this process trains on."""
        place = self.plan.coordinates(self.rank)
        return self.copy * self.plan.dp_shard + place["dp_shard"]

    @property
    def copy(self) -> int:
        """Number of this process's copy of the weights, along ``dp_replicate``."""
        if self.membership is not None:
            return self.membership.copy
        return int(self.plan.coordinates(self.rank)["dp_replicate"])

    @property
    def copies(self) -> int:
        """Number of copies of the weights that train on their own; 1 if none do."""
        if self.membership is not None:
            return self.membership.world
        return self.size("replicate") if self.apart else 1

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
    shard = mesh.shards
    replicate = mesh.dp_replicate
    if strategy.zero_stage == 0:
        # Shards that shard nothing are replicas.
        shard, replicate = 1, replicate * shard
    if mesh.ep > 1 and (shard * mesh.tp) % mesh.ep:
        raise StrategyError(
            f"ep={mesh.ep} does not divide {shard * mesh.tp}, the ranks that ZeRO "
            f"shards over (dp_shard x cp) x tp; use an ep that does"
        )
    return {
        "pp": mesh.pp,
        "replicate": replicate,
        "shard": shard,
        "cp": mesh.cp,
        "expert_shard": shard * mesh.tp // mesh.ep if mesh.ep > 1 else 1,
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


def build_mesh(
    strategy: Strategy, device: torch.device, membership: Membership | None = None
) -> ProcessMesh:
    """Lay the processes of the current group out as the strategy's mesh.

    Rank r of the group is rank r of the mesh; see
    :func:`executors.launching.process_group.process_group`.

    Args:
        strategy: Whose mesh to build.
        device: Device of this process.
        membership: Agreement with the other copies, if the group is one copy's.

    Raises:
        ExecutionError: If there are more or fewer processes than the mesh needs.
    """
    process_ids = ranks_of_processes(strategy.device_ids())
    if membership is not None:
        mesh = strategy.mesh.model_copy(update={"dp_replicate": 1})
        strategy = strategy.model_copy(update={"mesh": mesh})
    have, want = dist.get_world_size(), strategy.mesh.num_devices
    if have != want:
        raise ExecutionError(
            f"{have} processes were started, the plan's mesh ({strategy.label()}) "
            f"needs {want}; start it with torchrun --nproc-per-node {want}"
        )
    degrees = communication_degrees(strategy)
    casts = strategy.precision.activation_dtype != strategy.precision.parameter
    # fully_shard over one process is how one process gets mixed precision.
    apart = strategy.synchronisation.apart
    alone = apart or degrees["replicate"] == 1 or strategy.uses_own_buckets
    # Nor would a table's sums have a place without it.
    lone = {"shard"} if (casts and alone) or strategy.shards_by_table else set()
    views = [_view(device, degrees, ("pp", "replicate", "shard", "tp"), lone)]
    if degrees["cp"] > 1:
        outer = {"outer": have // (degrees["cp"] * degrees["tp"])}
        views.append(_view(device, degrees | outer, ("outer", "cp", "tp"), set()))
    if degrees["ep"] > 1:
        axes = ("pp", "replicate", "expert_shard", "ep")
        views.append(_view(device, degrees, axes, {"expert_shard"}))
    rank = dist.get_rank()
    return ProcessMesh(
        device=device,
        plan=strategy.mesh,
        degrees=degrees,
        views=tuple(views),
        rank=rank,
        process=membership.rank if membership else process_ids.index(rank),
        apart=apart,
        replica=_replica_group(degrees) if apart else None,
        membership=membership,
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
