"""The command ``meshwright report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from planner.cli.options import OptionalFile, OtherModelName
from planner.cli.output import emit_json, emit_text, working
from planner.errors import PlanFileError
from planner.schema.base import require_writable

__all__ = ["ReportCommand"]

OtherClusterName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="CLUSTER",
        help="The plan's cluster, if it cannot be read from where the plan says.",
        help_behavior_hint="",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write what a plan is, and why, to look at; two plans: side by side. Of folders of
    records: what became of streams of jobs.
    """

    plans: Annotated[
        tuple[str, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PLAN [PLAN] | FOLDER ..."),
    ]
    """One plan file, or two; or folders or files that evaluate --record wrote."""
    out: Annotated[
        str | None,
        tyro.conf.arg(
            aliases=["-o"],
            metavar="FILE",
            help="Write an HTML page; report.html if no other form is asked for.",
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
    """What meshwright run --measurement wrote, one file a plan."""
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
            if any(map(_is_record, self.plans)):
                self._report_streams(paths)
            else:
                self._report_plans(paths)
        if self.json:
            emit_json(list(paths.values()))
        else:
            emit_text("\n".join(paths.values()))

    def _report_streams(self, paths: dict[str, str]) -> None:
        from planner.report import write_stream_reports
        from planner.report.stream import read_streams

        given = {
            "--measurement": self.measurement,
            "--model": self.model,
            "--cluster": self.cluster,
            "--calibration": self.calibration,
        }
        for flag, value in given.items():
            if value:
                raise PlanFileError(
                    f"{flag} is for reports of plans; leave it out for job streams"
                )
        write_stream_reports(read_streams(self.plans), paths)

    def _report_plans(self, paths: dict[str, str]) -> None:
        from planner.report import write_reports
        from planner.schema import Plan
        from planner.schema.measurement import Measurement

        if not 1 <= len(self.plans) <= 2:
            raise PlanFileError(
                f"{len(self.plans)} plans; name one, or two to lay side by side"
            )
        plans = [Plan.load(path) for path in self.plans]
        runs = [Measurement.load(path) for path in self.measurement]
        write_reports(
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


def _is_record(path: str) -> bool:
    """Whether it is a folder, or a file that calls itself a record of a stream."""
    place = Path(path)
    if place.is_dir():
        return True
    if not place.is_file():
        return False
    with place.open("rb") as stream:
        # The world is the second field of what evaluate writes.
        return b'"world": "job-stream' in stream.read(4096)
