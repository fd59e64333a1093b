"""Copies that train on their own and average their weights every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import Feature, Method, Synchronisation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.schema.violations import Case

__all__ = ["METHODS", "LocalSteps"]


class LocalSteps(Synchronisation):
    """Copies train on their own, and average their weights every few steps.

    Attributes:
        period: Steps from one average to the next.
    """

    apart: ClassVar[bool] = True
    #: Weights are averaged in pieces of about this size: few messages, little memory.
    PIECE_BYTES: ClassVar[int] = 25 * 2**20

    kind: Literal["local_steps"] = "local_steps"
    period: Annotated[int, Field(ge=1, le=10**6)] = 8

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps without and with an exchange."""
        exchange = 1 / self.period
        if self.period == 1:
            return {"exchange": exchange}
        return {"plain": 1 - exchange, "exchange": exchange}

    def expected_traffic(self, *, gradients: float, weights: float) -> float:
        """All trained weights, once a period."""
        return weights / self.period


def _several_copies(case: Case) -> str | None:
    mesh = case.strategy.mesh
    if mesh.dp_replicate == 1:
        return (
            f"synchronisation={case.strategy.synchronisation} with dp_replicate=1; "
            f"copies along dp_replicate are what it averages, use dp_replicate > 1 or "
            f"synchronisation=all_reduce"
        )
    if mesh.cp > 1 and case.strategy.zero_stage == 0:
        return (
            f"synchronisation={case.strategy.synchronisation} with cp={mesh.cp} and "
            f"zero_stage=0; ranks of one sequence would be copies that train on their "
            f"own, use zero_stage=1, 2 or 3, or cp=1"
        )
    return None


METHODS = (
    Method(
        kind="local_steps",
        slot="synchronisation",
        document=LocalSteps,
        words="copies average their weights every {period} steps",
        inexact="copies train on their own between averages",
        limits=(_several_copies,),
        feature=Feature(
            name="local steps",
            mesh={"dp_replicate": 2},
            fields={
                "synchronisation": LocalSteps(period=1),
                "semantics": "approximate",
            },
            kind="synchronisation",
            # A copy's gradients are its own; clipped, so is the length of its step.
            tolerance=(2e-2, float("inf"), float("inf")),
        ),
        presets={"local-sgd": LocalSteps(period=8)},
        prices="planner.cost.replicas.local_steps:LocalStepsPricing",
        runs="executors.replicas.local_steps:LocalStepsReplicas",
        page="methods/local-steps.md",
        test="tests/distributed/test_local_steps.py",
        source="Stich 2019, arXiv 1805.09767; period of Lin et al. 2020, 1808.07217",
    ),
)
