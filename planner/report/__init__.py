"""A plan to look at: HTML, and the data that figures and text are drawn from."""

from planner.report.build import build_report
from planner.report.data import ReportData

__all__ = ["ReportData", "build_report"]
