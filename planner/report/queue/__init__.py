"""Queues to look at: journals of ``meshwright serve`` and elastic streams."""

from planner.report.queue.data import QueueReport, read_elastic, read_queue_report
from planner.report.queue.page import queue_page
from planner.report.queue.tables import queue_markdown

__all__ = [
    "QueueReport",
    "queue_markdown",
    "queue_page",
    "read_elastic",
    "read_queue_report",
]
