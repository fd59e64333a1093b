"""Reports of job streams as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from planner.report.places import require_places
from planner.report.stream.build import StreamReport, build_stream_report
from planner.report.stream.markdown import stream_markdown
from planner.report.stream.page import stream_page
from planner.report.stream.sheet import stream_sheet
from planner.report.stream.trace import stream_trace
from planner.schema.base import write_atomically
from planner.schema.stream import StreamRecord

__all__ = ["STREAM_FORMATS", "write_stream_reports"]

_MAKERS: dict[str, Callable[[StreamReport], bytes]] = {
    "html": lambda report: stream_page(report).encode(),
    "md": lambda report: stream_markdown(report).encode(),
    "perfetto": lambda report: stream_trace(report).encode(),
    "png": lambda report: stream_sheet(report, "png"),
    "svg": lambda report: stream_sheet(report, "svg"),
}
#: What a report of job streams can be written as.
STREAM_FORMATS = tuple(_MAKERS)


def write_stream_reports(
    records: Sequence[StreamRecord], paths: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Write a report in several forms; none of them unless all of them can be made.

    Args:
        records: Of one world on one cluster; of several policies, to be laid side by
            side on the same streams.
        paths: Of each form its file, keys of :data:`STREAM_FORMATS`.

    Raises:
        UnknownNameError: If a form is not known.
        PlanFileError: If a file cannot be written, two are the same, a form cannot
            show the records, or they do not go together.
    """
    require_places(paths, STREAM_FORMATS)
    report = build_stream_report(records)
    made = {form: _MAKERS[form](report) for form in paths}
    for form, path in paths.items():
        write_atomically(path, made[form])
