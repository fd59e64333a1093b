"""Effects of overlap settings and compiling: where there are any, and in prices."""

from __future__ import annotations

from planner.schema.leaves import leaf_defaults, leaf_of
from planner.schema.strategy import Overlap, Strategy

__all__ = ["compile_reason", "overlap_reason", "unpriced"]

#: Leaves of a strategy that no price depends on, though a run does.
_UNPRICED = (
    *(f"overlap.{name}" for name in Overlap.model_fields),
    "compile",
)


def unpriced(strategy: Strategy) -> tuple[str, ...]:
    """Settings that executors follow and that predictions leave out.

    Args:
        strategy: What was priced.

    Returns:
        ``field=value`` of each; empty if everything was priced.
    """
    found = {name: leaf_of(strategy, name) for name in _UNPRICED}
    defaults = leaf_defaults(Strategy)
    return tuple(
        f"{name}={value}" for name, value in found.items() if value != defaults[name]
    )


def overlap_reason(strategy: Strategy) -> str | None:
    """Why its overlap settings would have no effect; None if they do, or are not set.

    Args:
        strategy: What is asked for.
    """
    overlap, mesh = strategy.overlap, strategy.mesh
    sharded = strategy.zero_stage > 0 and mesh.dp_shard * mesh.cp > 1
    if overlap.forward_prefetch is not None and not sharded:
        return (
            f"overlap.forward_prefetch={overlap.forward_prefetch} without ZeRO; no "
            f"weights are gathered, leave it out or use dp_shard > 1"
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
    if not strategy.replicas_by_ddp:
        return (
            f"overlap.bucket_bytes={overlap.bucket_bytes} with {strategy.label()}; "
            f"buckets are for plain replicas in one precision (pp=1, tp=1, no ZeRO), "
            f"each unit is one elsewhere, leave it out"
        )
    return None


def compile_reason(strategy: Strategy) -> str | None:
    """Why its blocks cannot be compiled; None if they can, or are not to be.

    Args:
        strategy: What is asked for.
    """
    if not strategy.compile:
        return None
    if not strategy.stages:
        return (
            "compile=True without stages; name the modules of the one stage, whose "
            "blocks are compiled"
        )
    if strategy.mesh.tp > 1:
        return (
            f"compile=True with tp={strategy.mesh.tp}; compiled code was seen to give "
            f"wrong numbers around the sums of tp, use compile=False or tp=1"
        )
    if strategy.mesh.ep > 1:
        return (
            f"compile=True with ep={strategy.mesh.ep}; experts get another number of "
            f"tokens each step, for which code would be made anew, use compile=False "
            f"or ep=1"
        )
    if strategy.mesh.pp > 1 and strategy.schedule_spec.splits_backward:
        return (
            f"compile=True with {strategy.schedule}; a compiled block computes all "
            f"gradients at once and would compute them twice, use compile=False or 1F1B"
        )
    return None
