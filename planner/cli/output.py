"""Output of commands: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planner.schema.base import spell_non_finite

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = [
    "emit_json",
    "emit_table",
    "emit_text",
    "note",
    "progress",
    "tell_of_kernels",
    "tell_of_run",
    "warn_of_fallbacks",
    "working",
]

#: Start of assumptions about a model's fallback code, see planner.graph.fallbacks.
_FALLBACK = "fallback code"

#: Width of tables where no terminal limits it.
_UNLIMITED = 1000


def emit_text(text: str) -> None:
    """Write a result for people."""
    print(text)


def emit_json(data: Any) -> None:
    """Write a result for programs: one JSON document.

    A loss that is not finite is a string, ``"NaN"``: JSON has no other word for it.
    """
    print(json.dumps(spell_non_finite(data), indent=2, allow_nan=False))


def emit_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False
) -> None:
    """Write a table, as wide as it is where stdout is not a terminal.

    Args:
        header: Names of the columns; all empty for a table without a head.
        rows: Cells.
        numbers: Set all columns but the first flush right.
    """
    width = None if sys.stdout.isatty() else _UNLIMITED
    console = Console(highlight=False, width=width)
    table = Table(box=None, pad_edge=False, show_header=any(header))
    for index, name in enumerate(header):
        table.add_column(
            name, justify="right" if numbers and index else "left", overflow="fold"
        )
    for row in rows:
        # Text, so that brackets and colons in names are not read as markup.
        table.add_row(*(Text(cell) for cell in row))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def warn_of_fallbacks(assumptions: Iterable[str]) -> None:
    """Write on stderr which code of the model stands in for a kernel.

    Args:
        assumptions: Those of a plan's provenance.
    """
    for text in assumptions:
        if text.startswith(_FALLBACK):
            note(f"warning: {text}")


def tell_of_kernels(plan: Plan) -> None:
    """Write on stderr if fused kernels were asked for and none was recognised."""
    assumed = plan.provenance.kernels
    if assumed is not None and not assumed.modules:
        note(
            "--kernels fused has no effect: no code was recognised in the model that a "
            "fused kernel replaces"
        )


def tell_of_run(plan: Plan) -> None:
    """Write on stderr which fused kernels the figures of a plan assume."""
    from planner.schema.fused_kernels import kernel_notice

    told = kernel_notice(plan.provenance.kernels)
    if told is not None and os.environ.get("RANK", "0") == "0":
        note(f"warning: {told}")


def note(text: str) -> None:
    """Write something that is not the result: one line on stderr."""
    print(" ".join(text.split()), file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something is going on; a spinner on a terminal, silent elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True, highlight=False).status(Text(text)):
        yield


def progress(total: int, unit: str) -> Any:
    """A tqdm bar on stderr; silent when stderr is not a terminal."""
    from tqdm import tqdm

    quiet = not sys.stderr.isatty()
    return tqdm(total=total, unit=unit, file=sys.stderr, disable=quiet)
