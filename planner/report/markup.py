"""Pieces of HTML. Every text that goes in is escaped here, and nowhere else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "absent",
    "bars",
    "details",
    "escape",
    "figure",
    "json_block",
    "legend",
    "note",
    "section",
    "table",
]


def escape(text: object) -> str:
    """Text that may stand in an element and in a quoted attribute."""
    return html.escape(str(text), quote=True)


def json_block(name: str, data: Any) -> str:
    """Data for the page's script, which no text in it can end early."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    numbers: Sequence[int] = (),
    won: int | None = None,
    classes: dict[int, str] | None = None,
    cards: bool = False,
) -> str:
    """A table whose first column names the rows.

    Args:
        header: Text.
        rows: HTML.
        caption: Text.
        numbers: Columns that are set flush right.
        won: Row to bring out.
        classes: Column to a class of its cells.
        cards: Whether rows become cards where there is little room.
    """

    def attribute(column: int) -> str:
        names = ["n"] if column in numbers else []
        if classes and column in classes:
            names.append(classes[column])
        return f' class="{" ".join(names)}"' if names else ""

    head = "".join(
        f'<th scope="col"{attribute(i)}>{escape(name)}</th>'
        for i, name in enumerate(header)
    )
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<th scope="row"{attribute(i)}>{cell}</th>'
            if not i
            else f'<td{attribute(i)} data-name="{escape(header[i])}">{cell}</td>'
            for i, cell in enumerate(row)
        )
        mark = ' class="won"' if index == won else ""
        body.append(f"<tr{mark}>{cells}</tr>")
    return (
        f'<div class="scroll{" cards" if cards else ""}" tabindex="0" role="region" '
        f'aria-label="{escape(caption)}"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def section(name: str, title: str, lead: str, body: str) -> str:
    """A section with its heading; ``lead`` is text, ``body`` HTML."""
    told = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return (
        f'<section id="{escape(name)}" aria-labelledby="{escape(name)}-title">'
        f'<h2 id="{escape(name)}-title">{escape(title)}</h2>{told}{body}</section>'
    )


def figure(body: str, caption: str) -> str:
    """A figure; ``body`` is HTML, ``caption`` text."""
    return f"<figure>{body}<figcaption>{escape(caption)}</figcaption></figure>"


def details(summary: str, body: str) -> str:
    """What is folded away; ``summary`` is text, ``body`` HTML."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def note(text: str) -> str:
    """A warning."""
    return f'<p class="note">{escape(text)}</p>'


def absent(why: str) -> str:
    """What stands for a section that cannot be made."""
    return f'<p class="absent"><strong>Not shown.</strong> {escape(why)}</p>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Class of a swatch and what it stands for."""
    items = "".join(
        f'<li><span class="swatch {escape(kind)}"></span>{escape(name)}</li>'
        for kind, name in entries
    )
    return f'<ul class="legend" aria-label="Legend">{items}</ul>'


def bars(items: Iterable[str], *classes: str) -> str:
    """A list of bars, each of them HTML."""
    names = " ".join(("bars", *classes))
    return f'<ul class="{names}">{"".join(f"<li>{item}</li>" for item in items)}</ul>'
