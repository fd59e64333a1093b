"""Rules of how weights, gradients and activations are sent, and when.

Functions that take a :class:`Case` are rules of the executors; others are rules of
tables, too. Each returns value, rule and remedy; None if its rule is kept.
"""

from __future__ import annotations

from planner.errors import StrategyError
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.strategy_parts import ShardTraffic
from planner.schema.violations.case import Case

__all__ = [
    "boundary",
    "boundary_violation",
    "bucket_order",
    "overlap",
    "shard_traffic",
    "shards_violation",
    "summed",
]


def overlap(case: Case) -> str | None:
    """Require that overlap settings have an effect where they are set."""
    strategy, mesh = case.strategy, case.strategy.mesh
    overlap = strategy.overlap
    sharded = strategy.zero_stage > 0 and mesh.shards > 1
    if overlap.forward_prefetch is not None and not sharded:
        return (
            f"overlap.forward_prefetch={overlap.forward_prefetch} without ZeRO; no "
            f"weights are gathered, leave it out or use zero_stage above 0 with "
            f"dp_shard or cp > 1"
        )
    if overlap.backward_prefetch is not None and not (
        sharded and strategy.zero_stage == 3
    ):
        return (
            f"overlap.backward_prefetch={overlap.backward_prefetch} with "
            f"zero_stage={strategy.zero_stage}; backward gathers weights under ZeRO 3 "
            f"alone, leave it out or use zero_stage=3"
        )
    if overlap.bucket_bytes is None:
        return None
    if not (strategy.replicas_by_ddp or strategy.uses_own_buckets):
        return (
            f"overlap.bucket_bytes={overlap.bucket_bytes} with {strategy.label()}; "
            f"buckets are for plain replicas in one precision (pp=1, tp=1, no ZeRO), "
            f"each unit is one elsewhere, leave it out"
        )
    return None


def boundary_violation(boundary: str, pp: int, tp: int) -> str | None:
    """Why messages between stages cannot be scattered; None if they can.

    Args:
        boundary: As ``communication.boundary``.
        pp: Pipeline degree.
        tp: Tensor parallel degree.
    """
    if boundary == "direct" or (pp > 1 and tp > 1):
        return None
    lacks = "no stages" if pp == 1 else "no ranks that hold the same"
    axis = f"pp={pp}" if pp == 1 else f"tp={tp}"
    return (
        f"communication.boundary={boundary} with {axis}; there are {lacks} to "
        f"{'send between' if pp == 1 else 'share a message'}, use direct, or pp > 1 "
        f"and tp > 1"
    )


def boundary(case: Case) -> str | None:
    """Apply :func:`boundary_violation`."""
    strategy = case.strategy
    return boundary_violation(
        strategy.communication.boundary, strategy.mesh.pp, strategy.mesh.tp
    )


def summed(case: Case) -> str | None:
    """Require gradients that a send table can sum."""
    strategy = case.strategy
    if not strategy.replicas_by_table:
        return None
    name = strategy.communication.replicas.algorithm
    asked = f"communication.replicas.algorithm={name}"
    copies = strategy.copies
    if not strategy.may_sum_by_table:
        return (
            f"{asked} with {strategy.label()}; it sums gradients over dp_replicate "
            f"(with cp, where nothing is sharded) in every step, of float32 weights "
            f"and reductions; use library, or dp_replicate > 1"
        )
    if strategy.gradient_compression != "none":
        return (
            f"{asked} with gradient_compression={strategy.gradient_compression}; a "
            f"codec has messages of its own, use library, or no compression"
        )
    try:
        strategy.communication.replicas.table(copies)
    except StrategyError as error:
        return str(error)
    return None


def shards_violation(
    shards: ShardTraffic, pp: int, zero_stage: int, ways: int, *, plain: bool
) -> str | None:
    """Why ranks cannot send weights and gradients as is asked for; None if they can.

    Args:
        shards: As ``communication.shards``.
        pp: Pipeline degree.
        zero_stage: ZeRO's stage.
        ways: Of dp_shard times that of cp.
        plain: Whether copies are kept alike in every step.
    """
    if shards == ShardTraffic():
        return None
    asked = f"communication.shards of {shards}"
    if zero_stage != 3 or ways == 1 or pp > 1 or not plain:
        return (
            f"{asked} with zero_stage={zero_stage} over {ways} ranks and pp={pp}; they "
            f"are for weights that ZeRO gathers for each unit, use zero_stage=3 with "
            f"dp_shard > 1, pp=1 and synchronisation=all_reduce, or leave them out"
        )
    if ways % shards.second_copy:
        return (
            f"{asked}: second_copy={shards.second_copy} does not divide the {ways} "
            f"ranks of dp_shard x cp; use a divisor, such as the devices of a host"
        )
    return None


def shard_traffic(case: Case) -> str | None:
    """Refuse ZeRO++, which DeepSpeed alone runs."""
    shards = case.strategy.communication.shards
    if shards == ShardTraffic():
        return None
    return (
        f"communication.shards of {shards} are DeepSpeed's ZeRO++, which is priced and "
        f"exported to it, and does not run here; leave communication.shards out"
    )


def bucket_order(case: Case) -> str | None:
    """Require that weights can be updated bucket by bucket where a plan says so."""
    strategy = case.strategy
    if strategy.communication.buckets == "filled":
        return None
    asked = f"communication.buckets={strategy.communication.buckets}"
    coded = strategy.gradient_compression != "none"
    if coded or not (strategy.uses_own_buckets and strategy.replicas_by_table):
        return (
            f"{asked} with {strategy.label()}; weights are updated bucket by bucket in "
            f"plain replicas (pp=1, tp=1, no ZeRO) whose sums are messages of our own, "
            f"without a codec, use filled, or communication.replicas.algorithm=ring"
        )
    kind = strategy.optimizer.name
    fields = type(strategy).model_fields
    lacks = {
        f"grad_clip_norm={strategy.grad_clip_norm}, which needs all sums before any "
        f"weight changes": strategy.grad_clip_norm is not None,
        "compute=float16, whose loss scale needs all sums before any weight changes": (
            strategy.precision.compute == "float16"
        ),
        f"optimizer {kind}, which does not update each number by itself": (
            not OPTIMIZERS[kind].elementwise
        ),
        f"offload={strategy.offload}, whose weights the host updates together": bool(
            strategy.offload
        ),
        "compile=True, whose blocks cannot wait for a sum where they begin": (
            strategy.compile
        ),
        **{
            f"{slot}={getattr(strategy, slot)}, which has a step of its own": (
                getattr(strategy, slot)
                != fields[slot].get_default(call_default_factory=True)
            )
            for slot in ("synchronisation", "asynchrony", "learning")
        },
    }
    for what, there in lacks.items():
        if there:
            return f"{asked} with {what}; use communication.buckets=filled"
    return None
