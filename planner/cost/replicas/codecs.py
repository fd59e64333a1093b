"""Price of gradients that are made smaller on their way between plain replicas.

Casts halve what replicas exchange, and hide under the backward. A codec tells its exact
bytes itself (:class:`planner.schema.methods.gradient_compression.Codec`), of the
buckets that the executors use. It encodes and decodes on the device that computes, and
nothing hides that:

t = passes * 4 W / memory bandwidth + FLOPs of its products / peak

for W gradients. Of two collectives in a row the first hides under the backward, the
second waits for its end.
Source: the papers that the registry names; passes are counted in the executors' code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.cost.replicas import ReplicaRows, ReplicaTraffic
from planner.cost.traffic.collectives import Groups, time_of
from planner.schema import GradientCompression
from planner.schema.buckets import cut_into_buckets
from planner.schema.methods import read_method
from planner.schema.methods.gradient_compression import Codec
from planner.units import dtype_bytes

__all__ = ["CompressedGradients", "compressed_bytes", "compressed_traffic", "size_up"]

Array = NDArray[np.float64]

#: A cast reads 4 bytes and writes 2, the division reads and writes 2, the cast back
#: reads 2 and writes 4.
_CAST_BYTES = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedGradients:
    """One replica's gradients on their way, plain ones if nothing is done to them.

    Attributes:
        reduced_bytes: Payload of all-reduces in a step.
        gathered_bytes: Payload of all-gathers: what is received.
        exchanged_bytes: Payload of all-to-alls.
        calls: Collectives of one set of gradients; 0 for as many as the model has
            units.
        moved_bytes: Read and written to compress and to restore.
        flops: Of matrix products for it.
        kept_bytes: Held from step to step.
        working_bytes: Held while gradients are exchanged, beside them.
        hidden_share: Part of the exchange that may run while the backward does.
        whole_buckets: Whether gradients of all microbatches lie in the buckets.
    """

    reduced_bytes: float = 0.0
    gathered_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    calls: int = 0
    moved_bytes: float = 0.0
    flops: float = 0.0
    kept_bytes: float = 0.0
    working_bytes: float = 0.0
    hidden_share: float = 1.0
    whole_buckets: bool = False


def size_up(
    shapes: Sequence[tuple[int, ...]],
    how: GradientCompression,
    *,
    scalar_bytes: int = 4,
    bucket_bytes: int | None = None,
    ranks: int = 2,
) -> CompressedGradients:
    """Size up the gradients of a whole model.

    Args:
        shapes: Of trained parameters, in the model's order.
        how: What is done to gradients.
        scalar_bytes: Of a gradient before.
        bucket_bytes: Of gradients that are exchanged at once; None for torch's own.
        ranks: Replicas.
    """
    sizes = [math.prod(shape) for shape in shapes]
    scalars = float(sum(sizes))
    codec = read_method("gradient_compression", how)
    if not isinstance(codec, Codec):
        assert isinstance(codec, str)
        size = scalar_bytes if codec == "none" else dtype_bytes(codec)
        cast = codec != "none"
        return CompressedGradients(
            reduced_bytes=scalars * size,
            moved_bytes=_CAST_BYTES / 4 * scalar_bytes * scalars * cast,
            working_bytes=scalars * size * cast,
        )
    cut = cut_into_buckets([size * scalar_bytes for size in sizes], bucket_bytes)
    buckets = [[shapes[index] for index in bucket] for bucket in cut]
    largest = max((sum(sizes[i] for i in bucket) for bucket in cut), default=0)
    wire = codec.wire(buckets, ranks)
    temporary = codec.TEMPORARY * largest * scalar_bytes
    return CompressedGradients(
        reduced_bytes=float(wire.reduced),
        gathered_bytes=float(wire.gathered),
        exchanged_bytes=float(wire.exchanged),
        calls=len(buckets) * codec.CALLS,
        moved_bytes=codec.PASSES * scalars * scalar_bytes,
        flops=codec.product_flops(shapes),
        kept_bytes=float(codec.kept_bytes(buckets, ranks)),
        working_bytes=temporary + wire.gathered + wire.exchanged,
        hidden_share=1 / codec.CALLS,
        whole_buckets=True,
    )


def _by_rows(
    context: PricingContext, rows: ReplicaRows
) -> tuple[list[CompressedGradients], NDArray[np.int64]]:
    """Sizes for each distinct number of replicas, and which each row has. [n]."""
    shapes = [p.shape for p in context.graph.parameters if p.trainable]
    counts, which = np.unique(rows.copies, return_inverse=True)
    found = [
        size_up(
            shapes,
            rows.compression,
            scalar_bytes=dtype_bytes(context.precision.reduce),
            bucket_bytes=rows.bucket_bytes,
            ranks=int(count),
        )
        for count in counts
    ]
    return found, which


def compressed_bytes(
    context: PricingContext, rows: ReplicaRows
) -> tuple[Array, Array, bool]:
    """Memory that compression takes.

    Returns:
        Bytes held from step to step, and while gradients are exchanged, of shape [n];
        and whether its buckets hold the gradients of all microbatches.
    """
    found, which = _by_rows(context, rows)
    kept = np.array([one.kept_bytes for one in found])[which]
    working = np.array([one.working_bytes for one in found])[which]
    return kept, working, found[0].whole_buckets


def compressed_traffic(
    context: PricingContext, rows: ReplicaRows, replicate: Groups
) -> ReplicaTraffic:
    """Traffic of plain replicas whose gradients are made smaller. Shapes [n].

    Args:
        context: The request.
        rows: Of devices.
        replicate: All replicas.
    """
    found, which = _by_rows(context, rows)

    def column(name: str) -> Array:
        return np.array([float(getattr(one, name)) for one in found])[which]

    payload = {
        "all_reduce": column("reduced_bytes"),
        "all_gather": column("gathered_bytes"),
        "all_to_all": column("exchanged_bytes"),
    }
    kinds = sum((size > 0).astype(float) for size in payload.values())
    calls = np.where(column("calls") > 0, column("calls"), np.maximum(rows.units, 1.0))
    pieces = np.maximum(calls / np.maximum(kinds, 1.0), 1.0)
    known = context.cluster.document.collectives
    wire = np.zeros(len(which))
    for kind, size in payload.items():
        each = pieces * time_of(kind, size / pieces, replicate, known)
        wire = wire + np.where(size > 0, each, 0.0)
    ranks = replicate.size
    if not context.on_gpu:
        hops = 2 * (ranks - 1)
        one = context.recipe.collective_overhead_s + hops * context.core_wait_s
        wire = wire + calls * one
    device = context.slowest_device
    codec = column("moved_bytes") / device.memory_bandwidth_bytes_per_s
    codec = codec + column("flops") / peak_flops_per_s(device, "float32")
    share = column("hidden_share")
    # What a cast moves is so little that it hides along with its message.
    beside = np.where(column("whole_buckets") > 0, 0.0, codec)
    hidden = context.recipe.overlap * rows.backward_s if context.on_gpu else 0.0
    exposed = np.maximum(wire * share + beside - hidden, 0.0)
    others, none = (ranks - 1) / ranks, np.zeros(len(which))
    return ReplicaTraffic(
        exposed_s=exposed + wire * (1 - share) + codec - beside,
        gathered_bytes=payload["all_gather"],
        scattered_bytes=none,
        reduced_bytes=payload["all_reduce"],
        exchanged_bytes=payload["all_to_all"],
        sent_bytes=others
        * (2 * payload["all_reduce"] + payload["all_gather"] + payload["all_to_all"]),
    )
