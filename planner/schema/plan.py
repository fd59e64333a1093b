"""The Plan: a chosen strategy, made executable and portable."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from planner.plugins import load_object
from planner.schema.base import Document
from planner.schema.describe import diff, explain, summary
from planner.schema.plan_parts import (
    Certificate,
    ClusterReference,
    ModelReference,
    Prediction,
    Provenance,
    Seconds,
    Workload,
)
from planner.schema.strategy import Strategy
from planner.schema.violations import batch_norm_violation, stream_violation

__all__ = ["Plan"]


class Plan(Document):
    """All that an executor or another launcher needs to train a model.

    ``certificate`` says what training a small twin of it showed; None if that was not
    asked for. ``timing_s`` holds wall-clock times of planning; it is left out of
    :meth:`canonical_bytes`, so that equal requests give equal bytes.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "plan"
    CLOCK_FIELDS: ClassVar[frozenset[str]] = frozenset({"timing_s"})

    schema_version: Literal[1] = 1
    model: ModelReference
    cluster: ClusterReference
    workload: Workload
    strategy: Strategy
    prediction: Prediction
    provenance: Provenance
    #: Why Meshwright's own executors cannot run it; empty if they can.
    not_runnable: tuple[str, ...] = ()
    certificate: Certificate | None = None
    timing_s: dict[str, Seconds] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _right_for_the_model(self) -> Plan:
        model, strategy = self.model, self.strategy
        violations = (
            stream_violation(
                strategy.sharding, whole_stream=model.whole_stream, mixing=model.mixing
            ),
            batch_norm_violation(strategy, model.batch_norm_values),
        )
        for violation in violations:
            if violation is not None:
                raise ValueError(violation)
        return self

    @model_validator(mode="after")
    def _parts_agree(self) -> Plan:
        have, want = self.strategy.global_batch, self.workload.global_batch
        if have != want:
            raise ValueError(
                f"strategy trains {have} samples a step "
                f"(microbatch_size x num_microbatches x data parallel), the workload "
                f"says global_batch={want}"
            )
        last = max(self.strategy.device_ids())
        if last >= self.cluster.num_devices:
            raise ValueError(
                f"strategy uses device {last}, the cluster has devices 0 to "
                f"{self.cluster.num_devices - 1}"
            )
        ranks = [entry.rank for entry in self.prediction.memory]
        if ranks != list(range(self.strategy.mesh.pp)):
            raise ValueError(
                f"prediction.memory has an entry for pp ranks {ranks}, the mesh has "
                f"pp={self.strategy.mesh.pp}: give one a rank, in order"
            )
        return self

    def summary(self) -> str:
        """Return a few lines for readers: the strategy, its speed, its memory."""
        return summary(self)

    def explain(self) -> str:
        """Return the reasons for this plan: its bottleneck, and the runners-up."""
        return explain(self)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """Return the differences of two plans as ``path: ours -> theirs``.

        Wall-clock times are left out; lists that differ in length are shown as a whole.
        """
        return diff(self, other)

    def export(
        self, target: str, out: str | os.PathLike[str], *, force: bool = False
    ) -> tuple[str, ...]:
        """Write what a launcher takes as it is.

        Args:
            target: ``torchtitan``, ``slurm``, … ; ``meshwright export --list``.
            out: Folder; it is made if missing.
            force: Write over files of the same names with other contents.

        Returns:
            Paths written.
        Raises:
            UnknownNameError: If there is no such target.
            ExportError: If the target cannot express the plan.
            PlanFileError: If the folder cannot be written, or holds other content.
        """
        # By name: documents know nothing of those who write them for launchers.
        export = load_object("planner.export:export")
        written: tuple[str, ...] = export(self, target, out, force=force)
        return written
