"""The command ``meshwright export``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planner.cli.options import CalibrationName, OtherModelName, model_of_plan
from planner.cli.output import emit_json, emit_table, emit_text, note, working
from planner.errors import ExportError, PlanFileError

if TYPE_CHECKING:
    from planner.replan import Replanned
    from planner.schema import Plan

__all__ = ["ExportCommand"]

_RUNS = {"meshwright": "Meshwright's executors", "itself": "itself"}


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a plan as another launcher takes it, or list the launchers."""

    plan: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PLAN", help_behavior_hint=""),
    ] = None
    """A plan file."""
    to: Annotated[
        str | None, tyro.conf.arg(metavar="TARGET", help_behavior_hint="")
    ] = None
    """Who is to train by it: json (the plan alone), torchrun, megatron, … ; --list."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = "."
    """Folder to write into; it is made if missing."""
    force: bool = False
    """Write over files of the same names with other contents."""
    nearest: bool = False
    """If the target cannot say the plan, plan the same work again within its limits,
    and say what that changes and costs."""
    model: OtherModelName = None
    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="CLUSTER", help_behavior_hint="")
    ] = None
    """With --nearest: the machines, if the plan does not say where they come from."""
    calibration: CalibrationName = "shipped"
    list: bool = False
    """List the targets: version, who runs the plan, what they cannot say."""
    json: bool = False
    """Print the written paths, or the list, as JSON."""

    def run(self) -> None:
        """Export and print the paths, or list the targets.

        Raises:
            PlanFileError: If no plan is named.
            ExportError: If no target is named, or it cannot say the plan.
        """
        if self.list:
            self._emit_targets()
            return
        if self.plan is None:
            raise PlanFileError("no plan is named; give PLAN, or --list for targets")
        if self.to is None:
            raise ExportError("no target is named; give --to TARGET, see --list")
        from planner.schema import Plan

        plan = Plan.load(self.plan)
        if plan.provenance.target == self.to:
            note(f"{self.plan} was planned within the limits of {self.to}")
        again = self._replanned(plan, self.plan, self.to) if self.nearest else None
        made = plan if again is None else again.plan
        paths = made.export(self.to, self.out, force=self.force)
        if not self.json:
            told = [again.text()] if again is not None else []
            emit_text("\n".join([*told, *paths]))
        elif self.nearest:
            emit_json({"paths": [*paths], **_as_data(plan, again)})
        else:
            emit_json([*paths])

    def _replanned(self, plan: Plan, file: str, to: str) -> Replanned | None:
        """The plan again, within limits; None if the target can say it as it is."""
        from planner.export import export_files

        try:
            export_files(plan, to)
        except ExportError as error:
            note(str(error))
        else:
            note(f"{to} can say the plan as it is")
            return None
        with working(f"planning again within the limits of {to}"):
            from planner.replan import replan_within

            # A reference of the plan is followed without running code of its own.
            model = model_of_plan(plan, file, self.model)
            return replan_within(
                plan,
                to,
                model=model if self.model is not None else None,
                cluster=self.cluster,
                calibration=self.calibration,
            )

    def _emit_targets(self) -> None:
        from planner.export import exporter_names
        from planner.targets import FIELDS, get_target

        found = [get_target(name) for name in exporter_names()]
        if self.json:
            emit_json(
                [
                    {
                        "name": one.name,
                        "title": one.title,
                        "version": one.version,
                        "runs": one.runs,
                        "says": sorted(one.says),
                        "leaves": sorted(one.leaves),
                        "fields": len(FIELDS),
                        "cannot": [*one.cannot],
                        "check": one.check,
                    }
                    for one in found
                ]
            )
            return
        emit_table(
            ["target", "version", "trained by", "cannot say"],
            [
                [
                    one.name,
                    f"{one.title} {one.version}",
                    _RUNS[one.runs],
                    "; ".join(one.cannot) or "-",
                ]
                for one in found
            ],
        )


def _as_data(plan: Plan, again: Replanned | None) -> dict[str, Any]:
    before = plan.prediction.step_time_s
    return {
        "replanned": again is not None,
        "step_time_s": {
            "before": before,
            "after": again.plan.prediction.step_time_s if again else before,
        },
        "dropped_pins": [*again.dropped] if again else [],
        "changes": [*again.changes] if again else [],
    }
