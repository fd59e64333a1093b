"""Facts of a device that surfaces need beside their constants."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Chip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Rates of a device's datasheet.

    Attributes:
        peak_flops_per_s: Dense peak of the dtype that the kernels compute in.
        bandwidth_bytes_per_s: Of memory, reads plus writes.
        processors: Streaming multiprocessors or compute units.
        cache_bytes: Of the last level of cache.
    """

    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    processors: int
    cache_bytes: float
