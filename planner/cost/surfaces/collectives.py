"""Time of collectives inside one host, or one domain of the same links, by size.

    t = (short^-4 + min(long, switched)^-4)^(-1/4)

NCCL chooses among protocols and algorithms by size; the fastest counts, rounded where
short and long cross. With n ranks, S bytes of the whole tensor, links of B bytes/s, and
``wire = passes (n - 1) / n S / B`` (two passes of an all-reduce, else one):

- short (protocols LL and LL128): ``start + rank (n - 1) + wire / share``;
- long (protocol Simple): with ``y = start + rank (n - 1)`` and
  ``x = wire / share + local S / B``, where ``local`` is what a rank copies within its
  memory, ``x + y + 2 pipelining sqrt(x y)``: cut into the best number of pieces, a
  tensor of x passes through a pipeline of y in ``(sqrt x + sqrt y)^2``;
- switched (NVLS, of all-reduces of more than two ranks): the switch adds, so that a
  rank sends S, and one n-th of the sum to all: ``start + (1 + 1 / n) S / B / share``.

Sources: NCCL, src/graph/tuning.cc, for what there is to choose from; Hockney's model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["COLLECTIVE_PASSES", "CollectiveConstants", "CollectiveSurface"]

Array = NDArray[np.float64]

#: How often a byte goes over a rank's link.
COLLECTIVE_PASSES = {
    "all_reduce": 2.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_to_all": 1.0,
}

#: Exponent of the rounding where two protocols cross.
_SHARPNESS = 4.0

#: Seconds that nothing is shorter than.
_INSTANT = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveConstants:
    """Constants of a device and a collective.

    Attributes:
        short_s: Seconds that the protocol of short messages takes to start.
        short_rank_s: What each further rank adds.
        short_share: Share of the link's bandwidth that it reaches.
        long_s: Seconds that the protocol of long messages takes to start.
        long_rank_s: What each further rank adds.
        share: Share of the link's bandwidth that it reaches; above 1 where what
            ``local`` takes is more than what passes the links, which run beside.
        local: Bandwidth of the link over that of copies within a rank's memory.
        pipelining: Share of the cost of cutting a tensor into pieces.
        crossing: Time over that of two ranks that a byte takes between more, less 1:
            devices on PCI Express that do not share a switch.
        switched_s: Seconds that sums in the switch take to start.
        switched_share: Share of the link's bandwidth that they reach; 0 without them.
    """

    short_s: float
    short_rank_s: float
    short_share: float
    long_s: float
    long_rank_s: float
    share: float
    local: float
    pipelining: float
    crossing: float = 0.0
    switched_s: float = 0.0
    switched_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSurface:
    """Seconds of a collective between devices.

    Attributes:
        constants: Fitted, to at most 8 ranks.
        kind: A key of :data:`COLLECTIVE_PASSES`.
    """

    constants: CollectiveConstants
    kind: str

    def seconds(
        self,
        size_bytes: ArrayLike,
        ranks: ArrayLike,
        bandwidth_bytes_per_s: ArrayLike,
    ) -> Array:
        """Seconds until the last rank holds its result.

        Args:
            size_bytes: Of the whole tensor: what a rank holds before all_reduce,
                reduce_scatter and all_to_all, and after all_gather.
            ranks: That take part.
            bandwidth_bytes_per_s: Of a rank's links in one direction. All of these
                broadcast to one shape.
        Returns:
            Of that shape; 0 for one rank.
        """
        c = self.constants
        size, n, rate = (
            np.asarray(x, float) for x in (size_bytes, ranks, bandwidth_bytes_per_s)
        )
        whole = size / rate
        wire = COLLECTIVE_PASSES[self.kind] * (n - 1) / np.maximum(n, 1) * whole
        wire = wire * np.where(n > 2, 1 + c.crossing, 1.0)
        short = c.short_s + c.short_rank_s * (n - 1) + wire / c.short_share
        fixed = c.long_s + c.long_rank_s * (n - 1)
        moved = wire / c.share + c.local * whole
        long = fixed + moved + 2 * c.pipelining * np.sqrt(fixed * moved)
        if c.switched_share:
            passed = (1 + 1 / np.maximum(n, 1)) * whole
            switched = c.switched_s + passed / c.switched_share
            long = np.where(n > 2, np.minimum(long, switched), long)
        shorter, longer = np.minimum(short, long), np.maximum(short, long)
        ratio = shorter / np.maximum(longer, _INSTANT)
        both = shorter * (1 + ratio**_SHARPNESS) ** (-1 / _SHARPNESS)
        return np.asarray(np.where(n > 1, both, 0.0))
