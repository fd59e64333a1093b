"""Time of one rank's layer of experts, forward: routing, permutation, grouped products.

    t = launch + pairs x (pair_s + moves x hidden x bytes / bandwidth) + product(up)
        + product(down)

A pair is a token at one of its experts. The first product makes both halves of a gated
unit at once, [pairs, hidden] by [hidden, 2 x inter], the second [pairs, inter] by
[inter, hidden]; each has one matrix an expert. A grouped product takes ``(compute^q +
memory^q)^(1/q)``:

- ``compute``: rows padded to tiles, ``2 x rows x n x (k + ramp) / rate``, with the rate
  of the best tile, ``area / (area + half_tile)``;
- ``memory``: all weights of the rank, operands and result, once.

Rows of an expert are padded to whole tiles; where loads differ, to half a tile more on
average, and an expert that has any takes one tile at least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.surfaces.chip import Chip

__all__ = ["ExpertConstants", "ExpertSurface"]

Array = NDArray[np.float64]

#: Rows and columns of tiles that grouped products choose among.
_TILES = (
    (256.0, 128.0),
    (128.0, 256.0),
    (128.0, 128.0),
    (64.0, 256.0),
    (64.0, 128.0),
    (32.0, 128.0),
    (16.0, 128.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConstants:
    """Constants of a device and a dtype.

    Attributes:
        efficiency: Share of the peak that endless products of endless tiles reach.
        ramp: Inner length that a tile's start and end take the time of.
        half_tile: Area of a tile that reaches half of the rate.
        memory: Share of the memory bandwidth.
        overlap: Exponent of the sum of compute and memory.
        launch_s: Seconds of a layer of nothing.
        pair_s: Seconds of routing a token to one of its experts.
        moves: How often 2 bytes of each number of a pair's hidden state are moved
            beside the products.
        long_run: Time of products in a run of seconds over that in a burst, less 1; of
            dense products, as no layer of experts was measured so.
    """

    efficiency: float
    ramp: float
    half_tile: float
    memory: float
    overlap: float
    launch_s: float
    pair_s: float
    moves: float
    long_run: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSurface:
    """Seconds of layers of experts on a device.

    Attributes:
        constants: Fitted.
        chip: Of the device, at the peak of the dtype.
        operand_bytes: Bytes of an element of the operands.
    """

    constants: ExpertConstants
    chip: Chip
    operand_bytes: float = 2.0

    def seconds(
        self,
        pairs: ArrayLike,
        experts: ArrayLike,
        hidden: ArrayLike,
        inter: ArrayLike,
        *,
        gated: bool = True,
        uneven: bool = False,
        sustained: bool = True,
    ) -> Array:
        """Seconds of one rank's layer, without the exchange of tokens.

        Args:
            pairs: Tokens times their experts, of this rank.
            experts: Of this rank.
            hidden: Width of the stream.
            inter: Width inside an expert. All of these broadcast to one shape.
            gated: Whether an expert has three matrices, not two.
            uneven: Whether experts' loads differ.
            sustained: False for a burst on a cool device, as in the tables.
        Returns:
            Of that shape.
        """
        p, e, h, i = (np.asarray(x, float) for x in (pairs, experts, hidden, inter))
        c, chip = self.constants, self.chip
        wide = 2 * i if gated else i
        moved = p * h * 2 * c.moves / chip.bandwidth_bytes_per_s
        up = self.product(p, e, wide, h, uneven=uneven, sustained=sustained)
        down = self.product(p, e, h, i, uneven=uneven, sustained=sustained)
        return np.asarray(c.launch_s + p * c.pair_s + moved + up + down)

    def product(
        self,
        pairs: Array,
        experts: Array,
        n: Array,
        k: Array,
        *,
        uneven: bool = False,
        sustained: bool = True,
    ) -> Array:
        """Return the seconds of a grouped product of [pairs, k] with one [k, n] each.

        Args:
            pairs: Rows of all experts.
            experts: How many.
            n: Columns of the result.
            k: Length of the sum. All of these broadcast to one shape.
            uneven: As of :meth:`seconds`; likewise sustained.
        """
        c, chip = self.constants, self.chip
        work = 2 * pairs * n * k / chip.peak_flops_per_s
        slower = 1 + c.long_run if sustained else 1.0
        best = np.full(np.broadcast(pairs, experts, n, k).shape, np.inf)
        rate = chip.peak_flops_per_s * c.efficiency
        for high, wide in _TILES:
            area = high * wide
            rows = _padded(pairs / experts, high, uneven=uneven) * experts
            columns = np.ceil(n / wide) * wide
            spread = np.maximum(rows * columns / (area * chip.processors), 1.0)
            share = chip.processors * area * spread
            found = 2 * share * (k + c.ramp) * (1 + c.half_tile / area) / rate
            best = np.minimum(best, found)
        compute = np.maximum(best * slower, work)
        moved = self.operand_bytes * (experts * n * k + pairs * k) + 2 * pairs * n
        memory = moved / (chip.bandwidth_bytes_per_s * c.memory)
        longer = np.maximum(compute, memory)
        ratio = np.minimum(compute, memory) / longer
        return np.asarray(longer * (1 + ratio**c.overlap) ** (1 / c.overlap))


def _padded(rows: Array, high: float, *, uneven: bool) -> Array:
    """Rows of an expert with those that fill its tiles."""
    if not uneven:
        return np.asarray(np.ceil(rows / high) * high)
    return np.asarray(np.maximum(rows + high / 2, np.minimum(rows, 1.0) * high))
