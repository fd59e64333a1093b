"""Copies that average their gradients in every step."""

from __future__ import annotations

from typing import Literal

from planner.schema.methods.method import Method, Synchronisation

__all__ = ["METHODS", "AllReduce"]


class AllReduce(Synchronisation):
    """Copies average their gradients in every step: plain data parallelism."""

    kind: Literal["all_reduce"] = "all_reduce"

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """All gradients."""
        return {"all_reduce": gradients}


METHODS = (
    Method(
        kind="all_reduce",
        slot="synchronisation",
        document=AllReduce,
        default=True,
        prices="planner.cost.replicas.all_reduce:AllReducePricing",
        runs="executors.replicas.all_reduce:AllReduceReplicas",
        page="methods/all-reduce.md",
        test="tests/distributed/test_composition.py",
        source="torch.nn.parallel.DistributedDataParallel, torch 2.13",
    ),
)
