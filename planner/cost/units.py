"""Cost of every pipeline unit under every combination of tp, cp, ep and microbatch.

These few combinations (hundreds) are priced once; a million strategies then look them
up. Expensive work is done per distinct block, of which a deep model has a handful.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Combinations, PricingContext
from planner.cost.kept_columns import KeptColumns
from planner.cost.kernels.blocks import BlockClasses, Ties
from planner.cost.traffic.collectives import LayerLines
from planner.cost.traffic.layers import (
    FORWARD_SHARE,
    context_traffic,
    expert_payload,
    expert_traffic,
    exposed_exchanges,
    tensor_traffic,
)
from planner.cost.unit_compute import unit_compute
from planner.cost.unit_memory import (
    alone_bytes_of,
    between_halves,
    cast_bytes_of,
    loss_bytes_of,
    saved_bytes_of,
    transient_bytes_of,
    whole_bytes_of,
)
from planner.graph import ModelGraph
from planner.graph.memo import once_per_graph
from planner.schema.strategy_parts import ContextAlgorithm

__all__ = ["UnitCosts", "price_units"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


def _cut_bytes(
    context: PricingContext, classes: BlockClasses, combos: Combinations, scale: Array
) -> tuple[Array, Array]:
    """Bytes at the cut after each unit but the last, and those saved as they come.

    Sequence parallelism sends shards between the units that it divides the stream of.
    The first of them takes a part of its own of what comes whole.

    Returns:
        Shapes [C, U - 1] each.
    """
    split = ((combos.sequence_parallel > 0) & (combos.tp > 1))[:, None]
    after = np.arange(1, len(context.graph.units))
    within = np.isin(after, classes.region[1:])
    entry = np.isin(after, classes.region[:1])
    ways = np.where(split & within, combos.tp[:, None], 1)
    cut = np.asarray(context.graph.cut_bytes * scale[:, None] / ways)
    return cut, np.where(split & entry, 0.0, cut)


def _sent_bytes(context: PricingContext, combos: Combinations, cut: Array) -> Array:
    """Bytes that one device sends at each cut. Shape [C, U - 1].

    Every tp rank has all of a stream that is not divided. Source: Narayanan et al.
    2021, section 4.1, "Scatter/gather communication optimization".
    """
    chosen = context.regime.communication.boundary == "scattered"
    if not (context.recipe.scattered_transfers or chosen):
        return cut
    whole = combos.sequence_parallel == 0
    return cut / np.where(whole, combos.tp, 1)[:, None]


def _gathered_cuts(
    context: PricingContext, combos: Combinations, cut: Array, lines: Array
) -> tuple[Array, Array]:
    """Bytes and seconds of putting together what crosses each cut in parts.

    The gathers of transfers that a framework scatters by itself are in its constants.

    Args:
        context: The request.
        combos: Degrees.
        cut: Bytes across cuts. Shape [C, U - 1].
        lines: Of tp's all-gather. Shape [C, 2, 2].
    Returns:
        Shapes [C, U - 1].
    """
    if context.regime.communication.boundary == "direct":
        return np.zeros_like(cut), np.zeros_like(cut)
    parts = ((combos.sequence_parallel == 0) & (combos.tp > 1))[:, None]
    both = lines[:, :, 0, None] + lines[:, :, 1, None] * cut[:, None]
    return np.where(parts, cut, 0.0), np.where(parts, both.min(axis=1), 0.0)


def _parameters_of(whole: Array, combos: Combinations) -> tuple[Array, Array]:
    """Dense and expert scalars per device before ZeRO. Shapes [C, U].

    Args:
        whole: By [of experts, dimensions that tp splits, unit]. Shape [2, 3, U].
        combos: Degrees.
    """
    tp, ep = combos.tp[:, None], combos.ep[:, None]
    dense, expert = (one[0] + one[1] / tp + one[2] / tp**2 for one in whole)
    return dense, expert / ep


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCosts:
    """Per device type (T), combination (C) and unit (U); one microbatch.

    Attributes:
        forward_s: Kernels of one forward. Shape [T, C, U]; likewise backward_s.
        weight_s: Part of backward_s that makes weight gradients.
        selective_s: Run again under selective recomputation, on top of backward.
        full_s: The same under full recomputation (all of forward).
        hooks_s: Added by the host's work for gathers and reductions, wherever a
            microbatch has them. Shape [T, C, U].
        tp_s: Exposed tp communication of one forward; backward has as much. [C, U].
        tp_again_s: What recomputation of either kind adds to it. Shape [C, U].
        cp_s: Exposed traffic of cp of one forward and backward. Shape [C, U].
        ep_s: Exposed all-to-all of one forward; backward has as much. [C, U].
        saved_bytes: Kept per microbatch in flight, by recompute kind. [3, C, U].
        offloaded_bytes: Saved, but kept in the host's memory, likewise.
        transient_bytes: Working set beyond that, by recompute kind. [3, C, U].
        whole_bytes: Most that a device with all units needs beyond what they have all
            saved, and that the first two units need, with what they have saved; by
            :data:`planner.cost.table.peak.IN_FLIGHT` and recompute kind. Shape [2, 4,
            3, C].
        alone_bytes: Cast weights, gradients and working set of a device with whole
            weights, see :func:`planner.cost.unit_memory.alone_bytes_of`, then of one
            that casts them itself. Shape [2, 3, 3, C].
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
        gathered_bytes: What tp ranks behind the cut gather of them, which each got a
            part of; as much in backward before it. Shape [C, U - 1].
        gather_s: Seconds of one of the two. Shape [C, U - 1].
        shared_bytes: Those of them that the unit behind the cut saves as they come:
            all, but where sequence parallelism begins. Shape [C, U - 1].
        tp_bytes: Sent by one device for tp in forward and backward. [C, U]; also
            cp_bytes, ep_bytes.
        tp_payload: Payload of tp's collectives, as in
            :class:`planner.cost.traffic.layers.TensorTraffic`. Shape [3, 2, C, U].
        summed_parameters: Trained scalars, whole on every tp rank, whose gradients tp
            sums up once a step: dense ones, then experts. Shape [2, C, U].
        ep_payload: Payload of one of a forward's two all-to-alls. Shape [C, U].
        cp_payload: Payload of all of a forward's all-to-alls of cp. Shape [C, U].
        cp_forward: Share of cp_s that is the forward's.
    """

    forward_s: Array
    backward_s: Array
    weight_s: Array
    selective_s: Array
    full_s: Array
    hooks_s: Array
    tp_s: Array
    tp_again_s: Array
    cp_s: Array
    ep_s: Array
    saved_bytes: Array
    offloaded_bytes: Array
    transient_bytes: Array
    whole_bytes: Array
    alone_bytes: Array
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
    gathered_bytes: Array
    gather_s: Array
    shared_bytes: Array
    tp_bytes: Array
    cp_bytes: Array
    ep_bytes: Array
    tp_payload: Array
    summed_parameters: Array
    ep_payload: Array
    cp_payload: Array
    cp_forward: float

    @property
    def reduced_last(self) -> Array:
        """Trained scalars of the first unit that no other unit reads. Shape [C]."""
        found = self.trained_dense[:, 0] + self.trained_experts[:, 0]
        tied = self.tied_trained[:, self.ties.first == 0].sum(axis=1)
        return np.asarray(found - tied)


def _summed_parameters(
    context: PricingContext, classes: BlockClasses, combos: Combinations
) -> Array:
    """Trained scalars that sequence parallelism computes on shards of. [2, C, U]."""
    whole = context.facts.parameter_counts.trained[:, 0]
    inside = np.isin(np.arange(whole.shape[1]), classes.region)
    split = ((combos.sequence_parallel > 0) & (combos.tp > 1))[:, None]
    # Each tp rank has other experts where ep divides them.
    held = np.stack([np.ones_like(split), combos.ep[:, None] == 1])
    return np.asarray((whole * inside)[:, None] * held * split)


@once_per_graph
def _recomputed(graph: ModelGraph, ends: bool) -> NDArray[np.bool_]:
    """Units that full recomputation covers, and with ``ends`` all. Shape [U]."""
    return np.array(
        [
            ends
            or not {block.kind for block in graph.blocks[a:b]} & {"embedding", "head"}
            for a, b in graph.units
        ]
    )


def _parameters(
    context: PricingContext, classes: BlockClasses, combos: Combinations
) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` that count scalars of weights."""
    parameters = context.facts.parameter_counts
    dense, expert = _parameters_of(parameters.scalars, combos)
    trained_dense, trained_experts = _parameters_of(parameters.trained, combos)
    ties = parameters.ties
    ways = np.where(ties.split[None, :] > 0, combos.tp[:, None], 1)
    return {
        "dense_parameters": dense,
        "expert_parameters": expert,
        "trained_dense": trained_dense,
        "trained_experts": trained_experts,
        "tied_parameters": ties.scalars / ways,
        "tied_trained": ties.trained / ways,
        "summed_parameters": _summed_parameters(context, classes, combos),
    }


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request under combinations of degrees, as every part of a price needs it.

    Attributes:
        context: The request.
        combos: Degrees and microbatches.
        scale: Elements on one device over those of the traced batch. Shape [C].
        repeated: Units that full recomputation covers. Shape [U].
    """

    context: PricingContext
    combos: Combinations
    scale: Array
    repeated: NDArray[np.bool_]

    @property
    def classes(self) -> BlockClasses:
        """Distinct blocks of the model."""
        return self.context.facts.classes


def _kept(asked: _Asked, scores: Array, routed: Array) -> tuple[Array, Array, Array]:
    """Count the bytes that units keep for backward, and need while they compute.

    Args:
        asked: The request.
        scores: Attention scores of each kernel on a device. Shape [C, kernels].
        routed: Bytes that experts have sent back. Shape [C, U].
    Returns:
        Bytes of one microbatch by recompute kind: saved on the device, saved in the
        host's memory, and the working set beyond that. Shapes [3, C, U].
    """
    context, combos, scale = asked.context, asked.combos, asked.scale
    classes, repeated = asked.classes, asked.repeated
    to_units = classes.count
    kept, working = saved_bytes_of(context, classes, combos, scale, scores)
    saved = kept @ to_units
    # What experts have sent back is weighted, in forward and in backward.
    saved[0] += routed
    saved[2] = np.where(repeated, saved[2], saved[0])
    transient = transient_bytes_of(saved, working, to_units, repeated)
    if not context.regime.offload.activations:
        return saved, np.zeros_like(saved), transient
    # It is fetched when its unit's backward begins, and is there until that ends.
    # The loss keeps logits outside of the unit that makes them.
    loss = loss_bytes_of(context, classes, combos, scale) @ to_units
    offloaded = np.where(repeated, np.maximum(saved - loss, 0.0), 0.0)
    return saved - offloaded, offloaded, transient + offloaded


def _activations(
    asked: _Asked, parameters: dict[str, Array], scores: Array, routed: Array
) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` that count bytes which one microbatch takes.

    Args:
        asked: The request.
        parameters: From :func:`_parameters`.
        scores: As for :func:`_kept`.
        routed: Likewise.
    """
    context, combos, classes = asked.context, asked.combos, asked.classes
    saved, offloaded, transient = _kept(asked, scores, routed)
    halves, output = between_halves(context, classes, combos, asked.scale)
    logits = classes.loss_bytes * classes.activation_scale(asked.scale, combos.cp)
    logits = logits @ classes.count
    if context.regime.loss_chunks > 1:
        # The gradient of a head's weights is added up; the model puts out a number.
        trained = parameters["trained_dense"] * _with_heads(classes)
        transient = transient + context.scalar_bytes.compute * trained
        output = np.zeros_like(output)
    whole = whole_bytes_of(
        context, saved, transient, parameters, logits, combos.ep[:, None] > 1
    )
    alone = [
        each(context, saved, transient, parameters, logits)
        for each in (alone_bytes_of, cast_bytes_of)
    ]
    return {
        "saved_bytes": saved,
        "offloaded_bytes": offloaded,
        "transient_bytes": transient,
        "whole_bytes": whole,
        "alone_bytes": np.stack(alone),
        "weight_grad_bytes": halves,
        "output_bytes": output,
    }


