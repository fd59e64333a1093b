"""Time of fused attention by shape, forward.

    t = launch + ((compute x throttling)^q + memory^q)^(1/q)

A thread block computes some rows of queries of one head against all keys that they
see, ``2 x 2 x rows x (keys + ramp) x (head size + softmax) / rate``: ``softmax`` is the
head size in whose time the exponentials of a score are computed, ``ramp`` the keys in
whose time a block starts and ends. With x blocks a processor, ``compute`` is

- causal: ``x`` mean blocks and ``tail`` of the longest, no shorter than the longest:
  blocks of late queries take longest, and the last to start end last (Graham's bound);
- else waves of blocks, for the share ``whole_waves`` a whole number.

``throttling`` is ``1 + slowdown x d / (d + burst)`` as of products, and at least ``1 +
long_run`` in a run of seconds.

Sources: Dao 2023 (FlashAttention-2, arXiv:2307.08691), section 3; rows of a block by
kernel and head size: flash-attention 2.8, flash_fwd_launch_template.h and, of
FlashAttention-3, hopper/tile_size.h; those of Blackwell's kernels fit their tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.surfaces.chip import Chip

__all__ = ["AttentionConstants", "AttentionSurface"]

Array = NDArray[np.float64]

#: Rows of a block of queries up to a head size, by kernel, causal and not.
_ROWS: Mapping[str, tuple[tuple[tuple[float, float], ...], ...]] = {
    "fa2": (((256, 128),), ((256, 128),)),
    # Devices with less shared memory than A100's.
    "fa2_small": (((64, 128), (256, 64)), ((256, 128),)),
    "fa3": (((64, 192), (256, 128)), ((96, 192), (256, 128))),
    "fa4": (((256, 256),), ((256, 256),)),
    "trtllm": (((256, 128),), ((256, 128),)),
}

#: Head sizes are padded to multiples of it, by kernel.
_PADDED = {"fa2": 32.0, "fa2_small": 32.0, "fa3": 32.0, "fa4": 16.0, "trtllm": 16.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConstants:
    """Constants of a device and a kernel.

    Attributes:
        efficiency: Share of the peak that endless heads over endless keys reach.
        softmax: Head size that the exponentials of a score take the time of.
        ramp: Keys that a block's start and end take the time of.
        launch_s: Seconds of attention to nothing.
        memory: Share of the memory bandwidth.
        overlap: Exponent of the sum of compute and memory, at least 1.
        slowdown: Time at the clocks of a long run over that of a burst, less 1.
        burst_s: Seconds at the peak after which half of the slowdown is felt.
        tail: Share of the longest block that runs beside no other; of causal kernels.
        whole_waves: Share of the last wave's processors that wait for its end; of the
            others.
        wide: Time of heads of more than 128 over what their size says, less 1; of
            causal kernels, as tables of the others end at 80.
        long_run: Time of short kernels in a run of seconds over that in a burst, less
            1; of products, as no attention was measured so.
    """

    efficiency: float
    softmax: float
    ramp: float
    launch_s: float
    memory: float
    overlap: float
    slowdown: float
    burst_s: float
    tail: float = 0.0
    whole_waves: float = 0.0
    wide: float = 0.0
    long_run: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSurface:
    """Seconds of fused attention on a device.

    Attributes:
        constants: Fitted.
        chip: Of the device, at the peak of 16-bit products.
        kernel: ``fa2``, ``fa2_small``, ``fa3``, ``fa4`` or ``trtllm``: how many rows of
            queries a block has.
        causal: Whether queries see earlier keys alone.
    """

    constants: AttentionConstants
    chip: Chip
    kernel: str
    causal: bool

    def seconds(
        self,
        batch: ArrayLike,
        queries: ArrayLike,
        heads: ArrayLike,
        kv_heads: ArrayLike,
        head_size: ArrayLike,
        *,
        keys: ArrayLike | None = None,
        sustained: bool = True,
        cached: bool = False,
    ) -> Array:
        """Seconds of one forward kernel.

        Args:
            batch: Sequences.
            queries: Of a sequence.
            heads: Of queries.
            kv_heads: Of keys and values.
            head_size: Numbers of a head. All of these broadcast to one shape.
            keys: Of a sequence; as many as queries if None, and where it is causal.
            sustained: False for a burst on a cool device, as in the tables.
            cached: Whether keys and values are also written to a cache, as in the
                tables of causal attention, which are a server's.
        Returns:
            Of that shape.
        """
        b, q, h, kv, size = (
            np.asarray(x, float) for x in (batch, queries, heads, kv_heads, head_size)
        )
        seen = q if keys is None or self.causal else np.asarray(keys, float)
        c, chip = self.constants, self.chip
        scores = b * h * q * seen / (2.0 if self.causal else 1.0)
        work = 4.0 * scores * size / chip.peak_flops_per_s
        slower = c.slowdown * work / (work + c.burst_s)
        if sustained:
            slower = np.maximum(slower, c.long_run)
        compute = self._compute(b * h, q, seen, size) * (1 + slower)
        kept = 2.0 if cached else 1.0
        moved = 2 * b * size * (2 * h * q + 2 * kept * kv * seen)
        memory = moved / (chip.bandwidth_bytes_per_s * c.memory)
        compute = np.maximum(compute, work)
        longer = np.maximum(compute, memory)
        ratio = np.minimum(compute, memory) / longer
        return np.asarray(
            c.launch_s + longer * (1 + ratio**c.overlap) ** (1 / c.overlap)
        )

    def _compute(self, count: Array, queries: Array, keys: Array, size: Array) -> Array:
        """Seconds that the processors compute, at the clocks of a burst."""
        c, chip = self.constants, self.chip
        rows = self._rows(size)
        rate = chip.peak_flops_per_s / chip.processors * c.efficiency
        step = _PADDED[self.kernel]
        wide = np.where(size > 128, 1 + c.wide, 1.0)
        score = 4 * rows * (np.ceil(size / step) * step + c.softmax) / rate * wide
        blocks = np.ceil(queries / rows)
        each = count * blocks / chip.processors
        if not self.causal:
            waves = c.whole_waves * np.ceil(each) + (1 - c.whole_waves) * each
            return np.asarray(np.maximum(waves, 1.0) * score * (keys + c.ramp))
        longest = score * (blocks * rows + c.ramp)
        mean = score * ((blocks + 1) / 2 * rows + c.ramp)
        return np.asarray(np.maximum(longest, each * mean + c.tail * longest))

    def _rows(self, size: Array) -> Array:
        """Rows of a block of queries."""
        table = _ROWS[self.kernel][0 if self.causal else 1]
        most, rows = np.array(table).T
        place = np.minimum(np.searchsorted(most, size), len(rows) - 1)
        return np.asarray(rows[place])
