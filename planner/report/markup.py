"""Pieces of HTML, and the page that they are put into.

Every text that goes in is escaped here, and nowhere else.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.report.tables import TextTable

__all__ = [
    "absent",
    "amount",
    "asset",
    "beside",
    "canvas",
    "chips",
    "details",
    "escape",
    "figure",
    "framed_page",
    "json_block",
    "legend",
    "note",
    "page_top",
    "section",
    "table",
    "text_table",
    "tiles",
    "titled",
    "zoom_tools",
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
        cards: Rows become cards where there is little room.
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


def text_table(told: TextTable, *, cards: bool = False) -> str:
    """A table of text as HTML; strategies are set as code."""
    classes = dict.fromkeys(told.code, "label reason" if told.code != (0,) else "label")
    if told.won is not None and told.code:
        classes[len(told.header) - 1] = "reason"
    return table(
        told.header,
        [
            tuple(
                f"<code>{escape(cell)}</code>" if i in told.code else escape(cell)
                for i, cell in enumerate(row)
            )
            for row in told.rows
        ],
        caption=told.caption,
        numbers=told.numbers,
        won=told.won,
        classes=classes,
        cards=cards,
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
    """A part that is folded away; ``summary`` is text, ``body`` HTML."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def note(text: str) -> str:
    """A warning."""
    return f'<p class="note">{escape(text)}</p>'


def absent(why: str) -> str:
    """The reason why a section cannot be made, in place of it."""
    return f'<p class="absent"><strong>Not shown.</strong> {escape(why)}</p>'


def legend(
    entries: Iterable[tuple[str, str]], *, name: str = "Legend", mark: str = "swatch"
) -> str:
    """Class of each swatch and what it stands for."""
    items = "".join(
        f'<li><span class="{mark} {escape(kind)}"></span>{escape(text)}</li>'
        for kind, text in entries
    )
    return f'<ul class="legend" aria-label="{name}">{items}</ul>'


def titled(body: str, name: str) -> str:
    """A pane; with a heading where there are two."""
    heading = ""
    if name:
        letter, _, rest = name.partition(" ")
        heading = f'<h3><span class="tag">{escape(letter)}</span>{escape(rest)}</h3>'
    return f'<div class="pane">{heading}{body}</div>'


def beside(panes: Sequence[str], *, stacked: bool = False) -> str:
    """Panes next to each other, or one above the other."""
    if len(panes) == 1:
        return panes[0]
    kind = "stack" if stacked else "panes"
    return f'<div class="{kind}">{"".join(panes)}</div>'


def chips(texts: Iterable[str], name: str) -> str:
    """Short texts side by side."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="chips" aria-label="{name}">{items}</ul>'


def amount(text: str) -> str:
    """A number, with its unit in small."""
    number, _, unit = text.partition(" ")
    return f"{escape(number)} <small>{escape(unit)}</small>"


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Figures at the top of a page: text, then HTML of the figure and below it."""
    items = "".join(
        f'<div><dt>{escape(name)}</dt><dd class="figure">{value}</dd>'
        f'<dd class="sub">{under}</dd></div>'
        for name, value, under in entries
    )
    return f'<dl class="tiles">{items}</dl>'


def page_top(
    kicker: str, title: str, under: str, links: Mapping[str, str], after: str = ""
) -> str:
    """The top of a page.

    Args:
        kicker: Text above the title.
        title: HTML, as are ``under`` and ``after``.
        under: Below the title.
        links: Anchors of sections and their names.
        after: Below the links.
    """
    items = "".join(
        f'<li><a href="#{anchor}">{escape(name)}</a></li>'
        for anchor, name in links.items()
    )
    return (
        f'<header class="top"><div class="head"><div><p class="kicker">{kicker}</p>'
        f"<h1>{title}</h1></div>"
        f'<button type="button" id="theme" aria-label="Switch between light and dark">'
        f"Dark</button></div>{under}"
        f'<nav aria-label="Sections"><ul>{items}</ul></nav>{after}</header>'
    )


def zoom_tools(whole: str, more: str = "") -> str:
    """Buttons that zoom and move a timeline.

    Args:
        whole: Name of all of it, ``step``.
        more: HTML of further buttons.
    """
    buttons = "".join(
        f'<button type="button" data-act="{act}" aria-label="{name}" '
        f'title="{name}">{text}</button>'
        for act, text, name in (
            ("closer", "+", "Zoom in"),
            ("farther", "−", "Zoom out"),
            ("left", "◀", "Earlier"),
            ("right", "▶", "Later"),
            ("whole", f"Whole {whole}", f"Show the whole {whole}"),
        )
    )
    return (
        f'<div class="tools">{buttons}<output aria-live="polite"></output>{more}</div>'
    )


def canvas(css: str, name: str, keys: str, **data: object) -> str:
    """A figure that the page's script draws.

    Args:
        css: Its class.
        name: Text for those who do not see it.
        keys: Text: the keys that it knows.
        **data: For the script.
    """
    told = "".join(f' data-{key}="{escape(value)}"' for key, value in data.items())
    return (
        f'<div><canvas class="{css}"{told} tabindex="0" role="img" '
        f'aria-label="{escape(name)}. {keys}"></canvas></div>'
        "<noscript><p>This figure needs JavaScript.</p></noscript>"
    )


@cache
def asset(name: str) -> str:
    """Text of a file of ``planner/report/assets``."""
    return (resources.files("planner.report") / "assets" / name).read_text("utf-8")


def framed_page(
    *,
    version: str,
    title: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    header: str,
    main: str,
    footer: str,
    data: str,
) -> str:
    """A whole page.

    Args:
        version: Version of Meshwright that wrote it; text.
        title: Text.
        styles: Assets, one after the other.
        scripts: Assets that share one scope, one after the other.
        header: HTML, as are the next three.
        main: Contents of the page.
        footer: Where it comes from.
        data: Blocks of JSON that the scripts read.
    """
    together = "\n".join(asset(name) for name in scripts)
    script = f'"use strict";\n(() => {{\n{together}\n}})();'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "generator": escape(f"Meshwright {version}"),
        "hash": f"sha256-{digest}",
        "title": escape(title),
        "css": "\n".join(asset(name) for name in styles),
        "header": header,
        "main": main,
        "footer": footer,
        "data": data,
        "js": script,
    }
    # One pass, so that nothing that is filled in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], asset("page.html"))
