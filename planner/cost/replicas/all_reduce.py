"""Replicas kept alike in every step: gathers of weights, reductions of gradients.

Without a pipeline, ZeRO 2 and 3 reduce-scatter after every microbatch. ZeRO 2 gathers
once a step, ZeRO 3 before every forward and every backward; all of it hides under
compute as far as ``overlap`` of it reaches. With a pipeline, torch gathers each stage
once before its first forward and reduces once after its last backward, and nothing
hides that on the rank that finishes last; under ZeRO 3 every forward frees the stage
again, so that each microbatch gathers it once more.
Source: torch.distributed.pipelining.stage, backward_maybe_with_nosync, torch 2.13.
Frameworks whose pipelines hide it (``pipeline_overlap``) reduce once a step, too: a
chunk of several that a rank has while the others still compute.

Hidden communication is not free: a collective's kernels take multiprocessors, and
products whose tiles filled the device in whole waves need one more. ``overlap_cost`` of
the hidden time comes on top.

Compression makes gradients smaller: :mod:`planner.cost.replicas.codecs`.

Stages that update weights behind each backward sum all their gradients before each
update, in one all-reduce that the update waits for and nothing hides. With it goes a
scalar a tensor, by which copies know gradients that none of them has.

Where the next forward waits for no more than it needs (``communication.buckets``), the
sums that backward leaves hide under that as well, but for those that its first unit
waits for. Step after step takes this long; a run's last one takes longer.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import PricingContext
from planner.cost.recipes import Recipe
from planner.cost.replicas import (
    ReplicaBytes,
    ReplicaPricing,
    ReplicaRows,
    ReplicaTraffic,
    expert_spread,
)
from planner.cost.replicas.codecs import compressed_bytes, compressed_traffic
from planner.cost.table.rows import plain
from planner.cost.traffic.collectives import ReplicaGroups
from planner.schema import Precision
from planner.schema.buckets import cut_into_buckets
from planner.schema.methods import Synchronisation
from planner.schema.send_tables import SendTable
from planner.schema.strategy_parts import ShardTraffic
from planner.simulate.compiled import compiled, inlined, inner
from planner.units import dtype_bytes

__all__ = [
    "AllReducePricing",
    "exposed_seconds",
    "replica_traffic",
    "traffic_inside",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


#: What DistributedDataParallel, which averages copies where nothing is cast nor cut,
#: puts in one all-reduce. Source: torch.nn.parallel, ``bucket_cap_mb``.
_BUCKET_BYTES = 25 * 2**20


@inlined
def _beside(seconds: float, room: float, cost: float) -> float:
    """Time that a collective adds to compute that has ``room`` to hide it under."""
    added: float = max(seconds - room, 0.0) + cost * min(seconds, room)
    return added


@inner
def _exposed(
    zero: int,
    pp: int,
    many: int,
    gather: float,
    again: float,
    scatter: float,
    mirror: float,
    under_forward: float,
    under_backward: float,
    cost: float,
    behind_pipeline: bool,
    each: bool,
) -> float:
    """Seconds that a step's gathers, scatters and all-reduces add to it.

    ``gather`` and the next three are the seconds of one of each, ``again`` of a gather
    behind a step's first, then what a microbatch's forward and backward can hide, and
    what a hidden second costs compute.
    """
    if pp > 1 and not behind_pipeline:
        later = many * _beside(again, under_backward, cost) if zero == 3 else 0.0
        return gather + later + scatter + mirror
    # Gathers and reductions of one backward share its links and its compute.
    behind = scatter + (again if zero == 3 else 0.0)
    gathers = _beside(gather, under_forward, cost)
    if zero == 3:
        gathers += (many - 1) * _beside(again, under_forward, cost)
    # Without a reduction of its own, a backward has ZeRO 3's gathers to hide alone. A
    # pipeline adds up the gradients of its microbatches before it reduces any.
    own = behind if each and pp == 1 else behind - scatter
    early = (many - 1) * _beside(own, under_backward, cost) if zero >= 2 else 0.0
    return gathers + early + _beside(behind + mirror, under_backward, cost)


@inner
def _beside_forward(
    seconds: float,
    under_backward: float,
    under_forward: float,
    first: float,
    buckets: float,
    cost: float,
) -> float:
    """Time that sums of buckets add where the next forward takes each as it comes.

    Sums that backward has no room for are spread over the forward's units, whose last
    one begins when all others have run; its first one waits for a share ``first``.
    """
    left = max(seconds - under_backward, 0.0)
    late = left - under_forward * (1.0 - 1.0 / buckets)
    exposed = min(left, max(first * seconds, late))
    added: float = exposed + cost * (seconds - exposed)
    return added


@inner
def _wire(lines: Array, size: float, units: float) -> float:
    """Seconds of a collective in ``units`` pieces, by the faster of two lines."""
    piece = size / units
    first = lines[0, 0] + lines[0, 1] * piece
    second = lines[1, 0] + lines[1, 1] * piece
    seconds: float = units * min(first, second)
    return seconds


@compiled
def _fill_exposed(
    zero_stage: Index,
    pp: Index,
    many: Index,
    scalars: Array,
    trained: Array,
    units: Array,
    forward_s: Array,
    backward_s: Array,
    shard: Index,
    mirrored: Array,
    replicate: Index,
    near: Index,
    gather_lines: Array,
    again_lines: Array,
    scatter_lines: Array,
    mirror_lines: Array,
    bytes_each: tuple[float, float, float],
    hidden: float,
    cost: float,
    behind_pipeline: bool,
    each: bool,
    scatters_whole: bool,
    first: float,
    whole: NDArray[np.bool_],
    exposed: Array,
) -> None:
    for i in range(len(exposed)):
        group, pieces = shard[i], max(units[i], 1.0)
        reduced = trained[i] * bytes_each[1]
        gathered = scalars[i] * bytes_each[0]
        buckets = pieces
        if whole[i] and bytes_each[0] == bytes_each[2]:
            buckets = 1 + trained[i] * bytes_each[2] // _BUCKET_BYTES
        if whole[i] and first > 0:
            exposed[i] = _beside_forward(
                _wire(mirror_lines[replicate[i]], mirrored[i] * bytes_each[2], buckets),
                hidden * backward_s[i],
                hidden * forward_s[i],
                first,
                buckets,
                cost,
            )
            continue
        exposed[i] = _exposed(
            zero_stage[i],
            pp[i],
            many[i],
            _wire(gather_lines[group], gathered, pieces),
            _wire(again_lines[near[i]], gathered, pieces),
            (2.0 if scatters_whole and zero_stage[i] == 1 else 1.0)
            * _wire(scatter_lines[group], reduced, pieces),
            _wire(mirror_lines[replicate[i]], mirrored[i] * bytes_each[2], buckets),
            hidden * forward_s[i],
            hidden * backward_s[i],
            cost,
            behind_pipeline,
            each,
        )


def _payload_bytes(
    precision: Precision, shards: ShardTraffic
) -> tuple[float, float, float]:
    """Bytes of a scalar in a gather, in a reduction to shards, and in one of copies."""
    name = "bfloat16" if precision.compute == "float8" else precision.compute
    gather, reduce = float(dtype_bytes(name)), float(dtype_bytes(precision.reduce))
    return (
        gather if shards.weight_bits is None else shards.weight_bits / 8,
        reduce if shards.gradient_bits is None else shards.gradient_bits / 8,
        reduce,
    )


def exposed_seconds(
    rows: ReplicaRows,
    groups: ReplicaGroups,
    precision: Precision,
    recipe: Recipe,
    *,
    on_gpu: bool = True,
    first: float = 0.0,
    shards: ShardTraffic | None = None,
) -> Array:
    """The seconds of :func:`replica_traffic` alone, with the same arguments. [n]."""
    room = np.ones(len(rows.pp))
    if recipe.pipeline_overlap:
        room = _rounds_in_a_row(rows)
    exposed = np.empty(len(rows.scalars))
    copies = _copies(rows, groups)
    _fill_exposed(
        plain(rows.zero_stage),
        plain(rows.pp),
        plain(rows.num_microbatches),
        np.ascontiguousarray(copies.sharded),
        np.ascontiguousarray(copies.sharded_trained),
        np.ascontiguousarray(rows.units * recipe.pieces),
        np.ascontiguousarray(rows.forward_s * room),
        np.ascontiguousarray(rows.backward_s * room),
        plain(groups.shard.which),
        np.ascontiguousarray(copies.mirrored),
        plain(groups.replicate.which),
        plain(groups.near.which),
        groups.gather,
        groups.again,
        groups.scatter,
        groups.mirror,
        _payload_bytes(precision, shards or ShardTraffic()),
        # One process computes and communicates on CPU: there is nothing to hide under.
        recipe.overlap if on_gpu else 0.0,
        recipe.overlap_cost,
        recipe.pipeline_overlap and on_gpu,
        recipe.reduces_each,
        recipe.reduces_whole,
        first,
        np.ascontiguousarray(rows.whole),
        exposed,
    )
    return exposed


class _Copies(NamedTuple):
    """Scalars by what is done to keep their copies alike. Shapes [n].

    Ranks with other experts share none: of ``ways`` ranks that ZeRO shards over,
    and tp as many, ``ways tp / ep`` hold an expert.

    Attributes:
        sharded: Gathered from several ranks.
        sharded_trained: Reduced to several ranks.
        mirrored: Trained scalars that ZeRO leaves on a device, all-reduced.
        sent_gathered: What a device sends of ``sharded``; likewise
            sent_scattered, and sent_mirrored of an all-reduce.
    """

    sharded: Array
    sharded_trained: Array
    mirrored: Array
    sent_gathered: Array
    sent_scattered: Array
    sent_mirrored: Array


def _copies(rows: ReplicaRows, groups: ReplicaGroups) -> _Copies:
    """Count scalars by the groups that hold copies of them."""
    n, r = groups.shard.size, groups.replicate.size
    spread = expert_spread(rows.ep, rows.tp)
    few = np.maximum(n / spread, 1.0)
    copies = r * n / (few * spread)
    dense, trained = rows.scalars - rows.experts, rows.trained - rows.trained_experts
    experts, fewer = rows.experts * (few > 1), rows.trained_experts * (few > 1)
    own, shared = trained / n * (r > 1), rows.trained_experts / few * (copies > 1)
    away, beside = (n - 1) / n, (few - 1) / few
    return _Copies(
        sharded=dense + experts,
        sharded_trained=trained + fewer,
        mirrored=own + shared,
        sent_gathered=dense * away + experts * beside,
        sent_scattered=trained * away + fewer * beside,
        sent_mirrored=2
        * (own * (r - 1) / r + shared * (1 - 1 / np.maximum(copies, 1))),
    )


def _rounds_in_a_row(rows: ReplicaRows) -> Array:
    """Microbatches under whose compute a rank's weights are gathered, or reduced. [n].

    One, where it has one chunk. Interleaved chunks take pp microbatches one after the
    other, so that a chunk's turn comes while those before it (behind it, backward) have
    theirs: Narayanan et al. 2021, section 2.2.2. ZeRO 3 gathers for each of them.
    """
    turns = np.minimum(rows.pp, rows.num_microbatches) - 1
    row = 1 + turns * (1 - 1 / np.maximum(rows.virtual_stages, 1))
    return np.asarray(np.where(rows.zero_stage < 3, row, 1.0))


def replica_traffic(
    rows: ReplicaRows,
    groups: ReplicaGroups,
    precision: Precision,
    recipe: Recipe,
    *,
    on_gpu: bool = True,
    first: float = 0.0,
    shards: ShardTraffic | None = None,
) -> ReplicaTraffic:
    """Exposed time of gathers and reductions, and the bytes that they move.

    Args:
        rows: Of n devices.
        groups: Of the same.
        precision: Dtypes of gathers and reductions.
        recipe: What of them hides, and how often gradients are reduced.
        on_gpu: False lets nothing hide.
        first: Share of the sums of plain replicas that the next forward waits for
            before it begins, where it waits for others later on; 0 where it waits for
            all.
        shards: What ranks that ZeRO shards over send each other; None for the dtypes
            of the precision, without a second copy.
    """
    exposed = exposed_seconds(
        rows, groups, precision, recipe, on_gpu=on_gpu, first=first, shards=shards
    )
    copies, n, near = _copies(rows, groups), groups.shard.size, groups.near.size
    gathers, scatters = _rounds(rows)
    scatters = scatters if recipe.reduces_each else np.minimum(scatters, 1.0)
    if recipe.reduces_whole:
        scatters = np.where(rows.zero_stage == 1, 2.0, scatters)
    gather, scatter, reduce = _payload_bytes(precision, shards or ShardTraffic())
    gathers, scatters = gathers * gather * (n > 1), scatters * scatter * (n > 1)
    # Behind a step's first gather none goes further than a second copy.
    away, inside = copies.sent_gathered * gathers, copies.sharded * (near - 1) / near
    first_alone = copies.sent_gathered * gather + inside * (gathers - gather)
    away = np.where((near < n) & (n > 1), first_alone, away)
    sent = away + copies.sent_scattered * scatters
    return ReplicaTraffic(
        exposed_s=exposed,
        gathered_bytes=copies.sharded * gathers,
        scattered_bytes=copies.sharded_trained * scatters,
        reduced_bytes=copies.mirrored * reduce,
        sent_bytes=sent + copies.sent_mirrored * reduce,
    )


def _needed_first(context: PricingContext) -> float:
    """Share of the sums that the next forward waits for before it begins.

    Those are the buckets with parameters of the first unit, and of units without a
    collective of their own: tied ones, and those of vectors alone. 0 where it waits for
    all of them, and where no buckets of our own are summed.
    """
    if context.regime.communication.buckets == "filled" or not context.sums_by_table:
        return 0.0
    graph = context.graph
    trained = [one for one in graph.parameters if one.trainable]
    unit = np.searchsorted(
        [stop for _, stop in graph.units], [p.block for p in trained], "right"
    )
    matrices = {
        int(at) for at, p in zip(unit, trained, strict=True) if len(p.shape) > 1
    }
    early = [
        at == 0 or bool(one.readers) or int(at) not in matrices
        for at, one in zip(unit, trained, strict=True)
    ]
    sizes = [one.numel * dtype_bytes(context.precision.reduce) for one in trained]
    buckets = cut_into_buckets(sizes, None)
    waited = sum(
        sum(sizes[i] for i in bucket)
        for bucket in buckets
        if any(early[i] for i in bucket)
    )
    return waited / max(sum(sizes), 1)


def _by_table(
    found: ReplicaTraffic,
    rows: ReplicaRows,
    groups: ReplicaGroups,
    context: PricingContext,
) -> ReplicaTraffic:
    """Bytes of copies whose sums are messages of our own, of the busiest of them."""
    table = _table_of(groups, context)
    if table is None:
        return found
    messaged = found.reduced_bytes * max(table.bytes_sent(1.0))
    inside = found.sent_bytes - _copies(rows, groups).sent_mirrored * dtype_bytes(
        context.precision.reduce
    )
    return replace(
        found,
        reduced_bytes=np.zeros_like(found.reduced_bytes),
        messaged_bytes=messaged,
        sent_bytes=inside + messaged,
    )


def _table_of(groups: ReplicaGroups, context: PricingContext) -> SendTable | None:
    """Messages of sums over copies; None if there are none, or no copies."""
    copies = int(groups.replicate.size[0])
    if not context.sums_by_table or copies == 1:
        return None
    return context.regime.communication.replicas.table(copies)


def _traffic_of_updates(
    rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
) -> ReplicaTraffic:
    """Sums of copies whose stages update weights while microbatches are under way."""
    copies = groups.replicate.size
    size = (rows.trained + rows.tensors) * context.scalar_bytes.reduce * (copies > 1)
    lines = groups.mirror[groups.replicate.which]
    seconds = (lines[:, :, 0] + lines[:, :, 1] * size[:, None]).min(axis=1)
    updates = context.regime.asynchrony.updates(rows.num_microbatches)
    nothing = np.zeros_like(size)
    return ReplicaTraffic(
        exposed_s=nothing,
        gathered_bytes=nothing,
        scattered_bytes=nothing,
        reduced_bytes=size * updates,
        sent_bytes=size * updates * 2 * (copies - 1) / copies,
        awaited_s=seconds * updates,
    )


def traffic_inside(
    rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
) -> ReplicaTraffic:
    """Exposed time and bytes of ZeRO inside copies that share no gradients.

    Args:
        rows: Of n devices.
        groups: Of the same.
        context: Dtypes, recipe and devices.
    """
    alone = replace(groups, mirror=np.zeros_like(groups.mirror))
    return _with_copies(rows, alone, context)


def _with_copies(
    rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
) -> ReplicaTraffic:
    found = replica_traffic(
        rows,
        groups,
        context.precision,
        context.recipe,
        on_gpu=context.on_gpu,
        first=_needed_first(context),
        shards=context.regime.communication.shards,
    )
    copied = _copied_seconds(rows, groups, context)
    return replace(found, exposed_s=found.exposed_s + copied)


#: Bytes that cutting gradients into the buffer of a reduction takes as long as, over
#: those that it reads and writes. FSDP2's kernel for it moved 19 GB of gradients in 9.4
#: ms on an H200, which copies 4.1 TB/s (`python -m benchmarks.one_gpu`, 2026-11-26).
_CUT = 2.0


def _copied_seconds(
    rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
) -> Array:
    """Seconds of what a device and its host do for gathers and reductions. Shape [n].

    A gather casts the rank's own shard, and copies what came out of the buffer; a
    reduction cuts gradients into its buffer, and a lone rank copies them out, too.
    What a lone rank does without hooks (``own_casts``) is priced like that, too: it has
    not been measured on a GPU.
    """
    recipe, of = context.recipe, context.scalar_bytes
    quantised = _quantised_seconds(rows, context)
    if not (recipe.local_copies and context.on_gpu):
        return quantised
    ways = groups.shard.size
    gathers, scatters = _rounds(rows)
    scatters = scatters if recipe.reduces_each else np.minimum(scatters, 1.0)
    cast = (of.stored + of.compute) / ways * (of.stored != of.compute)
    gathered = rows.scalars * gathers * (cast + 2 * of.compute)
    out = 2 * of.reduce * (ways == 1)
    reduced = rows.trained * scatters * (_CUT * (of.compute + of.reduce) + out)
    sharded = (rows.zero_stage > 0) | (of.stored != of.compute)
    rate = _memory_rate(context)
    many = rows.num_microbatches
    hooks = rows.hooks_s * np.where(rows.zero_stage == 3, many, 1)
    copied = np.where(sharded, (gathered + reduced) / rate + hooks, 0.0)
    return np.asarray(copied + quantised)


def _memory_rate(context: PricingContext) -> float:
    """Bytes/s that the slowest device's memory reaches."""
    return min(
        device.memory_bandwidth_bytes_per_s
        * context.constants(device).memory_efficiency
        for device in context.cluster.device_types
    )


