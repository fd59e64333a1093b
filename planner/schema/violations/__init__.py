"""Violations of a strategy: why a model, or Meshwright's own executors, cannot run it.

The planner leaves out what violates a rule here before it prices it; the executors look
again before they start. Every rule of theirs is torch's own, or one of the executors',
seen to fail with torch 2.13, or with the older torch that it names.

Two ways of dividing a step give wrong gradients, or none, on some models, whoever runs
the plan: :func:`stream_violation`, :func:`batch_norm_violation`. Facts about the model
that decide it are in :class:`planner.schema.ModelReference`; a plan is checked when it
is read, too.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.schema import methods
from planner.schema.strategy import Strategy
from planner.schema.violations import computation, division, messages
from planner.schema.violations.case import Case, installed_torch
from planner.schema.violations.computation import offload_violation, whole_violation
from planner.schema.violations.division import (
    batch_norm_violation,
    coupled_violation,
    hook_violation,
    stream_violation,
)
from planner.schema.violations.messages import boundary_violation, shards_violation

__all__ = [
    "Case",
    "batch_norm_violation",
    "boundary_violation",
    "comparison_violation",
    "coupled_violation",
    "executor_violations",
    "hook_violation",
    "installed_torch",
    "offload_violation",
    "shards_violation",
    "stream_violation",
    "whole_violation",
]

Tied = tuple[tuple[str, ...], ...]

#: In the order in which violations are listed.
_RULES: tuple[Callable[[Case], str | None], ...] = (
    division.context,
    division.stream,
    division.batch_norm,
    division.experts,
    division.stages_named,
    division.one_process_one_stage,
    division.schedule,
    division.v_on_gloo,
    division.split_backward,
    computation.precision,
    division.loss,
    computation.optimizer,
    messages.overlap,
    messages.boundary,
    messages.summed,
    messages.bucket_order,
    messages.shard_traffic,
    computation.compiled,
    computation.chunked,
    computation.offloaded,
    division.patterns,
    division.tied,
)


def executor_violations(
    strategy: Strategy,
    *,
    tied: Tied = (),
    backend: str = "gloo",
    attention: str | None = "causal",
    whole_stream: str | None = None,
    mixing: tuple[str, ...] = (),
    batch_norm_values: int | None = None,
    spatial_sizes: tuple[int, ...] = (),
    experts: int = 0,
    torch_version: str | None = None,
) -> tuple[str, ...]:
    """Violations of what the executors can run; empty if they run the strategy.

    Args:
        strategy: What is asked for.
        tied: Groups of parameter FQNs that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: See :class:`planner.schema.ModelReference`.
        whole_stream: The same.
        mixing: The same.
        batch_norm_values: The same.
        spatial_sizes: The same.
        experts: The same.
        torch_version: Of the torch that would run it; None for the installed one.

    Returns:
        One line each: the value, the rule, the remedy.
    """
    case = Case(
        strategy=strategy,
        tied=tied,
        backend=backend,
        attention=attention,
        whole_stream=whole_stream,
        mixing=mixing,
        batch_norm_values=batch_norm_values,
        spatial_sizes=spatial_sizes,
        experts=experts,
        torch_version=torch_version or installed_torch(),
    )
    found = (rule(case) for rule in _RULES)
    return (*(one for one in found if one), *methods.violations(case))


def comparison_violation(strategy: Strategy) -> str | None:
    """Why the first step of a strategy is not to be compared with plain training.

    Returns:
        Value, rule and remedy; None if a step computes what plain training would.
    """
    for method, value in methods.methods_of(strategy):
        if method.inexact:
            return (
                f"check_first_step with {method.slot}={value}; {method.inexact}, so "
                f"that it is not one process's, leave check_first_step out"
            )
    return None
