"""A plan to look at: HTML, and the data that figures and text are drawn from.

Names resolve lazily: ``meshwright run`` lays measurements beside a plan, and needs
neither the cost model nor the simulator for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.report.build import build_report
    from planner.report.data import ReportData
    from planner.report.page import html_page
    from planner.report.write import write_report

_HOMES = {
    "ReportData": "planner.report.data",
    "build_report": "planner.report.build",
    "html_page": "planner.report.page",
    "write_report": "planner.report.write",
}

__all__ = ["ReportData", "build_report", "html_page", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'planner.report' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
