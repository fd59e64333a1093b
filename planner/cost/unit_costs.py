"""Cost of every pipeline unit under every combination of tp, cp, ep and microbatch.

These few combinations (hundreds) are priced once; a million strategies then look them
up. Expensive work is done per distinct block, of which a deep model has a handful.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.cost.classes import BlockClasses
from planner.cost.combinations import Combinations
from planner.cost.context_traffic import FORWARD_SHARE, context_traffic
from planner.cost.expert_traffic import expert_traffic, exposed_exchanges
from planner.cost.orders import Orders
from planner.cost.parameters import Ties
from planner.cost.setting import Setting
from planner.cost.tensor_traffic import tensor_traffic
from planner.cost.unit_compute import unit_compute
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


def _summed_parameters(
    setting: Setting, classes: BlockClasses, combos: Combinations
) -> Array:
    """Trained scalars that sequence parallelism computes on shards of. Shape [C, U]."""
    whole = setting.parameter_counts.trained[0, 0]
    inside = np.isin(np.arange(len(whole)), classes.region)
    split = (combos.sequence_parallel > 0) & (combos.tp > 1)
    return np.asarray(np.where(inside, whole, 0.0) * split[:, None])


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
    compute = unit_compute(setting, classes, combos)
    hidden = compute.busy * classes.has_attention
    tp = tensor_traffic(orders, classes, combos, scale)
    cp = context_traffic(context, orders, classes, combos, scale, hidden)
    ep = expert_traffic(orders, classes, combos, scale)
    kept, working = saved_bytes(setting, classes, combos, scale)
    saved = kept @ to_units
    repeated = _recomputed(setting)
    saved[2] = np.where(repeated, saved[2], saved[0])
    halves, output = between_halves(setting, classes, combos, scale)
    cut, shared = cut_bytes(setting, classes, combos, scale)
    return UnitCosts(
        forward_s=compute.forward,
        backward_s=compute.backward,
        weight_s=compute.weight,
        selective_s=compute.selective * repeated,
        full_s=compute.forward * repeated,
        tp_s=tp.seconds,
        tp_again_s=tp.again_s,
        cp_s=cp.seconds @ to_units,
        ep_s=exposed_exchanges(
            setting.recipe,
            ep.seconds @ to_units,
            compute.forward.min(axis=0),
            compute.backward.min(axis=0),
        ),
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
