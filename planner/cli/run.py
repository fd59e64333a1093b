"""``meshwright run``"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from planner.cli.output import emit_json, emit_table, emit_text, note, progress
from planner.errors import ExecutionError, PlanFileError
from planner.schema import Plan

__all__ = ["RunCommand"]


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Train by a plan: on local processes, or as one rank under torchrun."""

    plan: Annotated[str, tyro.conf.Positional]
    """A plan file."""
    steps: int = 10
    """Optimizer steps."""
    model: str | None = None
    """Where to build the model from, if not from where the plan says. A
    module:factory reference is only ever followed when it is named here."""
    data: str | None = None
    """Token ids, a one-dimensional integer .npy file; synthetic tokens by default."""
    seed: int = 0
    """Of weights and data order."""
    measure: bool = False
    """Lay predicted beside measured: step time, memory, bytes on the wire."""
    measurement: str | None = None
    """Where to write the measurement as JSON."""
    force: bool = False
    """Run although model or cluster are not those of the plan."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Start the processes (or be one of them), report, clean up."""
        plan = Plan.load(self.plan)
        arguments = {
            "plan": os.path.abspath(self.plan),
            "model": self._model(plan),
            "data": os.path.abspath(self.data) if self.data else None,
            "steps": self.steps,
            "seed": self.seed,
            "measure": self.measure or self.measurement is not None,
            "force": self.force,
        }
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            from planner.cli.rank import train_rank

            result = train_rank(arguments, lambda message: None)
            if os.environ["RANK"] == "0":
                self._report(plan, result)
            return
        self._check_cluster(plan)
        self._report(plan, self._launch(plan, arguments))

    def _model(self, plan: Plan) -> str:
        ref = self.model or plan.model.ref
        if ref is None:
            raise PlanFileError(
                f"{self.plan} does not say where {plan.model.name} comes from; name it "
                f"with --model (llama3-8b, hf:PATH or module:factory)"
            )
        if self.model is None and not ref.startswith("hf:") and ":" in ref:
            raise PlanFileError(
                f"{self.plan} wants to import code ({ref}); if you trust it, name it "
                f"yourself: --model {ref}"
            )
        return ref

    def _check_cluster(self, plan: Plan) -> None:
        """The machine must be the planned one; differences are shown."""
        from planner.cluster import Cluster

        processes = plan.strategy.mesh.num_devices
        here = Cluster.detect(processes=plan.cluster.num_devices)
        if here.fingerprint == plan.cluster.fingerprint or self.force:
            return
        found = here.reference()
        differences = [
            f"{name} {ours!r} in the plan, {theirs!r} here"
            for name, ours, theirs in (
                ("device types", plan.cluster.device_types, found.device_types),
                ("devices", plan.cluster.num_devices, found.num_devices),
            )
            if ours != theirs
        ]
        raise PlanFileError(
            f"the plan is for {plan.cluster.name}, not for this machine: "
            f"{'; '.join(differences) or 'hosts are arranged differently'}; plan for "
            f"local:{processes}, or --force to run all the same"
        )

    def _launch(self, plan: Plan, arguments: dict[str, Any]) -> dict[str, Any]:
        from executors.launch import launch

        processes = plan.strategy.mesh.num_devices
        note(f"starting {processes} processes: {plan.strategy.label()}")
        with progress(self.steps, "step") as bar:

            def heard(rank: int, message: Any) -> None:
                if rank == 0 and "loss" in message:
                    bar.set_postfix_str(f"loss {message['loss']:.4f}")
                    bar.update(1)

            results = launch(
                "planner.cli.rank:train_rank",
                arguments,
                processes=processes,
                on_message=heard,
            )
        return dict(results[0])

    def _report(self, plan: Plan, result: dict[str, Any]) -> None:
        from planner.cli.comparison import compare

        measured = result.get("measurement")
        if self.measurement is not None and measured is not None:
            from planner.schema.measurement import Measurement

            Measurement.from_data(measured).save(self.measurement)
            note(f"wrote {self.measurement}")
        rows = compare(plan, measured) if measured is not None else []
        if self.json:
            emit_json({**result, "comparison": [row.to_dict() for row in rows]})
            return
        losses = result["losses"]
        if not losses:
            raise ExecutionError("the run reported no loss; run it with steps >= 1")
        emit_text(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on "
            f"{plan.strategy.mesh.num_devices} processes ({plan.strategy.label()})"
        )
        if rows:
            emit_table(
                "",
                ("", "predicted", "measured", "ratio"),
                [row.cells() for row in rows],
            )
