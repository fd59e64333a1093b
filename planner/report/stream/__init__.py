"""Job streams to look at: pages, Markdown and traces of recorded episodes."""

from planner.report.stream.build import build_stream_report, read_streams
from planner.report.stream.data import StreamData, stream_sums
from planner.report.stream.markdown import stream_markdown
from planner.report.stream.page import stream_page
from planner.report.stream.write import write_stream_reports

__all__ = [
    "StreamData",
    "build_stream_report",
    "read_streams",
    "stream_markdown",
    "stream_page",
    "stream_sums",
    "write_stream_reports",
]
