"""Limits that a model itself sets, whoever runs the plan.

Two ways of dividing a step give wrong gradients, or none, on some models. What must be
known of the model to tell is in :class:`planner.schema.ModelReference`; the planner
asks before it prices a strategy, a plan when it is read, the executors when it is run.
"""

from __future__ import annotations

from planner.schema.patterns import matches_pattern
from planner.schema.strategy import TensorSharding

__all__ = ["batch_norm_limit", "stream_limit"]

#: Styles that leave a tp rank all tokens and some of the features.
_SPLIT = frozenset({"colwise", "rowwise"})


def stream_limit(
    sharding: TensorSharding, *, whole_stream: str | None, mixing: tuple[str, ...]
) -> str | None:
    """Why the residual stream cannot be divided along the sequence as is asked for.

    Args:
        sharding: What is asked for.
        whole_stream: See :class:`planner.schema.ModelReference`.
        mixing: The same.

    Returns:
        Value, rule and remedy; None if sequence parallelism is off, or right.
    """
    if not sharding.sequence_parallel:
        return None
    if whole_stream is not None:
        return (
            f"sequence_parallel, but {whole_stream}, so that every tp rank needs "
            f"whole sequences; switch it off"
        )
    split = [p for p, style in sharding.patterns.items() if style in _SPLIT]
    missing = [
        layer
        for layer in mixing
        if not any(matches_pattern(pattern, layer) for pattern in split)
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        return (
            f"sequence_parallel, but no pattern splits {missing[0]}{more}, between "
            f"which tokens see each other; add it to sharding.patterns or switch "
            f"sequence_parallel off"
        )
    return None


def batch_norm_limit(microbatch_size: int, batch_norm_values: int | None) -> str | None:
    """Why a batch norm has no variance in such a microbatch.

    Args:
        microbatch_size: Samples that a device sees at once.
        batch_norm_values: See :class:`planner.schema.ModelReference`.

    Returns:
        Value, rule and remedy; None if every channel has two values or more.
    """
    if batch_norm_values is None or microbatch_size * batch_norm_values >= 2:
        return None
    return (
        f"microbatch_size={microbatch_size} leaves a batch norm of the model one value "
        f"a channel ({batch_norm_values} a sample), of which there is no variance; use "
        f"microbatch_size=2 or more"
    )