def _quantised_seconds(rows: ReplicaRows, context: PricingContext) -> Array:
    """Seconds of turning weights and gradients into fewer bits and back. Shape [n].

    What is gathered is read in few bits and written in the dtype of products, what is
    reduced read and written the other way round, once for a host and once beyond. The
    rank's own shard, and scales of blocks, are left out.
    """
    shards, of = context.regime.communication.shards, context.scalar_bytes
    gathers, scatters = _rounds(rows)
    moved = np.zeros(len(rows.pp))
    if shards.weight_bits is not None:
        moved = moved + rows.scalars * gathers * (shards.weight_bits / 8 + of.compute)
    if shards.gradient_bits is not None:
        each = of.reduce + 2 * shards.gradient_bits / 8
        moved = moved + rows.trained * scatters * each
    return np.asarray(moved / _memory_rate(context))


def _rounds(rows: ReplicaRows) -> tuple[Array, Array]:
    """Gathers and reduce-scatters of every scalar in a step. Shapes [n]."""
    many, piped = rows.num_microbatches, rows.pp > 1
    zero3 = rows.zero_stage == 3
    gathers = np.where(zero3, np.where(piped, many + 1, 2 * many), 1)
    scatters = np.where(~piped & (rows.zero_stage >= 2), many, 1)
    return gathers.astype(float), scatters.astype(float)


