"""The report as Markdown, for an issue or a pull request: GitHub's dialect.

Names come from files that others wrote, so that none of them may end a table, open a
tag, mention somebody or link an issue.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence

from planner.report.data import ReportData, filled_share
from planner.report.tables import (
    TextTable,
    differences_table,
    measured_table,
    regimes_table,
    runners_up_table,
)
from planner.report.timeline import TimelineRow
from planner.schema.describe import assumed_kernels, facts, paragraph
from planner.units import format_bytes, format_seconds

__all__ = ["code_span", "markdown_page", "markdown_table", "plain_text"]

_COMPUTE = ("forward", "backward", "backward input", "backward weight")
_TALK = ("transfer", "communication")
#: Rows of a table; of longer ones the rest is counted.
_MOST_ROWS = 64


def plain_text(text: object) -> str:
    """One line of Markdown that reads as the text does."""
    line = _one_line(text)
    line = re.sub(r"[\\`*\[\]<>|~$&]", lambda sign: "\\" + sign[0], line)
    # Between letters an underscore is text already, and labels are easier to read.
    line = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", line)
    # An empty comment keeps GitHub from a mention or the link of an issue.
    line = re.sub(r"([@#])(?=\w)", r"\1<!-- -->", line)
    line = re.sub(r"^([#+=-])", r"\\\1", line)
    return re.sub(r"^(\d+)([.)])(?= |$)", r"\1\\\2", line)


def code_span(text: object) -> str:
    """The text as code in a cell of a table."""
    line = _one_line(text)
    if not line:
        return ""
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest or line == " " else ""
    # A row is cut at bars before code is looked for.
    return f"{fence}{space}{line.replace('|', chr(92) + '|')}{space}{fence}"


def _one_line(text: object) -> str:
    """Without line breaks and characters that cannot be seen."""
    seen = "".join(sign if sign.isprintable() else " " for sign in str(text))
    return " ".join(seen.split())


def _table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Container[int] = (),
) -> str:
    """A table of Markdown.

    Args:
        header: Markdown, as are the cells.
        rows: Rows, of which the first 64 are shown and the others counted.
        numbers: Columns that are flush right.
    """
    listed = list(rows)
    rule = ["--:" if i in numbers else "---" for i in range(len(header))]
    lines = [header, rule, *listed[:_MOST_ROWS]]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    left = len(listed) - _MOST_ROWS
    return text if left <= 0 else f"{text}\n\n… and {left:,} more"


def markdown_table(told: TextTable) -> str:
    """A table of text as Markdown; the best row is bold."""

    def cell(row: int, column: int, text: str) -> str:
        shown = code_span(text) if column in told.code else plain_text(text)
        return f"**{shown}**" if row == told.won and shown else shown

    rows = [
        [cell(index, column, text) for column, text in enumerate(row)]
        for index, row in enumerate(told.rows)
    ]
    return _table([plain_text(name) for name in told.header], rows, told.numbers)


def markdown_page(reports: Sequence[ReportData], names: Sequence[str] = ()) -> str:
    """The reports of one plan or two, one after the other.

    Args:
        reports: One or two.
        names: Names of two plans, for people: their files.
    """
    if len(reports) == 1:
        parts = _plan(reports[0], "", "##")
    else:
        parts = [_beside(reports, names)]
        for report, letter, name in zip(reports, "AB", names, strict=True):
            parts += _plan(report, f"{letter} {plain_text(name)}: ", "##")
    version = plain_text(reports[0].plan.provenance.meshwright_version)
    parts.append(f"<sub>Meshwright {version}</sub>")
    return "\n\n".join(part for part in parts if part) + "\n"


def _plan(report: ReportData, before: str, level: str) -> list[str]:
    plan = report.plan
    parts = [
        f"{level} {before}{plain_text(plan.model.name)} on "
        f"{plain_text(plan.cluster.name)}",
        code_span(plan.strategy.label()),
        plain_text(paragraph(plan)),
    ]
    parts += [
        f"**Meshwright cannot run it itself:** {plain_text(reason)}"
        for reason in plan.not_runnable
    ]
    told = [(name, plain_text(text)) for name, text in facts(plan).items()]
    parts.append(_table(("", ""), told))
    parts += [f"{level}# Time and memory by pp rank", _ranks(report)]
    if report.breakdown:
        rows = [
            (plain_text(part.name), format_seconds(part.seconds), f"{part.share:.1%}")
            for part in report.breakdown
        ]
        total = ("**step**", f"**{format_seconds(plan.prediction.step_time_s)}**", "")
        parts += [
            f"{level}# Where the time goes",
            _table(("on the critical path", "time", "share"), [*rows, total], (1, 2)),
        ]
        if plan.provenance.bound_by:
            parts.append(f"Bound by {plain_text(plan.provenance.bound_by)}.")
    if plan.prediction.leans_on:
        parts.append(f"{level}# What the time rests on without measured runs")
        parts.append("\n".join(f"- {plain_text(t)}" for t in plan.prediction.leans_on))
    if plan.provenance.alternatives:
        parts += [f"{level}# Runners-up", markdown_table(runners_up_table(report))]
    if plan.provenance.regimes:
        table = markdown_table(regimes_table(report))
        parts += [f"{level}# Other ways of training", table]
    if report.measured is not None:
        parts += [f"{level}# Measured", plain_text(report.measured.caveat)]
        parts.append(markdown_table(measured_table(report.measured, _MOST_ROWS)))
    if kernels := assumed_kernels(plan):
        parts.append(f"{level}# Fused kernels assumed")
        parts.append("\n".join(f"- {plain_text(text)}" for text in kernels))
    if plan.provenance.assumptions:
        parts.append(f"{level}# Assumed while reading the model")
        parts.append(
            "\n".join(f"- {plain_text(text)}" for text in plan.provenance.assumptions)
        )
    return parts


def _ranks(report: ReportData) -> str:
    """Time and memory of each device of a pp rank."""
    times: dict[int, TimelineRow] = {}
    if report.timeline is not None:
        times = {row.rank: row for row in report.timeline.rows}
    spent = ("compute", "communication", "optimizer", "bubble") if times else ()
    rows = []
    for row in report.memory:
        seconds = times[row.rank].seconds() if times else {}
        groups = (_COMPUTE, _TALK, ("optimizer",), ("bubble",)) if times else ()
        share = filled_share(row)
        over = " over" if share > 1 else ""
        rows.append(
            (
                f"{row.rank}",
                code_span(row.device_type),
                f"{report.devices_alike:,}",
                *(format_seconds(sum(seconds[k] for k in kinds)) for kinds in groups),
                format_bytes(row.total_bytes),
                format_bytes(row.limit_bytes),
                f"{share:.1%}{over}",
            )
        )
    header = ("pp rank", "device", "devices", *spent, "memory", "limit", "full")
    text = _table(header, rows, range(2, len(header)))
    if report.timeline is None:
        return f"{text}\n\nWithout times: {plain_text(report.missing['timeline'])}"
    caveat = report.timeline.caveat
    told = "Communication is what no computation hides, between stages included."
    return f"{text}\n\n{told} {plain_text(caveat)}".rstrip()


def _beside(reports: Sequence[ReportData], names: Sequence[str]) -> str:
    """Figures of both plans, and every field that differs."""
    called = [f"{letter} {name}" for letter, name in zip("AB", names, strict=True)]
    text = "## Two plans side by side\n\n"
    text += markdown_table(differences_table(reports, called))
    changes = reports[0].plan.diff(reports[1].plan)
    if changes:
        shown = [f"- {plain_text(change)}" for change in changes[:_MOST_ROWS]]
        left = len(changes) - len(shown)
        shown += [f"- … and {left:,} more"] if left else []
        text += "\n\nFields that differ:\n\n" + "\n".join(shown)
    return text
