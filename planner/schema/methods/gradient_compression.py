"""Gradients made smaller on their way between plain replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.schema.methods.method import Feature, Method, Violation

if TYPE_CHECKING:
    from planner.schema.violations import Case

__all__ = ["METHODS"]


def _replicas_by_ddp(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.replicas_by_ddp:
        return None
    return (
        f"gradient_compression={strategy.gradient_compression} with "
        f"{strategy.label()}; it is for plain replicas in one precision (pp=1, tp=1, "
        f"no ZeRO), use none, or precision.reduce=bfloat16"
    )


def _one_bucket(case: Case) -> str | None:
    size = case.strategy.overlap.bucket_bytes
    if size is None:
        return None
    return (
        f"overlap.bucket_bytes={size} with powersgd; it works in one bucket alone, "
        f"leave it out"
    )


def _compressed(
    kind: str,
    source: str,
    tolerance: tuple[float, float, float] | None = None,
    *more: Violation,
    unverified: str | None = None,
) -> Method:
    feature = None
    if tolerance is not None:
        feature = Feature(
            name=kind,
            mesh={"dp_replicate": 2},
            fields={"gradient_compression": kind, "semantics": "approximate"},
            kind="compression",
            tolerance=tolerance,
        )
    return Method(
        kind=kind,
        slot="gradient_compression",
        words="gradients compressed by {kind}",
        inexact="it changes gradients",
        violations=(_replicas_by_ddp, *more),
        feature=feature,
        prices="planner.cost.replicas.all_reduce:AllReducePricing",
        runs="executors.strategies.compression:compress_gradients",
        unverified=unverified,
        page="methods/gradient-compression.md",
        test="tests/distributed/test_compression.py",
        source=source,
    )


_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks, torch 2.13"

METHODS = (
    Method(
        kind="none",
        slot="gradient_compression",
        default=True,
        prices="planner.cost.replicas.all_reduce:AllReducePricing",
        runs="executors.strategies.compression:compress_gradients",
        page="methods/gradient-compression.md",
        test="tests/distributed/test_compression.py",
        source=_HOOKS,
    ),
    # The composition table has float16 for both casts.
    _compressed("bfloat16", _HOOKS),
    _compressed("float16", _HOOKS, (1e-3, 5e-3, 5e-3)),
    _compressed(
        "powersgd",
        f"{_HOOKS}; Vogels et al. 2019, arXiv 1905.13727",
        (2e-2, float("inf"), float("inf")),
        _one_bucket,
        unverified="its hook runs in DDP's reducer",
    ),
)
