"""Docstrings say in their first words what a thing is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "planner",
    "envs",
    "policies",
    "executors",
    "benchmarks",
    "tests",
    "examples",
)

#: A first word that makes a reader guess what the sentence is about.
RIDDLES = ("What", "Whether", "How", "Which", "Of", "Those", "As")
#: Words with a meaning in this project alone; the field's own stand behind each.
DIALECT = {
    "sayable": "expressible",
    "unsayable": "not expressible",
    "unsaid": "not expressed",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text:
            yield getattr(node, "lineno", 1), text


def _sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found
    return [path for path in found if "golden" not in path.parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_do_not_begin_as_riddles(folder: str) -> None:
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in _sources(folder)
        for line, text in _docstrings(path)
        if re.match(rf"({'|'.join(RIDDLES)})\b", text)
    ]
    assert not riddles, "say what it is or does:\n" + "\n".join(riddles)


@pytest.mark.parametrize("folder", [*FOLDERS, "docs"])
def test_words_are_the_fields_own(folder: str) -> None:
    pattern = re.compile(rf"\b({'|'.join(DIALECT)})\b", re.IGNORECASE)
    pages = [ROOT / "README.md", *sorted((ROOT / folder).rglob("*.md"))]
    files = pages if folder == "docs" else _sources(folder)
    private = [
        f"{path.relative_to(ROOT)}:{number}: "
        f"{DIALECT[word.group().lower()]}, not {word.group()}"
        for path in files
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in pattern.finditer(line)
    ]
    assert not private, "\n".join(private)
