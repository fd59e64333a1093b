"""Reports as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from planner.calibration.choice import CalibrationChoice
from planner.cluster import Cluster
from planner.errors import PlanFileError
from planner.graph import ModelGraph
from planner.report.build import build_report
from planner.report.data import ReportData
from planner.report.markdown import markdown_page
from planner.report.page import html_page
from planner.report.places import require_places
from planner.report.sheet import sheet_of_one
from planner.report.trace import trace_json
from planner.schema import Plan
from planner.schema.base import write_atomically
from planner.schema.measurement import Measurement

__all__ = ["FORMATS", "write_report", "write_reports"]


def _html(reports: Sequence[ReportData], names: Sequence[str]) -> bytes:
    return html_page(reports, names).encode()


def _markdown(reports: Sequence[ReportData], names: Sequence[str]) -> bytes:
    return markdown_page(reports, names).encode()


def _perfetto(reports: Sequence[ReportData], names: Sequence[str]) -> bytes:
    return trace_json(reports, names).encode()


_MAKERS: dict[str, Callable[[Sequence[ReportData], Sequence[str]], bytes]] = {
    "html": _html,
    "md": _markdown,
    "perfetto": _perfetto,
    "png": lambda reports, _: sheet_of_one(reports, "png"),
    "svg": lambda reports, _: sheet_of_one(reports, "svg"),
}
#: What a report can be written as.
FORMATS = tuple(_MAKERS)


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    against: Plan | None = None,
    names: Sequence[str] = ("first", "second"),
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = None,
    measurements: Sequence[Measurement | None] = (),
) -> None:
    """Write what a plan is, and why, as one HTML file that needs nothing else.

    Args:
        plan: What to report on.
        path: Of the file.
        against: A second plan, to be laid beside the first.
        names: What to call the two.
        model: As for :func:`planner.report.build_report`, of both plans.
        cluster: The same.
        calibration: The same.
        measurements: Of runs of the plans, in their order.

    Raises:
        PlanFileError: If the file cannot be written, or what is given is not the
            plan's.
        MeshwrightError: If what is named cannot be read.
    """
    write_reports(
        plan,
        {"html": path},
        against=against,
        names=names,
        model=model,
        cluster=cluster,
        calibration=calibration,
        measurements=measurements,
    )


def write_reports(
    plan: Plan,
    paths: Mapping[str, str | os.PathLike[str]],
    *,
    against: Plan | None = None,
    names: Sequence[str] = ("first", "second"),
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = None,
    measurements: Sequence[Measurement | None] = (),
) -> None:
    """Write a report in several forms; none of them unless all of them can be made.

    Args:
        plan: What to report on.
        paths: Of each form its file, keys of :data:`FORMATS`.
        against: A second plan, to be laid beside the first.
        names: What to call the two.
        model: As for :func:`planner.report.build_report`, of both plans.
        cluster: The same.
        calibration: The same.
        measurements: Of runs of the plans, in their order.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, two are the same, a form cannot
            show the plan, or what is given is not the plan's.
        MeshwrightError: If what is named cannot be read.
    """
    require_places(paths, FORMATS)
    plans = [plan] if against is None else [plan, against]
    if len(measurements) > len(plans):
        raise PlanFileError(
            f"{len(measurements)} measurements for {len(plans)} "
            f"{'plan' if len(plans) == 1 else 'plans'}; give one a plan at most"
        )
    runs = [*measurements, *[None] * (len(plans) - len(measurements))]
    reports = [
        build_report(
            each,
            model=model,
            cluster=cluster,
            calibration=calibration,
            measurement=run,
        )
        for each, run in zip(plans, runs, strict=True)
    ]
    made = {form: _MAKERS[form](reports, names) for form in paths}
    for form, path in paths.items():
        write_atomically(path, made[form])
