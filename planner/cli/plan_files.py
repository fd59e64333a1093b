"""Commands on plan files: explain, export, report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planner.cli.options import (
    CalibrationName,
    OptionalFile,
    OtherModelName,
    model_of_plan,
)
from planner.cli.output import emit_json, emit_table, emit_text, note, working
from planner.errors import ExportError, PlanFileError
from planner.schema.base import require_writable

if TYPE_CHECKING:
    from planner.replan import Replanned
    from planner.schema import Plan

__all__ = ["ExplainCommand", "ExportCommand", "ReportCommand"]


@dataclass(frozen=True, kw_only=True)
class ExplainCommand:
    """Explain a plan, or list the differences of two plans."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A plan file."""
    against: OptionalFile = None
    """A second plan: list only the fields that differ."""
    json: bool = False
    """Print prediction and provenance (or the differences) as JSON."""

    def run(self) -> None:
        """Load and print."""
        from planner.schema import Plan

        plan = Plan.load(self.plan)
        if self.against is not None:
            differences = plan.diff(Plan.load(self.against))
            if self.json:
                emit_json(list(differences))
            else:
                emit_text("\n".join(differences) or "the plans are equal")
            return
        if self.json:
            data = plan.to_data()
            emit_json({part: data[part] for part in ("prediction", "provenance")})
        else:
            emit_text(plan.explain())


