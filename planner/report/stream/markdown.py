"""The report of job streams as Markdown, for an issue or a pull request."""

from __future__ import annotations

from planner.report.markdown import plain_text, table_text
from planner.report.stream.build import StreamReport
from planner.report.stream.tables import (
    TextTable,
    models_table,
    policies_table,
    streams_table,
)
from planner.report.stream.words import happened, title

__all__ = ["stream_markdown"]


def stream_markdown(report: StreamReport) -> str:
    """What happened, policies side by side, each stream, each model; no figures.

    Args:
        report: Of all streams.
    """
    cluster = plain_text(report.first.cluster.name)
    parts = [
        f"## {plain_text(title(report))} on {cluster}",
        plain_text(happened(report)),
    ]
    if report.totals:
        parts.append(_part("Policies", policies_table(report)))
    if len(report.streams) > 1:
        parts.append(_part("Streams", streams_table(report)))
    parts.append(_part("Models", models_table(report)))
    parts.append(f"<sub>Meshwright {plain_text(report.version)}</sub>")
    return "\n\n".join(parts) + "\n"


def _part(heading: str, told: TextTable) -> str:
    rows = [
        [
            f"**{plain_text(cell)}**"
            if index == told.won and cell
            else plain_text(cell)
            for cell in row
        ]
        for index, row in enumerate(told.rows)
    ]
    header = [plain_text(name) for name in told.header]
    text = table_text(header, rows, names=told.names)
    return f"### {heading}\n\n{plain_text(told.caption)}.\n\n{text}"
