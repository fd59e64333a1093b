"""Buckets of gradients: which parameters' gradients replicas exchange at once."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "bucket_limits", "cut_into_buckets"]

#: Sizes that torch's DistributedDataParallel closes buckets at: a small first one, so
#: that communication begins early. Source: torch.nn.parallel, torch 2.13.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20


def bucket_limits(bucket_bytes: int | None) -> tuple[int, int]:
    """Return the sizes at which the first bucket and the others are closed.

    Args:
        bucket_bytes: As ``overlap.bucket_bytes``; None for torch's own.
    """
    if bucket_bytes is None:
        return FIRST_BUCKET_BYTES, BUCKET_BYTES
    return bucket_bytes, bucket_bytes


def cut_into_buckets(
    sizes: Sequence[int], bucket_bytes: int | None
) -> tuple[tuple[int, ...], ...]:
    """Cut parameters into buckets, from the last one back, as backward reaches them.

    A bucket is closed once it is as large as its limit, so that every parameter is in
    one bucket alone. Planner and executors cut alike: bytes on the wire depend on it.

    Args:
        sizes: Bytes of the gradient of each trained parameter, in the model's order.
        bucket_bytes: As ``overlap.bucket_bytes``.

    Returns:
        Indexes of parameters, a tuple a bucket.
    """
    first, others = bucket_limits(bucket_bytes)
    found: list[tuple[int, ...]] = []
    bucket: list[int] = []
    held, limit = 0, first
    for index in reversed(range(len(sizes))):
        bucket.append(index)
        held += sizes[index]
        if held >= limit:
            found.append(tuple(bucket))
            bucket, held, limit = [], 0, others
    if bucket:
        found.append(tuple(bucket))
    return tuple(found)