_RUNS = {"meshwright": "Meshwright's executors", "itself": "itself"}


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a plan as files of another launcher, or list the launchers."""

    plan: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PLAN", help_behavior_hint=""),
    ] = None
    """A plan file."""
    to: Annotated[
        str | None, tyro.conf.arg(metavar="TARGET", help_behavior_hint="")
    ] = None
    """Target: json (the plan alone), torchrun, megatron, …; --list names all."""
    out: Annotated[str, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")] = "."
    """Folder to write into; it is made if missing."""
    force: bool = False
    """Overwrite files of the same names with other contents."""
    nearest: bool = False
    """If the target cannot express the plan, plan again within its limits."""
    model: OtherModelName = None
    cluster: Annotated[
        str | None, tyro.conf.arg(metavar="CLUSTER", help_behavior_hint="")
    ] = None
    """With --nearest: the cluster, if the plan has no reference to it."""
    calibration: CalibrationName = "shipped"
    list: bool = False
    """List the targets: version, trainer, and limits."""
    json: bool = False
    """Print the written paths, or the list, as JSON."""

    def run(self) -> None:
        """Export and print the paths, or list the targets.

        Raises:
            PlanFileError: If no plan is named.
            ExportError: If no target is named, or it cannot express the plan.
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
        """Plan again within limits; None if the target can express the plan."""
        from planner.export import export_files

        try:
            export_files(plan, to)
        except ExportError as error:
            note(str(error))
        else:
            note(f"{to} can express the plan as it is")
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
                        "cannot": [*one.limits],
                        "check": one.check,
                    }
                    for one in found
                ]
            )
            return
        emit_table(
            ["target", "version", "trained by", "limits"],
            [
                [
                    one.name,
                    f"{one.title} {one.version}",
                    _RUNS[one.runs],
                    "; ".join(one.limits) or "-",
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


OtherClusterName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="CLUSTER",
        help="The plan's cluster, if it cannot be read from the plan's reference.",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Report on a plan, two plans side by side, job streams, or a served queue."""

    plans: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PLAN [PLAN] | FOLDER ..."),
    ]
    """One or two plan files, files or folders that evaluate --record wrote, or the
    folder of a journal that serve wrote."""
    out: Annotated[
        str | None,
        tyro.conf.arg(
            aliases=["-o"],
            metavar="FILE",
            help="Write an HTML page; report.html if no other form is given.",
            help_behavior_hint="",
        ),
    ] = None
    md: OptionalFile = None
    """Write Markdown, for an issue or a pull request."""
    perfetto: OptionalFile = None
    """Write the step as a trace for ui.perfetto.dev."""
    png: OptionalFile = None
    """Write a sheet of figures for a paper; needs meshwright[figures]."""
    svg: OptionalFile = None
    """Write the sheet of figures as SVG."""
    measurement: Annotated[
        tuple[str, ...], tyro.conf.arg(metavar="FILE", help_behavior_hint="")
    ] = ()
    """Files that meshwright run --measurement wrote, one a plan."""
    model: OtherModelName = None
    cluster: OtherClusterName = None
    calibration: OptionalFile = None
    """Fitted constants that priced the plan, if they are not the shipped ones."""
    json: bool = False
    """Print the written paths as JSON."""

    def run(self) -> None:
        """Read all there is, then write.

        Raises:
            PlanFileError: If there are no plans or more than two, or files are wrong.
        """
        paths = self._paths()
        for path in paths.values():
            require_writable(path)
        with working(f"writing {', '.join(paths.values())}"):
            if any(map(_is_journal, self.plans)):
                if len(self.plans) > 1:
                    raise PlanFileError(
                        f"{len(self.plans)} folders; name one journal of meshwright "
                        f"serve"
                    )
                self._report_queue(paths, "journals")
            elif any(_is_record(path, b"elastic-stream") for path in self.plans):
                self._report_queue(paths, "elastic streams")
            elif any(_is_record(path, b"job-stream") for path in self.plans):
                self._report_streams(paths)
            else:
                self._report_plans(paths)
        if self.json:
            emit_json(list(paths.values()))
        else:
            emit_text("\n".join(paths.values()))

    def _report_queue(self, paths: dict[str, str], what: str) -> None:
        from planner.report import write_queue_report

        self._refuse_plans_options(what)
        write_queue_report(self.plans, paths)

    def _report_streams(self, paths: dict[str, str]) -> None:
        from planner.report import write_stream_reports
        from planner.report.stream import read_streams

        self._refuse_plans_options("job streams")
        write_stream_reports(read_streams(self.plans), paths)

    def _refuse_plans_options(self, what: str) -> None:
        given = {
            "--measurement": self.measurement,
            "--model": self.model,
            "--cluster": self.cluster,
            "--calibration": self.calibration,
        }
        for flag, value in given.items():
            if value:
                raise PlanFileError(
                    f"{flag} is for reports of plans; leave it out for {what}"
                )

    def _report_plans(self, paths: dict[str, str]) -> None:
        from planner.report import write_report
        from planner.schema import Plan
        from planner.schema.measurement import Measurement

        if not 1 <= len(self.plans) <= 2:
            raise PlanFileError(
                f"{len(self.plans)} plans; name one, or two to lay side by side"
            )
        plans = [Plan.load(path) for path in self.plans]
        runs = [Measurement.load(path) for path in self.measurement]
        write_report(
            plans[0],
            paths,
            against=plans[1] if len(plans) > 1 else None,
            names=_names(self.plans),
            model=self.model,
            cluster=self.cluster,
            calibration=self.calibration,
            measurements=runs,
        )

    def _paths(self) -> dict[str, str]:
        """Form to file, the page first."""
        asked = {
            "html": self.out,
            "md": self.md,
            "perfetto": self.perfetto,
            "png": self.png,
            "svg": self.svg,
        }
        paths = {form: path for form, path in asked.items() if path is not None}
        return paths or {"html": "report.html"}


def _names(paths: tuple[str, ...]) -> tuple[str, ...]:
    """File names; with their folders where these are all that differs."""
    short = tuple(Path(path).name for path in paths)
    return short if len(set(short)) == len(short) else paths


def _is_journal(path: str) -> bool:
    """Return True for a folder of meshwright serve."""
    return (Path(path) / "journal.sqlite").is_file()


def _is_record(path: str, world: bytes) -> bool:
    """Return True for a record of a stream, and for a folder of such."""
    place = Path(path)
    if place.is_dir():
        files = sorted(place.glob("*.json"))
        # What has no record at all is told of as a folder of job streams.
        return any(_is_record(str(file), world) for file in files) or (
            world == b"job-stream"
        )
    if not place.is_file():
        return False
    with place.open("rb") as stream:
        # The world is the second field of what evaluate writes.
        return b'"world": "' + world in stream.read(4096)
