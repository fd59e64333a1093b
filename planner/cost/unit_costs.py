"""Cost of every pipeline unit under every combination of tp, cp, ep and microbatch.

These few combinations (hundreds) are priced once; a million strategies then look them
up. Expensive work is done per distinct block, of which a deep model has a handful.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.collectives import Groups, time_of
from planner.cost.combinations import Combinations
from planner.cost.compute import kernel_times
from planner.cost.context_traffic import FORWARD_SHARE, context_traffic
from planner.cost.orders import Orders
from planner.cost.parameters import Ties
from planner.cost.recipes import Recipe
from planner.cost.setting import Setting
from planner.cost.tensor_traffic import tensor_traffic
from planner.cost.unit_memory import (
    between_halves,
    cut_bytes,
    parameters_of,
    saved_bytes,
    sent_bytes,
    transient_bytes,
)
from planner.schema.strategy import ContextAlgorithm

__all__ = ["Combinations", "UnitCosts", "price_units"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Per device type (T), combination (C) and unit (U); one microbatch.

    Attributes:
        forward_s: Kernels of one forward. Shape [T, C, U]; likewise backward_s.
        weight_s: Part of backward_s that makes weight gradients.
        selective_s: Run again under selective recomputation, on top of backward.
        full_s: The same under full recomputation (all of forward).
        tp_s: Exposed tp communication of one forward; backward has as much. [C, U].
        tp_again_s: What recomputation of either kind adds to it. Shape [C, U].
        cp_s: Exposed traffic of cp of one forward and backward. Shape [C, U].
        ep_s: Exposed all-to-all of one forward; backward has as much. [C, U].
        saved_bytes: Kept per microbatch in flight, by recompute kind. [3, C, U].
        transient_bytes: Working set beyond that, by recompute kind. [3, C, U].
        dense_parameters: Scalars on one device before ZeRO, without experts. [C, U].
        expert_parameters: Scalars of its experts, before ZeRO. Shape [C, U].
        trained_dense: Those of dense_parameters that have a gradient. [C, U]; likewise
            trained_experts.
        ties: Weights that several units read.
        tied_parameters: Scalars of each of them on one device. Shape [C, links];
            likewise tied_trained, of those that have a gradient.
        tensors: Trained parameter tensors, whatever their size. Shape [U].
        weight_grad_bytes: What a split backward keeps of one microbatch between its
            halves, beyond saved_bytes. Shape [C, U].
        output_bytes: What the model returns for one microbatch, where it ends in a
            head; 0 where that is not known. Shape [C].
        cut_bytes: Across the cut after each unit, per device. Shape [C, U - 1].
        sent_bytes: What each device sends of them. Shape [C, U - 1].
        shared_bytes: Those of them that the unit behind the cut saves as they come:
            all, but where sequence parallelism begins. Shape [C, U - 1].
        tp_bytes: Sent by one device for tp in forward and backward. [C, U]; also
            cp_bytes, ep_bytes.
        tp_payload: Payload of tp's collectives, as in
            :class:`planner.cost.tensor_traffic.TensorTraffic`. Shape [3, 2, C, U].
        summed_parameters: Trained scalars, whole on every tp rank, whose gradients tp
            sums up once a step. Shape [C, U].
        ep_payload: Payload of one of a forward's two all-to-alls. Shape [C, U].
        cp_payload: Payload of all of a forward's all-to-alls of cp. Shape [C, U].
        cp_forward: Share of cp_s that is the forward's.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    selective_s: Array
    full_s: Array
    tp_s: Array
    tp_again_s: Array
    cp_s: Array
    ep_s: Array
    saved_bytes: Array
    transient_bytes: Array
    dense_parameters: Array
    expert_parameters: Array
    trained_dense: Array
    trained_experts: Array
    ties: Ties
    tied_parameters: Array
    tied_trained: Array
    tensors: Array
    weight_grad_bytes: Array
    output_bytes: Array
    cut_bytes: Array
    sent_bytes: Array
    shared_bytes: Array
    tp_bytes: Array
    cp_bytes: Array
    ep_bytes: Array
    tp_payload: Array
    summed_parameters: Array
    ep_payload: Array
    cp_payload: Array
    cp_forward: float


def _compute(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> tuple[Array, ...]:
    """Forward, backward, weight and selective seconds. Shapes [T, C, classes]."""
    combos, which = combos.without_order()
    table = classes.kernels
    member = np.zeros((len(table.owner), len(classes.blocks)))
    member[np.arange(len(table.owner)), table.owner] = 1.0
    routed = np.array([block.kind == "expert" for block in classes.blocks])

    def launched(busy: Array, host: Array) -> Array:
        # Which tokens go where must be known on the host before experts are launched.
        waits = routed | setting.recipe.blocking
        return np.where(waits, busy + host, np.maximum(busy, host))

    parts = []
    for device in setting.cluster.device_types:
        times = kernel_times(
            table,
            device,
            setting.recipe,
            dtype=setting.product_dtype or setting.precision.compute,
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
        parts.append(
            (
                launched((times.forward + extra) @ member, times.forward_host @ member),
                launched(
                    (times.backward + extra) @ member, times.backward_host @ member
                ),
                times.weight @ member,
                times.selective @ member,
            )
        )
    found = tuple(np.stack(part) for part in zip(*parts, strict=True))
    _put_measured(found, classes, combos.microbatch / setting.graph.batch)
    return tuple(part[:, which] for part in found)


def _put_measured(
    found: tuple[Array, ...], classes: BlockClasses, tokens: Array
) -> None:
    """Blocks of unknown FLOPs take the times that a profile gave, on any device."""
    for index, block in enumerate(classes.blocks):
        if block.forward_flops or block.measured_forward_s is None:
            continue
        backward = block.measured_backward_s or 0.0
        weight = backward / 2 if block.parameter_count else 0.0
        times = (block.measured_forward_s, backward, weight, 0.0)
        for part, seconds in zip(found, times, strict=True):
            part[:, :, index] = seconds * tokens


def _summed_parameters(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> Array:
    """Trained scalars that sequence parallelism computes on shards of. Shape [C, U]."""
    whole = setting.parameter_counts.trained[0, 0]
    inside = np.isin(np.arange(len(whole)), classes.region)
    split = (combos.sequence_parallel > 0) & (combos.tp > 1)
    return np.asarray(np.where(inside, whole, 0.0) * split[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    seconds: Array
    sent: Array
    payload: Array


#: Links that carry less than this share of what those inside a host do are outside.
_OUTSIDE = 0.5


def _once_a_host(groups: Groups, recipe: Recipe) -> Groups:
    """Groups whose slower levels carry the recipe's share of what is routed."""
    inner = groups.bandwidth[:, :1]
    slower = (groups.bandwidth < _OUTSIDE * inner) & (groups.members > 1)
    share = np.where(slower, recipe.routed_share, 1.0)
    return replace(groups, bandwidth=groups.bandwidth / share)


