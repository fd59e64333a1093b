"""Time of matrix products by shape.

    t = launch + (compute^q + memory^q)^(1/q)

``compute`` is that of the best choice of a tile and of how often the sum is split, and
no shorter than at the peak:

    waves x 2 x rows x columns x (k / splits + ramp) / rate x throttling + splits' cost

- ``rate`` of one processor is its share of the peak, times ``efficiency``, times
  ``area / (area + half_tile)``: small tiles read more for each FLOP.
- ``waves`` of x = tiles x splits / processors are at least 1, and for the share
  ``whole_waves`` a whole number: the last wave takes as long as a full one, as far as
  tiles are not handed out one by one.
- ``ramp`` is the inner length in whose time a tile fills and drains its pipeline.
- ``throttling`` is ``1 + slowdown x heat``: clocks boost until the power limit is felt.
  In a burst ``heat = d / (d + burst)`` of a product that takes d at its peak. A step
  lasts seconds, and what ran before has used the boost up: products that load all
  processors take at least ``1 + long_run`` times as long then.

``memory`` moves operands and result once; those that stay in cache between calls move
at ``1 + cache_gain`` times the bandwidth.

Sources: NVIDIA, Matrix Multiplication Background User's Guide, "Tile quantization" and
"Wave quantization"; Osama et al. 2023 (Stream-K, arXiv:2301.03598) for split sums. The
throttling is what the tables show: runs that were repeated for a second take 10 to 20 %
longer than bursts of the same products of 1e10 FLOPs and more, and no longer than
bursts that last milliseconds themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.surfaces.chip import Chip
from planner.simulate.compiled import compiled, inner

__all__ = ["ProductConstants", "ProductSurface"]

Array = NDArray[np.float64]

#: Rows and columns of tiles that libraries choose among.
_TILES = np.array(
    [
        (256.0, 256.0),
        (256.0, 128.0),
        (128.0, 256.0),
        (128.0, 128.0),
        (64.0, 256.0),
        (256.0, 64.0),
        (64.0, 128.0),
        (128.0, 64.0),
        (64.0, 64.0),
    ]
)

#: Into how many parts a sum may be split, as powers of 2 from 0.
_HALVINGS = 5

#: Share of its bytes, 4 a number, that writing parts of sums takes of the bandwidth:
#: they mostly stay in cache. Fitted for six devices it is 0 to .1, on H100 more.
_SPLIT_TRAFFIC = 0.1

#: Copies of the operands that were used in turn where the constants were measured.
_COPIES = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductConstants:
    """Constants of a device and a dtype.

    Attributes:
        efficiency: Share of the peak that endless products of endless tiles reach.
        ramp: Inner length that a tile's start and end take the time of.
        launch_s: Seconds of a product of nothing.
        memory: Share of the memory bandwidth.
        whole_waves: Share of the last wave's processors that wait for its end.
        half_tile: Area of a tile that reaches half of the rate.
        overlap: Exponent of the sum of compute and memory, at least 1, where they add
            up; endless where the longer hides the other.
        slowdown: Time at the clocks of a long run over that of a burst, less 1.
        split_s: Seconds that adding up the parts of a split sum takes.
        burst_s: Seconds at the peak after which half of the slowdown is felt.
        cache_gain: Bandwidth of the cache over that of memory, less 1.
        cache: Share of the cache that holds operands until the next call.
        long_run: Time of short products in a run of seconds over that in a burst,
            less 1.
        cast: Share of the memory bandwidth at which the first operand is cast from 2
            bytes; 0 where no cast was measured.
    """

    efficiency: float
    ramp: float
    launch_s: float
    memory: float
    whole_waves: float
    half_tile: float
    overlap: float
    slowdown: float
    split_s: float
    burst_s: float
    cache_gain: float = 0.0
    cache: float = 0.0
    long_run: float = 0.0
    cast: float = 0.0


#: Names of the constants, in the order in which compiled code takes them.
_CONSTANTS = tuple(one.name for one in fields(ProductConstants))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSurface:
    """Seconds of the products of a device in a dtype.

    Attributes:
        constants: Fitted.
        chip: Of the device, at the peak of the dtype.
        operand_bytes: Bytes of an element of the operands.
        result_bytes: Bytes of an element of the result.
    """

    constants: ProductConstants
    chip: Chip
    operand_bytes: float = 2.0
    result_bytes: float = 2.0

    def seconds(
        self,
        m: ArrayLike,
        n: ArrayLike,
        k: ArrayLike,
        batch: ArrayLike = 1.0,
        *,
        sustained: bool = True,
        cast: bool = False,
    ) -> Array:
        """Seconds of ``batch`` equal products of [m, k] by [k, n] in one kernel.

        The products of a backward pass are those of the transposed operands: the
        input's gradient is (m, k, n), the weight's (n, k, m).

        Args:
            m: Rows of the result.
            n: Columns of the result.
            k: Length of the sum.
            batch: How many. All four broadcast to one shape.
            sustained: False for a burst on a cool device, as in most tables.
            cast: Whether the product casts its first operand from 2 bytes before.
        Returns:
            Of that shape.
        """
        sizes = np.broadcast_arrays(*(np.asarray(x, float) for x in (m, n, k, batch)))
        flat = [np.ascontiguousarray(size).ravel() for size in sizes]
        constants = np.array([getattr(self.constants, name) for name in _CONSTANTS])
        if not sustained:
            constants[12] = 0.0
        found = np.empty(flat[0].size)
        rows, columns, length, count = flat
        _fill(constants, self.facts, rows, columns, length, count, _TILES, found)
        if cast and self.constants.cast:
            rate = self.chip.bandwidth_bytes_per_s * self.constants.cast
            found += (2.0 + self.operand_bytes) * rows * length * count / rate
        return found.reshape(sizes[0].shape)

    @property
    def facts(self) -> Array:
        """Facts of the device that compiled code takes. Shape [6]."""
        chip = self.chip
        return np.array(
            [
                chip.peak_flops_per_s,
                chip.bandwidth_bytes_per_s,
                chip.processors,
                chip.cache_bytes,
                self.operand_bytes,
                self.result_bytes,
            ]
        )


@inner
def _compute(
    c: Array, facts: Array, m: float, n: float, k: float, batch: float, tiles: Array
) -> float:
    """Seconds that the processors compute, by the best tile and split."""
    processors = facts[2]
    work = 2.0 * m * n * k * batch / facts[0]
    heat = work / (work + c[9])
    rate = facts[0] / processors * c[0]
    part = _SPLIT_TRAFFIC * 4.0 * m * n * batch / facts[1]
    best = np.inf
    for place in range(len(tiles)):
        high, wide = tiles[place, 0], tiles[place, 1]
        area = high * wide
        number = np.ceil(m / high) * np.ceil(n / wide) * batch
        flops = 2.0 * area * (area + c[5]) / area / rate
        splits = 1.0
        for halving in range(_HALVINGS):
            x = number * splits / processors
            waves = c[4] * np.ceil(x) + (1.0 - c[4]) * x if x > 1.0 else 1.0
            slower = 1.0 + max(c[7] * heat, c[12] * min(x, 1.0))
            found = waves * flops * (k / splits + c[1]) * slower
            if halving > 0:
                found += c[8] + splits * part
            best = min(best, found)
            splits *= 2.0
    return float(max(best, work))


@inner
def _moved(c: Array, facts: Array, read: float, written: float) -> float:
    """Seconds that memory takes for bytes read and written."""
    held = c[11] * facts[3] + 1.0
    hit = max(1.0 - _COPIES * read / held, 0.0)
    kept = max(1.0 - written / held, 0.0)
    gain = c[10] / (1.0 + c[10])
    moved = read * (1.0 - hit * gain) + written * (1.0 - kept * gain)
    return float(moved / (facts[1] * c[3]))


@compiled
def _fill(
    c: Array,
    facts: Array,
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    tiles: Array,
    found: Array,
) -> None:
    for row in range(len(m)):
        compute = _compute(c, facts, m[row], n[row], k[row], batch[row], tiles)
        read = facts[4] * (m[row] + n[row]) * k[row] * batch[row]
        memory = _moved(c, facts, read, facts[5] * m[row] * n[row] * batch[row])
        longer = max(compute, memory)
        ratio = min(compute, memory) / longer
        found[row] = c[2] + longer * (1.0 + ratio ** c[6]) ** (1.0 / c[6])