def _crossing(asked: _Asked, lines: LayerLines) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` of the traffic over cuts between units.

    Args:
        asked: The request.
        lines: Of the collectives of its combinations.
    """
    context, combos = asked.context, asked.combos
    cut, shared = _cut_bytes(context, asked.classes, combos, asked.scale)
    sent = _sent_bytes(context, combos, cut)
    gathered, gather_s = _gathered_cuts(context, combos, cut, lines.tp["all_gather"])
    # A stage keeps the part that it received; what it puts together if it saves that.
    cut = np.where(gathered > 0, sent, cut)
    shared = np.where(gathered > 0, 0.0, shared)
    if context.regime.offload.activations:
        # A stage's buffer of what it received is its own.
        shared = np.where(asked.repeated[1:], 0.0, shared)
    return {
        "cut_bytes": cut,
        "sent_bytes": sent,
        "gathered_bytes": gathered,
        "gather_s": gather_s,
        "shared_bytes": shared,
    }


def _traffic(
    asked: _Asked,
    lines: LayerLines,
    algorithm: ContextAlgorithm,
    own: dict[str, Array],
) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` of the collectives of tp, cp and ep.

    Args:
        asked: The request.
        lines: Of the collectives of its combinations.
        algorithm: How attention sees a sequence that cp divides.
        own: From :func:`_without_links`.
    """
    context, combos = asked.context, asked.combos
    classes = asked.classes
    experts = expert_traffic(
        context, classes, combos, lines.ep["all_to_all"], asked.scale
    )
    tp = tensor_traffic(context, classes, combos, lines.tp, asked.scale)
    cp = context_traffic(
        algorithm, context, classes, combos, lines.cp, asked.scale, own["attention"]
    )
    ep_s = exposed_exchanges(
        context.recipe,
        classes.per_unit(experts.seconds),
        own["forward_s"].min(axis=0),
        own["backward_s"].min(axis=0),
    )
    return {
        "tp_s": tp.seconds,
        "tp_again_s": tp.again_s,
        "cp_s": classes.per_unit(cp.seconds),
        "ep_s": ep_s,
        "tp_bytes": tp.sent,
        "cp_bytes": classes.per_unit(cp.sent),
        "ep_bytes": classes.per_unit(experts.sent),
        "tp_payload": tp.payload,
        "ep_payload": classes.per_unit(experts.payload),
        "cp_payload": classes.per_unit(cp.payload),
    }


def _with_heads(classes: BlockClasses) -> NDArray[np.bool_]:
    """Units that have a head. Shape [U]."""
    heads = np.array([block.kind == "head" for block in classes.blocks])
    return np.asarray(heads @ classes.count > 0)


def price_units(
    context: PricingContext,
    combos: Combinations,
    lines: LayerLines,
    *,
    context_algorithm: ContextAlgorithm = "ring",
) -> UnitCosts:
    """Price every unit under every combination.

    Args:
        context: The request.
        combos: Degrees and microbatches.
        lines: Of their collectives, see :meth:`PricingContext.layer_lines`.
        context_algorithm: How attention sees a sequence that cp divides.
    """
    if context.graph.spatial:
        context_algorithm = "halo"
    ring = context_algorithm == "ring"
    columns = {name: getattr(combos, name) for name in _DEGREES}

    def price(rows: Index) -> dict[str, Array]:
        some = {name: column[rows] for name, column in columns.items()}
        return _without_links(_asked(context, Combinations(**some)), ring=ring)

    kept = context.kept_columns.setdefault(f"units, {ring=}", KeptColumns(_AXES))
    own = kept.look_up(tuple(columns.values()), price)
    asked = _asked(context, combos)
    counts = context.facts.parameter_counts
    traffic = _traffic(asked, lines, context_algorithm, own)
    del own["attention"]
    costs = UnitCosts(
        cp_forward=FORWARD_SHARE[context_algorithm],
        ties=counts.ties,
        tensors=counts.tensors,
        **own,
        **_crossing(asked, lines),
        **traffic,
    )
    return costs if combos.depth is None else _skipping(costs, context, combos.depth)


def _asked(context: PricingContext, combos: Combinations) -> _Asked:
    scale = combos.microbatch / context.graph.batch / combos.cp
    ends = context.recipe.recompute_ends
    repeated = _recomputed(context.graph, ends)
    return _Asked(context, combos, scale * context.element_ratio, repeated)


def _without_links(asked: _Asked, *, ring: bool) -> dict[str, Array]:
    """Fields of :class:`UnitCosts` that depend on no link, and seconds of attention."""
    context, combos, classes = asked.context, asked.combos, asked.classes
    compute = unit_compute(context, classes, combos, ring=ring)
    if context.regime.loss_chunks > 1:
        # Logits are computed once more.
        again = compute.again * _with_heads(classes)
        compute = replace(compute, backward=compute.backward + again)
    parameters = _parameters(context, classes, combos)
    routed = expert_payload(classes, combos, asked.scale) @ classes.count
    return {
        "forward_s": compute.forward,
        "backward_s": compute.backward,
        "weight_s": compute.weight,
        "selective_s": compute.selective * asked.repeated,
        "full_s": compute.again * asked.repeated,
        "hooks_s": compute.hooks,
        "attention": compute.attention,
        **parameters,
        **_activations(asked, parameters, compute.scores, routed),
    }


#: Columns of a combination that anything but links depends on.
_DEGREES = ("tp", "cp", "ep", "microbatch", "sequence_parallel")
#: Axis of combinations in what :func:`_without_links` returns.
_AXES = {
    **dict.fromkeys(("whole_bytes", "alone_bytes"), -1),
    **dict.fromkeys(("output_bytes", "weight_grad_bytes"), 0),
    **dict.fromkeys(("dense_parameters", "expert_parameters"), 0),
    **dict.fromkeys(("trained_dense", "trained_experts"), 0),
    **dict.fromkeys(("tied_parameters", "tied_trained"), 0),
    **dict.fromkeys(("forward_s", "backward_s", "weight_s", "selective_s"), 1),
    **dict.fromkeys(("full_s", "hooks_s", "attention", "summed_parameters"), 1),
    **dict.fromkeys(("saved_bytes", "offloaded_bytes", "transient_bytes"), 1),
}


#: Figures of units that a copy has none of where it skips the unit.
_OF_COMPUTED = (
    *("forward_s", "backward_s", "weight_s", "selective_s", "full_s"),
    *("saved_bytes", "offloaded_bytes", "trained_dense", "trained_experts"),
)


def _skipping(costs: UnitCosts, context: PricingContext, depth: Index) -> UnitCosts:
    """Price copies that compute some of the equal residual blocks.

    Blocks of a copy are no fixed ones, so that each counts by the share that it has.

    Args:
        costs: Of the whole model.
        context: The request.
        depth: Blocks that a copy computes. Shape [C].
    """
    blocks = context.facts.residual_blocks
    part = depth[:, None] / max(int(blocks.sum()), 1)
    share = np.where(blocks, part, 1.0)
    found = {name: getattr(costs, name) * share for name in _OF_COMPUTED}
    # What is not trained never leaves a copy.
    found |= {
        name: getattr(costs, name) - getattr(costs, trained) * (1 - share)
        for name, trained in (
            ("dense_parameters", "trained_dense"),
            ("expert_parameters", "trained_experts"),
        )
    }
    return replace(costs, **found)