def _ep_traffic(
    orders: Orders, classes: BlockClasses, combos: Combinations, scale: Array
) -> _Traffic:
    """Tokens sent to their experts and back: two all-to-alls a forward."""
    setting = orders.setting
    found = orders.groups(combos.ep, combos.tp, combos.orders)
    groups = _once_a_host(found, setting.recipe)
    exposed = 1 - setting.recipe.expert_overlap
    routed = classes.column("expert_bytes")
    seconds = np.zeros((len(combos), len(routed)))
    measured = setting.cluster.document.collectives
    stream = np.where(combos.sequence_parallel > 0, combos.tp, 1)
    for index, total in enumerate(routed):
        if total:
            one = time_of("all_to_all", total * scale / stream, groups, measured)
            seconds[:, index] = 2 * one * exposed
    share = (combos.ep - 1) / combos.ep
    payload = routed * (scale / stream * (combos.ep > 1))[:, None]
    return _Traffic(seconds=seconds, sent=4 * payload * share[:, None], payload=payload)


def _recomputed(setting: Setting) -> NDArray[np.bool_]:
    """Units that full recomputation covers. Shape [U]."""
    graph = setting.graph
    return np.array(
        [
            setting.recipe.recompute_ends
            or not {block.kind for block in graph.blocks[a:b]} & {"embedding", "head"}
            for a, b in graph.units
        ]
    )


def _parameters(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` that count scalars of weights."""
    parameters = setting.parameter_counts
    dense, expert = parameters_of(parameters.scalars, combos)
    trained_dense, trained_experts = parameters_of(parameters.trained, combos)
    ties = parameters.ties
    ways = np.where(ties.split[None, :] > 0, combos.tp[:, None], 1)
    return {
        "dense_parameters": dense,
        "expert_parameters": expert,
        "trained_dense": trained_dense,
        "trained_experts": trained_experts,
        "tied_parameters": ties.scalars / ways,
        "tied_trained": ties.trained / ways,
        "tensors": parameters.tensors,
        "summed_parameters": _summed_parameters(setting, classes, combos),
    }


def price_units(
    setting: Setting,
    combos: Combinations,
    orders: Orders | None = None,
    *,
    context: ContextAlgorithm = "ring",
) -> UnitCosts:
    """Price every unit under every combination.

    Args:
        setting: The request.
        combos: Degrees and microbatches.
        orders: What ``combos.order`` refers to; None for the setting's own.
        context: How attention sees a sequence that cp divides.
    """
    graph = setting.graph
    orders = orders or Orders.of(setting)
    classes = setting.classes
    to_units = classes.count
    scale = combos.microbatch / graph.batch / combos.cp
    scale = scale * setting.element_ratio
    forward, backward, weight, selective = _compute(setting, classes, combos)
    hidden = (forward.min(axis=0) + backward.min(axis=0)) * classes.has_attention
    tp = tensor_traffic(orders, classes, combos, scale)
    cp = context_traffic(context, orders, classes, combos, scale, hidden)
    ep = _ep_traffic(orders, classes, combos, scale)
    kept, working = saved_bytes(setting, classes, combos, scale)
    saved = kept @ to_units
    repeated = _recomputed(setting)
    saved[2] = np.where(repeated, saved[2], saved[0])
    halves, output = between_halves(setting, classes, combos, scale)
    cut, shared = cut_bytes(setting, classes, combos, scale)
    return UnitCosts(
        forward_s=forward @ to_units,
        backward_s=backward @ to_units,
        weight_s=weight @ to_units,
        selective_s=selective @ to_units * repeated,
        full_s=forward @ to_units * repeated,
        tp_s=tp.seconds,
        tp_again_s=tp.again_s,
        cp_s=cp.seconds @ to_units,
        ep_s=ep.seconds @ to_units,
        saved_bytes=saved,
        transient_bytes=transient_bytes(saved, working, to_units, repeated),
        weight_grad_bytes=halves,
        output_bytes=output,
        cut_bytes=cut,
        sent_bytes=sent_bytes(setting, combos, cut),
        shared_bytes=shared,
        tp_bytes=tp.sent,
        cp_bytes=cp.sent @ to_units,
        ep_bytes=ep.sent @ to_units,
        tp_payload=tp.payload,
        ep_payload=ep.payload @ to_units,
        cp_payload=cp.payload @ to_units,
        cp_forward=FORWARD_SHARE[context],
        ties=setting.parameter_counts.ties,
        **_parameters(setting, classes, combos),
    )
