"""Stages that learn by themselves, from labels that are drawn for each cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import Learning, Method, parts_alone

__all__ = ["METHODS", "SyntheticLabels"]

Count = Annotated[int, Field(ge=1, le=10**9)]


class SyntheticLabels(Learning):
    """Stages that learn by themselves, from labels that are drawn for each cut.

    The cut behind part p gets a table S_p of one row a class: a random half of its
    values are ``scale``, the others 0. Part p learns to map S_(p-1)[y] to S_p[y], the
    first part its input to S_1[y], the last S_(p-1)[y] to the class y: no part needs
    another. After ``steps`` such steps come ``recovery_steps`` of plain training, in
    which the pipeline is whole; with none of these all steps are alike.

    Attributes:
        steps: Steps in which parts learn by themselves.
        classes: Rows of a table; None for as many as the model gives scores.
        recovery_steps: Steps of plain training behind them.
        inputs: What a part is given: ``labels``, S_(p-1)[y]; or ``outputs``, what the
            part before it makes of the sample, which is sent forward.
        scale: Value of what is not 0 in a table.
        seed: Of the tables.
    """

    of_classes: ClassVar[bool] = True

    kind: Literal["synthetic_labels"] = "synthetic_labels"
    steps: Count = 1000
    classes: Annotated[int, Field(ge=2, le=10**6)] | None = None
    recovery_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    inputs: Literal["labels", "outputs"] = "labels"
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps of parts by themselves, and of plain training, if there are any."""
        if not self.recovery_steps:
            return {"apart": 1.0}
        apart = self.steps / (self.steps + self.recovery_steps)
        return {"apart": apart, "recovery": 1 - apart}

    def phase(self, step: int) -> str:
        """Name of the phase that a step is of; there may be more steps than were said.

        Args:
            step: Number of the step, from 0.
        """
        recovers = self.recovery_steps and step >= self.steps
        return "recovery" if recovers else "apart"


METHODS = (
    Method(
        kind="synthetic_labels",
        slot="learning",
        document=SyntheticLabels,
        words="stages learn by themselves for {steps} steps, from synthetic labels",
        inexact="each part follows a loss of its own",
        limits=(parts_alone,),
        presets={"sil": SyntheticLabels()},
        prices="planner.cost.learning.synthetic_labels:SyntheticLabelsPricing",
        runs="executors.learning.synthetic_labels:SyntheticLabelsStep",
        page="methods/synthetic-labels.md",
        test="tests/distributed/test_synthetic_labels.py",
        source="Partitioned NN training via synthetic intermediate labels, 2403.11204",
    ),
)
