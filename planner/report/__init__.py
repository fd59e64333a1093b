"""A plan to look at: HTML, Markdown, a trace, and the data they are drawn from.

Names resolve lazily: ``meshwright run`` lays measurements beside a plan, and needs
neither the cost model nor the simulator for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.report.build import build_report
    from planner.report.data import ReportData
    from planner.report.markdown import markdown_page
    from planner.report.page import html_page
    from planner.report.trace import chrome_trace
    from planner.report.write import (
        write_queue_report,
        write_report,
        write_stream_reports,
    )

_HOMES = {
    "ReportData": "planner.report.data",
    "build_report": "planner.report.build",
    "chrome_trace": "planner.report.trace",
    "html_page": "planner.report.page",
    "markdown_page": "planner.report.markdown",
    "write_queue_report": "planner.report.write",
    "write_report": "planner.report.write",
    "write_stream_reports": "planner.report.write",
}

__all__ = [
    "ReportData",
    "build_report",
    "chrome_trace",
    "html_page",
    "markdown_page",
    "write_queue_report",
    "write_report",
    "write_stream_reports",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
