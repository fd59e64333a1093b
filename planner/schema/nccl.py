"""Sums of a plan that NCCL does by an algorithm of its own, which a variable names.

NCCL has a ring and trees for sums, and takes what ``NCCL_ALGO`` names. The variable
holds for all groups of a process, so that it can say what a plan wants only if all of
the plan's sums want the same. Since NCCL 2.24 it may name the collective:
``allreduce:ring`` leaves gathers and reduce-scatters to NCCL.

Source: NCCL's user guide, Environment Variables, NCCL_ALGO.
"""

from __future__ import annotations

from planner.schema.strategy import Strategy

__all__ = ["NCCL_ALGORITHMS", "nccl_environment", "nccl_violation"]

#: Algorithms of sums by the names that NCCL has for them.
NCCL_ALGORITHMS = {"ring": "ring", "tree": "tree"}
_VARIABLE = "NCCL_ALGO"


def nccl_violation(strategy: Strategy) -> str | None:
    """Reason why NCCL cannot sum as a strategy says; None if it can.

    Args:
        strategy: Whose replicas sum by another algorithm than the library's choice.
    """
    replicas, mesh = strategy.communication.replicas, strategy.mesh
    if replicas.algorithm not in NCCL_ALGORITHMS:
        known = " and ".join(NCCL_ALGORITHMS)
        return f"NCCL has {known}, but no {replicas.algorithm}"
    if replicas.order:
        return f"NCCL puts the ranks of a {replicas.algorithm} in an order of its own"
    if mesh.tp > 1:
        return (
            f"tp={mesh.tp} leaves sums inside layers to NCCL's choice, and NCCL_ALGO "
            f"holds for all sums of a process"
        )
    if strategy.spatial:
        return (
            "sums of batch norms over shards of samples are left to NCCL's choice, and "
            "NCCL_ALGO holds for all sums of a process"
        )
    return None


def nccl_environment(strategy: Strategy) -> dict[str, str]:
    """Variables by which NCCL sums as a strategy says; empty if there are none.

    They must be set before a process makes its groups, on all ranks alike.

    Args:
        strategy: Of a plan.
    """
    if not strategy.replicas_by_table or nccl_violation(strategy) is not None:
        return {}
    name = NCCL_ALGORITHMS[strategy.communication.replicas.algorithm]
    return {_VARIABLE: f"allreduce:{name}"}