class AllReducePricing(ReplicaPricing):
    """Copies that exchange their gradients in every step.

    Compressed gradients are priced for plain replicas alone.
    """

    def __init__(self, synchronisation: Synchronisation) -> None:
        self.synchronisation = synchronisation

    def seconds(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> Array:
        """Seconds that nothing hides. Shape [n]."""
        if rows.compressed.any() or context.regime.asynchrony.update_interval:
            return super().seconds(rows, groups, context)
        exposed = exposed_seconds(
            rows,
            groups,
            context.precision,
            context.recipe,
            on_gpu=context.on_gpu,
            first=_needed_first(context),
            shards=context.regime.communication.shards,
        )
        return exposed + _copied_seconds(rows, groups, context)

    def traffic(
        self, rows: ReplicaRows, groups: ReplicaGroups, context: PricingContext
    ) -> ReplicaTraffic:
        """The same seconds, and the bytes that move."""
        if context.regime.asynchrony.update_interval:
            return _traffic_of_updates(rows, groups, context)
        found = _with_copies(rows, groups, context)
        if context.sums_by_table:
            return _by_table(found, rows, groups, context)
        if not rows.compressed.any():
            return found
        smaller = compressed_traffic(context, rows, groups.replicate)
        copied = _copied_seconds(rows, groups, context)
        smaller = replace(smaller, exposed_s=smaller.exposed_s + copied)
        return ReplicaTraffic(
            **{
                field.name: np.where(
                    rows.compressed,
                    getattr(smaller, field.name),
                    getattr(found, field.name),
                )
                for field in fields(ReplicaTraffic)
            }
        )

    def held(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Copies of gradients that replicas make, and a second copy of weights."""
        found = self._gradients(rows, context)
        second = context.regime.communication.shards.second_copy
        if second == 1:
            return found
        weights = rows.scalars * context.scalar_bytes.compute / second
        return replace(found, weights=found.weights + weights)

    def _gradients(self, rows: ReplicaRows, context: PricingContext) -> ReplicaBytes:
        """Copies of gradients that replicas make.

        Where nothing is cast, DistributedDataParallel holds plain replicas: its
        buckets live from step to step, and gradients of microbatches before the last
        lie beside them. Compression keeps errors, and copies what it sends.
        """
        of, nothing = context.scalar_bytes, np.zeros(len(rows.pp))
        beside = nothing
        if context.regime.asynchrony.update_interval:
            # What is summed is held within the pipeline, whose pricing counts it.
            return ReplicaBytes(kept=nothing, working=nothing)
        if context.sums_by_table:
            # Buckets of our own hold all gradients, and what a step receives of one.
            ahead = 0.0 if of.compute == of.stored else rows.trained * of.stored
            bucket = np.minimum(rows.trained * of.stored, _BUCKET_BYTES)
            # Of shards, a step receives of one unit's.
            shards, units = np.maximum(rows.shards, 1), np.maximum(rows.units, 1.0)
            unit = rows.trained * of.reduce / shards / units
            # Sums beside a forward receive while its activations are there.
            beside = bucket * (context.regime.communication.buckets == "needed")
            return ReplicaBytes(
                kept=np.where(rows.whole, ahead + beside, 0.0),
                working=np.where(rows.whole, bucket - beside, unit),
            )
        if of.compute == of.stored == of.reduce and not of.gradients_ahead:
            several = rows.whole & (rows.num_microbatches > 1)
            beside = np.where(several, rows.trained * of.stored, 0.0)
        if not rows.compressed.any():
            return ReplicaBytes(kept=beside, working=nothing)
        kept, working, whole_buckets = compressed_bytes(context, rows)
        # Buckets of our own hold all gradients, of every microbatch.
        ahead = 0.0 if of.compute == of.stored else rows.trained * of.stored
        beside = np.where(rows.compressed & whole_buckets, ahead, beside)
        return ReplicaBytes(
            kept=beside + np.where(rows.compressed, kept, 0.0),
            working=np.where(rows.compressed, working, 0.0),
        )
