"""Tables and results files: what benchmarks have in common to say what they found."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["aligned", "cpu_name", "piped", "report_name"]


def cpu_name() -> str:
    """Model of this machine's processor."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))
        if found:
            return re.sub(r"\((R|TM)\)", "", found[1]).strip()
    return platform.processor() or platform.machine()


def report_name(kind: str) -> str:
    """Name of the results file of this machine and day."""
    cpu = re.sub(r"[^a-z0-9.]+", "-", cpu_name().lower()).strip("-")
    return f"{kind}_{cpu}_{datetime.date.today().isoformat()}.md"


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """For a terminal: columns of even width, numbers to the right.

    Args:
        lines: Cells, the heads first; as many in each line.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def piped(lines: Sequence[Sequence[str]]) -> str:
    """The same as a table of Markdown."""
    head, *rest = lines
    ruled = [head, ["---"] + ["---:"] * (len(head) - 1), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)
