"""What tensor parallelism moves, as the executors do it, and how long that takes.

A layer's region is entered and left. Whole streams are summed on leaving in forward, on
entering in backward. With sequence parallelism each of the four is a gather or a
scatter of the same bytes, and the stream is scattered before the first region (backward
gathers) and gathered after the last. An embedding's rows are summed in forward alone; a
head gathers logits in forward and sums its input's gradient in backward. Recomputation
enters all regions again, and leaves those after which the unit saves something.
Source: executors/strategies/tensor_parallel.py; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.collectives import Groups, time_of
from planner.cost.combinations import Combinations
from planner.cost.orders import Orders
from planner.cost.setting import Setting

__all__ = ["TP_KINDS", "TensorTraffic", "tensor_traffic"]

Array = NDArray[np.float64]

#: Kinds of call, order of the first axis of payloads.
TP_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTraffic:
    """Of every combination (C) and unit (U), one microbatch.

    Attributes:
        seconds: Half of what forward and backward take. Shape [C, U].
        again_s: What recomputation adds. Shape [C, U].
        sent: Bytes that leave a device in forward and backward. Shape [C, U].
        payload: Bytes by :data:`TP_KINDS`, then of forward and backward, or of what
            recomputation adds. Shape [3, 2, C, U].
    """

    seconds: Array
    again_s: Array
    sent: Array
    payload: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class _Calls:
    """Seconds of calls of one size under every combination."""

    setting: Setting
    groups: Groups
    wait: Array

    def of(self, kind: str, size: Array) -> Array:
        """Seconds of one call of ``size`` bytes. Shape [C]."""
        measured = self.setting.cluster.document.collectives
        return self.wait + time_of(kind, size, self.groups, measured)


def tensor_traffic(
    orders: Orders, classes: BlockClasses, combos: Combinations, scale: Array
) -> TensorTraffic:
    """Price the collectives of tensor parallelism.

    Args:
        orders: The request, and the orders that combinations refer to.
        classes: Distinct blocks.
        combos: Degrees.
        scale: Bytes of each combination's microbatch for one traced. Shape [C].
    """
    setting = orders.setting
    # Where all ranks are of one group they wait for nothing but each other.
    among = (combos.tp > 1) & (combos.tp < orders.lengths[combos.orders])
    hops = 2 * (combos.tp - 1)
    calls = _Calls(
        setting=setting,
        groups=orders.groups(combos.tp, np.ones_like(combos.tp), combos.orders),
        wait=np.where(among, hops * orders.core_waits_s[combos.orders], 0.0),
    )
    split = combos.sequence_parallel > 0
    narrow = np.where(classes.narrow[:, None], setting.gathered_share, 1.0).T
    seconds, again = _seconds(classes, calls, split, scale, narrow)
    payload = _payload(classes, split, narrow) * (scale * (combos.tp > 1))[:, None]
    exposed = 1 - setting.recipe.layer_overlap
    seconds, again = (part * exposed @ classes.count for part in (seconds, again))
    payload = payload @ classes.count
    for unit, stream in _ends(classes):
        size = stream * scale * split
        # One of the two in forward, one in backward.
        seconds[:, unit] += np.where(split, calls.of("all_gather", size), 0.0) / 2
        payload[1, 0, :, unit] += size * (combos.tp > 1)
    # A reduction is a scatter and a gather.
    moved = 2 * payload[0, 0] + payload[1, 0] + payload[2, 0]
    tp = combos.tp[:, None]
    return TensorTraffic(
        seconds=seconds, again_s=again, sent=moved * (tp - 1) / tp, payload=payload
    )


def _seconds(
    classes: BlockClasses,
    calls: _Calls,
    split: NDArray[np.bool_],
    scale: Array,
    narrow: Array,
) -> tuple[Array, Array]:
    """Seconds and those of recomputation. Shapes [C, classes].

    ``narrow`` is what gathers move of the bytes of a block's stream, forward and
    backward. Shape [2, classes].
    """
    seconds, again = np.zeros((2, len(scale), len(classes.blocks)))
    for index, block in enumerate(classes.blocks):
        number = block.tp_collectives
        if number:
            each = block.tp_collective_bytes / number
            plain, scatter = (calls.of(k, each * scale) for k in TP_KINDS[::2])
            gather, back = (
                calls.of("all_gather", each * scale * share)
                for share in narrow[:, index]
            )
            repeated = block.tp_again_bytes / each
            if block.kind == "embedding":
                seconds[:, index] = number * plain / 2
                again[:, index] = repeated * plain
            else:
                seconds[:, index] = number * np.where(
                    split, (gather + back) / 2 + scatter, plain
                )
                twice = number * gather + repeated * scatter
                again[:, index] = np.where(split, twice, repeated * plain)
        logits, entered = classes.gathered_bytes[index], classes.entered_bytes[index]
        if logits:
            seconds[:, index] += calls.of("all_gather", logits * scale) / 2
        if entered:
            seconds[:, index] += calls.of("all_reduce", entered * scale) / 2
    return seconds, again


def _payload(classes: BlockClasses, split: NDArray[np.bool_], narrow: Array) -> Array:
    """Bytes at the traced batch, by kind. Shape [3, 2, C, classes]."""
    embedding = np.array([block.kind == "embedding" for block in classes.blocks])
    total = classes.column("tp_collective_bytes")
    repeated = classes.column("tp_again_bytes")
    layers, again = np.where(embedding, 0.0, total), np.where(embedding, 0.0, repeated)
    rows = np.where(embedding, total, 0.0)
    divided = split[:, None].astype(float)
    first = rows + classes.entered_bytes + (1 - divided) * 2 * layers
    gathers = classes.gathered_bytes + divided * layers * narrow.sum(axis=0)
    return np.array(
        [
            [first, np.where(embedding, repeated, (1 - divided) * again)],
            [gathers, divided * layers * narrow[0]],
            [divided * 2 * layers, divided * again],
        ]
    )


def _ends(classes: BlockClasses) -> list[tuple[int, float]]:
    """First and last unit of the region, with the bytes of the stream there."""
    layers = np.array([block.kind != "embedding" for block in classes.blocks])
    total = (classes.column("tp_collective_bytes") * layers) @ classes.count
    number = (classes.column("tp_collectives") * layers) @ classes.count
    ends = (classes.region[0], classes.region[-1]) if classes.region else ()
    return [(unit, float(total[unit] / number[unit])) for unit in ends]
