"""Job streams to look at: pages, Markdown and traces of recorded episodes."""

from planner.report.stream.build import build_stream_report, read_streams
from planner.report.stream.data import StreamData, stream_sums
from planner.report.stream.page import stream_page
from planner.report.stream.tables import stream_markdown

__all__ = [
    "StreamData",
    "build_stream_report",
    "read_streams",
    "stream_markdown",
    "stream_page",
    "stream_sums",
]
