"""What smaller gradients cost: less on the wire, passes over memory, own states.

Casts halve what replicas exchange. PowerSGD sends two factors of every matrix that it
makes at least half as small, and the rest whole, in three all-reduces; it runs on all
gradients at once, when the backward is over, so that nothing hides it. What it missed
it keeps for the next step.
Source: Vogels et al. 2019 (1905.13727), algorithm 1; as
torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook has it, torch 2.13, with the
arguments that the executors give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.collectives import Groups, time_of
from planner.cost.data_parallel import ReplicaTraffic
from planner.cost.setting import Setting
from planner.graph import ModelGraph
from planner.schema import GradientCompression
from planner.units import dtype_bytes

__all__ = ["CompressedGradients", "compress", "compressed_traffic"]

Array = NDArray[np.float64]

_POWER_SGD_RANK = 4
#: A matrix is sent whole unless its factors are smaller by more than this.
_POWER_SGD_GAIN = 2
#: Reads and writes of every gradient: error added (3), copied (2), two products that
#: read it, one that writes it, error kept (3).
_POWER_SGD_PASSES = 11
#: A cast reads 4 bytes and writes 2, the division reads and writes 2, the cast back
#: reads 2 and writes 4.
_CAST_BYTES = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedGradients:
    """One replica's gradients on their way, plain ones if nothing is done to them.

    Attributes:
        payload_bytes: What is all-reduced in a step.
        calls: All-reduces of one set of gradients.
        moved_bytes: Read and written to compress and to restore.
        kept_bytes: Held from step to step.
        working_bytes: Held while gradients are exchanged, beside them.
        hides: Whether it may run while the backward does.
    """

    payload_bytes: float
    calls: int
    moved_bytes: float
    kept_bytes: float
    working_bytes: float
    hides: bool


def compress(
    graph: ModelGraph, how: GradientCompression, scalar_bytes: int
) -> CompressedGradients:
    """Size up the gradients of a whole model.

    Args:
        graph: Its trained parameters have gradients.
        how: What is done to them.
        scalar_bytes: Of a gradient before.
    """
    shapes = [p.shape for p in graph.parameters if p.trainable]
    scalars = float(sum(math.prod(shape) for shape in shapes))
    if how == "powersgd":
        sent, factors = _power_sgd(shapes)
        return CompressedGradients(
            payload_bytes=sent * scalar_bytes,
            calls=3,
            moved_bytes=_POWER_SGD_PASSES * scalars * scalar_bytes,
            # The error, and the factors that the next step starts from.
            kept_bytes=(scalars + factors) * scalar_bytes,
            # The copy, and the new error beside the old one.
            working_bytes=2 * scalars * scalar_bytes,
            hides=False,
        )
    size = scalar_bytes if how == "none" else dtype_bytes(how)
    cast = how != "none"
    return CompressedGradients(
        payload_bytes=scalars * size,
        calls=1,
        moved_bytes=_CAST_BYTES / 4 * scalar_bytes * scalars * cast,
        kept_bytes=0.0,
        working_bytes=scalars * size * cast,
        hides=True,
    )


def _power_sgd(shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """Scalars that are sent, and those of them that are factors."""
    sent, factors = 0.0, 0.0
    for shape in shapes:
        whole = math.prod(shape)
        rows = shape[0] if shape else 1
        columns = whole // max(rows, 1)
        small = (rows + columns) * min(rows, columns, _POWER_SGD_RANK)
        if small * _POWER_SGD_GAIN < whole:
            factors += small
        else:
            sent += whole
    return sent + factors, factors


def compressed_traffic(
    setting: Setting,
    how: GradientCompression,
    replicate: Groups,
    units: Array,
    backward_s: Array,
) -> ReplicaTraffic:
    """Traffic of plain replicas whose gradients are made smaller. Shapes [1].

    Args:
        setting: The request.
        how: What is done to gradients.
        replicate: All replicas.
        units: Groups of parameters that are reduced together, if not all at once.
        backward_s: Of one microbatch on a device.
    """
    found = compress(setting.graph, how, dtype_bytes(setting.precision.reduce))
    pieces = np.maximum(units, 1.0) if found.hides else np.full(1, float(found.calls))
    size = np.full(1, found.payload_bytes)
    known = setting.cluster.document.collectives
    wire = pieces * time_of("all_reduce", size / pieces, replicate, known)
    if not setting.on_gpu:
        hops = 2 * (replicate.size - 1)
        each = setting.recipe.collective_overhead_s + hops * setting.core_wait_s
        wire = wire + pieces * each
    device = setting.slowest_device
    wire = wire + found.moved_bytes / device.memory_bandwidth_bytes_per_s
    hidden = setting.recipe.overlap if setting.on_gpu and found.hides else 0.0
    ranks, none = replicate.size, np.zeros(1)
    return ReplicaTraffic(
        exposed_s=np.maximum(wire - hidden * backward_s, 0.0),
        gathered_bytes=none,
        scattered_bytes=none,
        reduced_bytes=size,
        sent_bytes=2 * size * (ranks - 1) / ranks,
    )
