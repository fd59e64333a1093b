"""Seconds of compute of every unit: of its kernels, or of the host that launches them.

A GPU works through a queue that its host fills, so that a unit takes as long as the
slower of the two, not each of its kernels. Blocks with experts empty the queue: the
host must know which tokens go where before it can launch what they go to. Around them
every block begins with an empty one, and is as slow as the slower of the two itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.combinations import Combinations
from planner.cost.compute import kernel_times
from planner.cost.recipes import Recipe
from planner.cost.setting import Setting
from planner.schema.cluster import DeviceType

__all__ = ["UnitCompute", "unit_compute"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCompute:
    """Seconds of one microbatch, T device types, C combinations, U units.

    Attributes:
        forward: Shape [T, C, U].
        backward: Shape [T, C, U].
        weight: Part of ``backward`` that makes weight gradients. Shape [T, C, U].
        selective: What selective recomputation runs again. Shape [T, C, U].
        busy: Forward and backward of a device's kernels alone, on the fastest device
            type, by block. Shape [C, classes].
    """

    forward: Array
    backward: Array
    weight: Array
    selective: Array
    busy: Array


def unit_compute(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> UnitCompute:
    """Price the compute of every unit under every combination.

    Args:
        setting: The request.
        classes: Distinct blocks.
        combos: Degrees and microbatches.
    """
    combos, which = combos.without_order()
    types = setting.cluster.device_types
    found = np.stack([_by_block(setting, classes, combos, one) for one in types], 1)
    _put_measured(found, classes, combos.microbatch / setting.graph.batch)
    forward, backward, weight, selective, *host = found[:, :, which]
    return UnitCompute(
        forward=_launched(setting.recipe, classes, forward, host[0]),
        backward=_launched(setting.recipe, classes, backward, host[1]),
        weight=weight @ classes.count,
        selective=selective @ classes.count,
        busy=(forward + backward).min(axis=0),
    )


def _by_block(
    setting: Setting, classes: BlockClasses, combos: Combinations, device: DeviceType
) -> Array:
    """Forward, backward, weight, selective, two of hosts. Shape [6, C, classes]."""
    table = classes.kernels
    member = np.zeros((len(table.owner), len(classes.blocks)))
    member[np.arange(len(table.owner)), table.owner] = 1.0
    times = kernel_times(
        table,
        device,
        setting.recipe,
        dtype=setting.operand_dtype,
        element=setting.element_ratio,
        tokens=combos.microbatch / setting.graph.batch,
        tp=combos.tp.astype(float),
        cp=combos.cp.astype(float),
        ep=combos.ep.astype(float),
        sequence_parallel=combos.sequence_parallel.astype(float),
        constants=setting.constants(device),
        causal=setting.graph.attention == "causal",
    )
    sharded = (table.style <= 2) * table.count
    slower = setting.recipe.sharded_op_overhead_s * (device.backend == "gloo")
    extra = np.where(combos.tp[:, None] > 1, sharded, 0.0) * slower
    parts = (
        times.forward + extra,
        times.backward + extra,
        times.weight,
        times.selective,
        np.broadcast_to(times.forward_host, times.forward.shape),
        np.broadcast_to(times.backward_host, times.forward.shape),
    )
    return np.stack([part @ member for part in parts])


def _launched(recipe: Recipe, classes: BlockClasses, busy: Array, host: Array) -> Array:
    """Seconds of units. Shape [T, C, U].

    Args:
        recipe: Of the framework.
        classes: Distinct blocks.
        busy: Seconds of a device's kernels. Shape [T, C, classes].
        host: Seconds in which its host launches them. Shape [T, C, classes].
    """
    routed = np.array([block.kind == "expert" for block in classes.blocks])
    busy = busy * np.where(routed, recipe.imbalance, 1.0)
    left = host * (1 - np.where(routed, recipe.captured_routing, recipe.captured))
    waits = (routed & (recipe.captured_routing < 1)) | recipe.blocking
    emptied = (classes.count * waits[:, None]).any(axis=0)
    each = np.where(waits, busy + left, np.maximum(busy, left)) @ classes.count
    queued = np.maximum(busy @ classes.count, left @ classes.count)
    return np.asarray(np.where(emptied, each, queued))


def _put_measured(found: Array, classes: BlockClasses, tokens: Array) -> None:
    """Blocks of unknown FLOPs take the times that a profile gave, on any device."""
    for index, block in enumerate(classes.blocks):
        if block.forward_flops or block.measured_forward_s is None:
            continue
        backward = block.measured_backward_s or 0.0
        weight = backward / 2 if block.parameter_count else 0.0
        times = (block.measured_forward_s, backward, weight, 0.0)
        for part, seconds in zip(found, times, strict=False):
            part[:, :, index] = seconds * tokens
