"""Reports as files."""

from __future__ import annotations

import os
from collections.abc import Sequence

from planner.calibration.choice import CalibrationChoice
from planner.cluster import Cluster
from planner.errors import PlanFileError
from planner.graph import ModelGraph
from planner.report.build import build_report
from planner.report.page import html_page
from planner.schema import Plan
from planner.schema.base import write_atomically
from planner.schema.measurement import Measurement

__all__ = ["write_report"]


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
    write_atomically(path, html_page(reports, names).encode())
