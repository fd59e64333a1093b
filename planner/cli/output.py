"""What commands write: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["emit_json", "emit_table", "emit_text", "note", "progress", "working"]

_STDERR = Console(stderr=True, highlight=False)


def emit_text(text: str) -> None:
    """Write a result for people."""
    print(text)


def emit_json(data: Any) -> None:
    """Write a result for programs: one JSON document."""
    print(json.dumps(data, indent=2, allow_nan=False))


def emit_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table; numbers to the right. Plain and full-width when not a terminal."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def note(text: str) -> None:
    """Say something that is not the result, on stderr."""
    _STDERR.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show that something is going on; a spinner on a terminal, silent elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    with _STDERR.status(text):
        yield


def progress(total: int, unit: str) -> Any:
    """A tqdm bar on stderr; silent when stderr is not a terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, file=sys.stderr, disable=not sys.stderr.isatty())
