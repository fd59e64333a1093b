"""Seconds that units take to compute, by device type and combination.

A GPU works through a queue that its host fills, so that a unit takes as long as the
slower of the two, not each of its kernels. Blocks with experts empty the queue: the
host must know which tokens go where before it can launch what they go to. Around them
every block begins with an empty one, and is as slow as the slower of the two itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.kernels.blocks import KERNEL_KINDS, BlockClasses
from planner.cost.kernels.roofline import kernel_times
from planner.cost.kernels.shapes import Division, divide
from planner.cost.recipes import Recipe
from planner.schema.cluster import DeviceType

__all__ = ["UnitCompute", "unit_compute"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCompute:
    """Seconds of one microbatch, T device types, C combinations, U units.

    Attributes:
        forward: Seconds of the forward. Shape [T, C, U].
        backward: The same for the whole backward. Shape [T, C, U].
        weight: Part of ``backward`` that makes weight gradients. Shape [T, C, U].
        selective: What selective recomputation runs again. Shape [T, C, U].
        again: What full recomputation does. Shape [T, C, U].
        hooks: What hooks and collectives of a unit add to a microbatch where its host
            sets the pace. Shape [T, C, U].
        attention: Forward and backward of attention alone, on the fastest device type,
            by block. Shape [2, C, classes].
        scores: Attention scores of each kernel on a device. Shape [C, kernels].
    """

    forward: Array
    backward: Array
    weight: Array
    selective: Array
    again: Array
    hooks: Array
    attention: Array
    scores: Array


def unit_compute(
    context: PricingContext,
    classes: BlockClasses,
    combos: Combinations,
    *,
    ring: bool,
) -> UnitCompute:
    """Price the compute of every unit."""
    names = ("tp", "cp", "ep", "microbatch", "sequence_parallel")
    *degrees, microbatch, split = (getattr(combos, name) for name in names)
    table, tokens = classes.kernels, microbatch / context.graph.batch
    whole = classes.whole[table.owner]
    part = divide(table, tokens, degrees, split, ring=ring, whole=whole)
    found = _by_type(context, classes, part)
    _put_measured(found, classes, tokens)
    forward, backward, weight, selective, *more = found
    host, attention = more[:2], more[2:]
    types = context.cluster.device_types
    hooks = np.array([_hooks_s(context, device) for device in types])[:, None, None]
    always = _EACH_PASS / 2 * hooks
    passes = [
        [_launched(context.recipe, classes, busy, own, beside) for beside in besides]
        for busy, own, besides in (
            (forward, host[0], (0 * hooks, always, always + _GATHERED * hooks)),
            (backward, host[1], (0 * hooks, always, always + 2 * _GATHERED * hooks)),
        )
    ]
    return UnitCompute(
        forward=passes[0][1],
        backward=passes[1][1],
        again=passes[0][0],
        hooks=passes[0][2] - passes[0][1] + passes[1][2] - passes[1][1],
        weight=weight @ classes.count,
        selective=selective @ classes.count,
        attention=np.stack(attention).min(axis=1),
        scores=part.scores,
    )


def _by_type(context: PricingContext, classes: BlockClasses, part: Division) -> Array:
    """Figures of :func:`_by_block` in a mean step. Shape [8, T, C, classes].

    Where steps differ in the neurons that they compute, types of which all devices
    wait in the steps of all neurons keep the pace of those that they wait for.
    """
    types, synchronisation = (
        context.cluster.device_types,
        context.regime.synchronisation,
    )
    widths = synchronisation.widths
    if len(widths) == 1:
        return np.stack([_by_block(context, classes, part, one) for one in types], 1)
    means = []
    for share, width in widths:
        paces = context.paces(synchronisation.waiting if width == 1 else ())
        each = [_by_block(context, classes, part, types[pace], width) for pace in paces]
        means.append(share * np.stack(each, 1))
    return np.asarray(sum(means))


def _by_block(
    context: PricingContext,
    classes: BlockClasses,
    part: Division,
    device: DeviceType,
    width: float = 1.0,
) -> Array:
    """Forward, backward, weight, selective, two of hosts and of attention alone.

    Args:
        context: The request.
        classes: Distinct blocks.
        part: What of their kernels is a device's.
        device: Its type.
        width: Share of the neurons that are computed.

    Returns:
        Shape [8, C, classes].
    """
    table, recipe = classes.kernels, context.recipe
    reach = context.constants(device)
    times = kernel_times(
        table,
        part,
        device,
        recipe,
        reach,
        dtypes=(context.operand_dtype, context.activation_dtype),
        element=context.element_ratio,
        causal=context.graph.attention == "causal" or context.graph.causal,
    )
    sharded = (table.style <= 2) * table.count
    slower = recipe.sharded_op_overhead_s * (device.backend == "gloo")
    # What copies hold of a layer is a plain tensor.
    slower *= not context.regime.synchronisation.splits
    extra = np.where(part.tp > 1, sharded, 0.0) * slower
    attention = table.kind == KERNEL_KINDS.index("attention")
    parts = (
        times.forward + extra,
        times.backward + extra,
        times.weight,
        times.selective,
        np.broadcast_to(times.forward_host, times.forward.shape),
        np.broadcast_to(times.backward_host, times.forward.shape),
        times.forward * attention,
        times.backward * attention,
    )
    if width < 1:
        # Hosts launch as many kernels.
        share = np.where(table.style <= 2, width, 1.0)
        parts = tuple(
            one if index in (4, 5) else one * share for index, one in enumerate(parts)
        )
    return np.stack([one @ classes.members for one in parts])


#: Shares of the time of a unit's hooks and collectives that each microbatch takes, and
#: that a gather or a reduction takes: two in a backward under ZeRO 3, which sees all of
#: it in each microbatch. Of an H200's host, llama3.2-1b took 4 ms a unit with one
#: microbatch, and 0.8 ms with each further one (`python -m benchmarks.one_gpu`,
#: 2026-11-26).
_EACH_PASS, _GATHERED = 0.2, 0.8 / 3


def _hooks_s(context: PricingContext, device: DeviceType) -> float:
    """Host seconds of a unit's hooks and collectives, where it has any."""
    precision = context.precision
    if device.backend == "gloo" or precision.compute == precision.parameter:
        return 0.0
    recipe = context.recipe
    launch = recipe.launch * device.kernel_overhead_s
    return recipe.unit_launches * launch * context.constants(device).host_overhead


def _launched(
    recipe: Recipe, classes: BlockClasses, busy: Array, host: Array, hooks: Array
) -> Array:
    """Seconds of units. Shape [T, C, U].

    Args:
        recipe: Of the framework.
        classes: Distinct blocks.
        busy: Seconds of a device's kernels. Shape [T, C, classes].
        host: Seconds in which its host launches them. Shape [T, C, classes].
        hooks: Seconds that a unit takes its host beside. Shape [T, 1, 1].
    """
    routed = np.array([block.kind == "expert" for block in classes.blocks])
    busy = busy * np.where(routed, recipe.imbalance, 1.0)
    left = host * (1 - np.where(routed, recipe.captured_routing, recipe.captured))
    waits = (routed & (recipe.captured_routing < 1)) | recipe.blocking
    emptied = (classes.count * waits[:, None]).any(axis=0)
    each = np.where(waits, busy + left, np.maximum(busy, left)) @ classes.count
    queued = np.maximum(busy @ classes.count, left @ classes.count + hooks)
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
