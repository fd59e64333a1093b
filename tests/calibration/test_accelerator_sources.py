"""Figures of accelerators that are no presets state their source on their line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from planner.calibration.machines import accelerators

_SOURCED = re.compile(r"\b(19|20)\d\d\b|\bassumption\b")


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and value not in (0, 1, 1e12)


def _unsourced(text: str) -> list[str]:
    """Lines of a preset module that state a figure without its source.

    A figure is a number passed to a call, kept in a table, assigned to a constant or
    the default of an argument, also as part of a product. 0, 1 and powers are none.
    A source is a year, the word "assumption", or a constant that holds one.
    """
    tree = ast.parse(text)
    stated: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            stated += [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Dict):
            stated += node.values
        elif isinstance(node, ast.arguments):
            stated += [*node.defaults, *node.kw_defaults]
        elif isinstance(node, ast.Assign):
            stated.append(node.value)
    numbers = set()
    while stated:
        value = stated.pop()
        if isinstance(value, ast.BinOp) and not isinstance(value.op, ast.Pow):
            stated += [value.left, value.right]
        elif isinstance(value, ast.Constant) and _is_figure(value.value):
            numbers.add(value.lineno)
    lines = text.splitlines()
    return [
        lines[number - 1].strip()
        for number in sorted(numbers)
        if not _SOURCED.search(lines[number - 1])
    ]


def test_every_figure_has_its_source_on_its_line() -> None:
    path = Path(accelerators.__file__)
    text = path.read_text(encoding="utf-8")
    assert _unsourced(text) == []
    # The check has teeth: without its comments the module would not pass.
    bare = re.sub(r"  # .*", "", text)
    assert len(_unsourced(bare)) >= 5


def test_the_check_of_sources_sees_products_tables_and_defaults() -> None:
    text = "A = 3 * B\nf(x=4)\nC = {'k': 5e9 / 7}\ndef g(n: int = 8): ...\n"
    assert len(_unsourced(text)) == 4
    assert _unsourced(text.replace("\n", "  # datasheet 2020\n")) == []
