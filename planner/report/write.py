"""Reports of plans and of job streams as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from planner.cluster import Cluster
from planner.errors import PlanFileError, UnknownNameError
from planner.graph import ModelGraph
from planner.measurements.store import CalibrationChoice
from planner.schema import Plan
from planner.schema.base import require_writable, write_atomically
from planner.schema.measurement import Measurement
from planner.schema.stream import StreamRecord

__all__ = ["FORMATS", "write_queue_report", "write_report", "write_stream_reports"]

#: Forms of a report.
FORMATS = ("html", "md", "perfetto", "png", "svg")


def write_report(
    plan: Plan,
    paths: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]],
    *,
    against: Plan | None = None,
    names: Sequence[str] = ("first", "second"),
    model: ModelGraph | str | None = None,
    cluster: Cluster | str | None = None,
    calibration: CalibrationChoice = None,
    measurements: Sequence[Measurement | None] = (),
) -> None:
    """Write the report of a plan, or of two side by side.

    Of several forms none is written unless all of them can be made.

    Args:
        plan: The plan to report on.
        paths: File for an HTML page that needs nothing else; or the file of each
            wanted form, by its name in :data:`FORMATS`.
        against: A second plan, to be laid beside the first.
        names: Names of the two plans.
        model: Model of both plans, as for :func:`planner.report.build_report`.
        cluster: Cluster of both plans.
        calibration: Constants of both plans.
        measurements: Measurements of runs of the plans, in their order.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, two are the same, a form cannot
            show the plan, or what is given is not the plan's.
        MeshwrightError: If what is named cannot be read.
    """
    if not isinstance(paths, Mapping):
        paths = {"html": paths}
    _require_places(paths)
    from planner.report.build import build_report
    from planner.report.figures import figure_sheet
    from planner.report.markdown import markdown_page
    from planner.report.page import html_page
    from planner.report.trace import trace_json

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
    _write(
        paths,
        {
            "html": lambda: html_page(reports, names).encode(),
            "md": lambda: markdown_page(reports, names).encode(),
            "perfetto": lambda: trace_json(reports, names).encode(),
            "png": lambda: figure_sheet(reports, "png"),
            "svg": lambda: figure_sheet(reports, "svg"),
        },
    )


def write_stream_reports(
    records: Sequence[StreamRecord], paths: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Write a report of job streams in several forms; none unless all can be made.

    Args:
        records: Records of one world on one cluster; those of several policies are
            laid side by side on the same streams.
        paths: File of each wanted form, by its name in :data:`FORMATS`.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, two are the same, a form cannot
            show the records, or they do not go together.
    """
    _require_places(paths)
    from planner.report.stream.build import build_stream_report
    from planner.report.stream.page import stream_page
    from planner.report.stream.sheet import stream_sheet
    from planner.report.stream.tables import stream_markdown
    from planner.report.trace import stream_trace

    report = build_stream_report(records)
    _write(
        paths,
        {
            "html": lambda: stream_page(report).encode(),
            "md": lambda: stream_markdown(report).encode(),
            "perfetto": lambda: stream_trace(report).encode(),
            "png": lambda: stream_sheet(report, "png"),
            "svg": lambda: stream_sheet(report, "svg"),
        },
    )


def write_queue_report(
    folders: Sequence[str], paths: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Write a report of a journal of ``meshwright serve``, or of elastic streams.

    Args:
        folders: Folder of one journal; or records of elastic streams, or their folders.
        paths: File of each wanted form, ``html`` and ``md``.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, two are the same, a form cannot
            show a queue, or a record cannot be read.
        JournalError: If the journal cannot be read.
    """
    _require_places(paths)
    from planner.report.queue.data import read_elastic, read_queue_report
    from planner.report.queue.page import queue_page
    from planner.report.queue.tables import queue_markdown

    for form in paths:
        if form not in ("html", "md"):
            raise PlanFileError(
                f"queues have no {form} report; write html (-o) or Markdown (--md)"
            )
    if (Path(folders[0]) / "journal.sqlite").is_file():
        reports = [read_queue_report(folders[0])]
    else:
        reports = [*read_elastic(folders)]
    _write(
        paths,
        {
            "html": lambda: queue_page(reports).encode(),
            "md": lambda: queue_markdown(reports).encode(),
        },
    )


def _require_places(paths: Mapping[str, str | os.PathLike[str]]) -> None:
    """Refuse forms and files before the long work.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, or is named twice, or if a PNG is
            asked for and cannot be made.
    """
    taken: dict[Path, str] = {}
    for form, path in paths.items():
        if form not in FORMATS:
            raise UnknownNameError("form of a report", form, FORMATS)
        if form == "png":
            from planner.report.svg import require_renderer

            require_renderer()
        require_writable(path)
        other = taken.setdefault(Path(path).resolve(), form)
        if other != form:
            raise PlanFileError(
                f"{path} is named for both {other} and {form}; name a file for each"
            )


def _write(
    paths: Mapping[str, str | os.PathLike[str]],
    makers: Mapping[str, Callable[[], bytes]],
) -> None:
    made = {form: makers[form]() for form in paths}
    for form, path in paths.items():
        write_atomically(path, made[form])
