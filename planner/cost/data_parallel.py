"""What keeping copies alike costs: gathers of weights, reductions of gradients.

Without a pipeline, ZeRO 2 and 3 reduce-scatter after every microbatch. ZeRO 2 gathers
once a step, ZeRO 3 before every forward and every backward; all of it hides under
compute as far as ``overlap`` of it reaches. With a pipeline, torch gathers each stage
once before its first forward and reduces once after its last backward, and nothing
hides that on the rank that finishes last; under ZeRO 3 every forward frees the stage
again, so that each microbatch gathers it once more.
Source: torch.distributed.pipelining.stage, backward_maybe_with_nosync, torch 2.13.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Groups, time_of
from planner.cost.recipes import Recipe
from planner.schema import Optimizer, Precision
from planner.schema.cluster import DeviceType, MeasuredCollective
from planner.units import dtype_bytes

__all__ = ["ReplicaTraffic", "optimizer_seconds", "replica_traffic"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTraffic:
    """What one device spends and moves per step; arrays of shape [n].

    Attributes:
        exposed_s: Seconds not hidden under compute.
        gathered_bytes: Payload of all all-gathers of weights.
        scattered_bytes: Payload of all reduce-scatters of gradients.
        reduced_bytes: Payload of the all-reduce over replicas.
        sent_bytes: Bytes that leave the device for all of them.
    """

    exposed_s: Array
    gathered_bytes: Array
    scattered_bytes: Array
    reduced_bytes: Array
    sent_bytes: Array


def replica_traffic(
    *,
    scalars: Array,
    units: Array,
    zero_stage: NDArray[np.int64],
    pp: NDArray[np.int64],
    num_microbatches: NDArray[np.int64],
    forward_s: Array,
    backward_s: Array,
    shard: Groups,
    replicate: Groups,
    precision: Precision,
    recipe: Recipe,
    measured: tuple[MeasuredCollective, ...] = (),
    on_gpu: bool = True,
) -> ReplicaTraffic:
    """Exposed time of gathers and reductions.

    Args:
        scalars: Parameters on the device before ZeRO, after tp and ep.
        units: Groups of parameters that are gathered or reduced together.
        zero_stage: 0 to 3.
        pp: Pipeline degree.
        num_microbatches: Per step.
        forward_s: Forward of one microbatch on this device.
        backward_s: Its backward.
        shard: Devices that share one copy (ZeRO).
        replicate: Devices that hold the same shard.
        precision: Dtypes of gathers and reductions.
        recipe: Overlap and host overhead.
        measured: Probed collectives.
        on_gpu: False adds the host's time per collective.
    """
    name = "bfloat16" if precision.compute == "float8" else precision.compute
    gathered = scalars * dtype_bytes(name)
    reduced = scalars * dtype_bytes(precision.reduce)
    calls = 0.0 if on_gpu else recipe.collective_overhead_s
    per_unit = np.maximum(units, 1.0)

    def of(kind: str, size: Array, groups: Groups) -> Array:
        wire = time_of(kind, size / per_unit, groups, measured) + calls
        return np.where(groups.size > 1, wire * per_unit, 0.0)

    gather = of("all_gather", gathered, shard)
    scatter = of("reduce_scatter", reduced, shard)
    mirror = of("all_reduce", reduced / shard.size, replicate)
    many = num_microbatches.astype(float)
    room_f, room_b = recipe.overlap * forward_s, recipe.overlap * backward_s
    zero3, zero2 = zero_stage == 3, zero_stage >= 2
    # One process computes and communicates on CPU: there is nothing to hide under.
    hide = 1.0 if on_gpu else 0.0

    def exposed(wire: Array, room: Array) -> Array:
        return np.maximum(0.0, wire - hide * room)

    # Gathers and reductions of one backward share its links and its compute.
    behind = np.where(zero3, gather, 0.0) + scatter
    gathers = np.where(zero3, many, 1.0) * exposed(gather, room_f)
    early = np.where(zero2, (many - 1) * exposed(behind, room_b), 0.0)
    alone = gathers + early + exposed(behind + mirror, room_b)
    again = np.where(zero3, many * exposed(gather, room_b), 0.0)
    piped = gather + again + scatter + mirror
    n, r = shard.size, replicate.size
    without = np.where(zero3, 2 * many, 1.0)
    rounds = np.where(pp == 1, without, np.where(zero3, many + 1, 1.0)) * (n > 1)
    once = np.where((pp == 1) & zero2, many, 1.0) * (n > 1)
    mirrored = np.where(r > 1, reduced / n, 0.0)
    return ReplicaTraffic(
        exposed_s=np.where(pp > 1, piped, alone),
        gathered_bytes=rounds * gathered,
        scattered_bytes=once * reduced,
        reduced_bytes=mirrored,
        sent_bytes=(rounds * gathered + once * reduced) * (n - 1) / n
        + 2 * mirrored * (r - 1) / r,
    )


#: Passes over memory of one update: (reads + writes of 4-byte scalars, host ops).
#: Counted in torch/optim/adam.py and sgd.py, single-tensor paths.
_UPDATE = {"AdamW": (7.0, 12.0), "Adam": (7.0, 12.0), "SGD": (3.0, 1.0)}
#: Unfused on CPU, each op is a pass of two reads and a write.
_UNFUSED_PASS = 3.0


def optimizer_seconds(
    scalars: Array,
    tensors: Array,
    device: DeviceType,
    optimizer: Optimizer,
    *,
    clip: bool,
) -> Array:
    """Time of one update: bound by memory, fused on GPUs, op by op on CPUs.

    Args:
        scalars: Parameters that the device updates.
        tensors: Tensors they are in.
        device: On which.
        optimizer: Which update.
        clip: Whether gradients are normed and scaled before.
    """
    passes, ops = _UPDATE[optimizer.name]
    if optimizer.name == "SGD" and optimizer.momentum:
        passes, ops = passes + 2, ops + 2
    ops += 3 if clip else 0
    passes += 3 if clip else 0
    if device.backend == "gloo":
        moved = scalars * 4 * ops * _UNFUSED_PASS
        return np.asarray(
            moved / device.memory_bandwidth_bytes_per_s
            + tensors * ops * device.kernel_overhead_s
        )
    return np.asarray(scalars * 4 * passes / device.memory_bandwidth_bytes_per_s)
