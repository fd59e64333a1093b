"""Every code block of README.md and docs/ is run, or says why it is not.

Python blocks of one file share a namespace and a fresh folder, in which ``examples``
is that of the repository. Shell blocks hold ``meshwright`` commands. A block that is
not run stands right after a comment, ``<!-- not run: it needs eight GPUs -->``. A page
with the comment ``<!-- needs MESHWRIGHT_DATA -->`` is skipped where that is not set.
In console blocks the lines behind ``$`` are run, and must print the others. A block
after ``<!-- from out/run.sh -->`` shows lines of that file, which must be in it; in
both, ``…`` stands for anything.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from tests.links import dead_links
from tests.marked import cases

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in (
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "exporters").glob("*.md")),
        *sorted((ROOT / "docs" / "methods").glob("*.md")),
    )
}
#: Pages without code are linked, too; copies of other files are made by ``make docs``.
LINKING = (
    ROOT / "README.md",
    *sorted(
        page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "beside"
    ),
)
SHELLS = frozenset({"sh", "bash", "shell"})
FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>[\w-]*)[^\n`]*$")
NOT_RUN = re.compile(r"<!--\s*not run:\s*\S(?:(?!-->).)*-->\s*$", re.DOTALL)
SHOWN = re.compile(r"<!--\s*from (\S+)\s*-->\s*$")
NEEDS = re.compile(r"<!--\s*needs ([A-Z_]+)\s*-->")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block; ``line`` is that of its first line of code.

    ``shown`` is the file that it shows lines of, if it does.
    """

    language: str
    code: str
    line: int
    run: bool
    shown: str | None = None


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks in order.

    Raises:
        ValueError: If the last one has no end.
    """
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        opened = FENCE.match(lines[index])
        index += 1
        if not opened:
            continue
        first = index
        while index < len(lines) and lines[index].strip() != opened["ticks"]:
            index += 1
        if index == len(lines):
            raise ValueError(f"the block of line {first} has no end")
        before = "\n".join(lines[: first - 1])
        shown = SHOWN.search(before)
        yield Block(
            language=opened["language"],
            code="\n".join(lines[first:index]) + "\n",
            line=first + 1,
            run=not NOT_RUN.search(before),
            shown=shown[1] if shown else None,
        )
        index += 1


def commands(code: str) -> list[list[str]]:
    """Words of each command; prompts, comments and continued lines are understood."""
    joined = code.replace("\\\n", " ")
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def _meshwright(words: list[str], where: str) -> None:
    where = f"{where}: {shlex.join(words)}"
    assert words[0] == "meshwright", f"{where}: mark it <!-- not run: reason -->"
    assert main(words[1:]) == 0, where


def missing(shown: list[str], lines: list[str]) -> str | None:
    """First line shown that is not among the lines, in order; None if all are."""
    place = 0
    for wanted in filter(str.strip, shown):
        parts = map(re.escape, wanted.rstrip().split("…"))
        pattern = re.compile(".*".join(parts))
        if wanted.strip() == "…":
            continue
        while place < len(lines) and not pattern.fullmatch(lines[place].rstrip()):
            place += 1
        if place == len(lines):
            return wanted
        place += 1
    return None


def _converse(block: Block, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the lines behind ``$``; each prints what is below it, and nothing else."""
    for turn in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, _, answer = turn.partition("\n")
        capsys.readouterr()
        _meshwright(shlex.split(command), where)
        printed = capsys.readouterr().out.splitlines()
        assert missing(answer.splitlines(), printed) is None, where
        assert "…" in answer or len(printed) == len(answer.splitlines()), where


def _execute(
    block: Block,
    page: Path,
    namespace: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"{page.name}:{block.line}"
    if block.shown is not None:
        lines = Path(block.shown).read_text(encoding="utf-8").splitlines()
        lost = missing(block.code.splitlines(), lines)
        assert lost is None, f"{where}: {block.shown} has no line {lost!r} there"
    elif block.language == "python":
        # Blank lines in front, so that a traceback names the line of the page.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(page), "exec"), namespace)
    elif block.language == "console":
        _converse(block, where, capsys)
    elif block.language in SHELLS:
        for words in commands(block.code):
            _meshwright(words, where)


@pytest.mark.parametrize("name", cases(PAGES, further={"docs/cli.md"}))
def test_code_runs(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = PAGES[name]
    text = page.read_text(encoding="utf-8")
    for variable in NEEDS.findall(text):
        if not os.environ.get(variable):
            pytest.skip(f"{page.name} needs {variable}, which is not set")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(text):
        if block.run:
            _execute(block, page, namespace, capsys)


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_blocks_are_found() -> None:
    text = (
        "a\n```python\nx = 1\n```\n\n<!-- not run: it needs\nGPUs -->\n"
        "```sh\nmake\n```\n"
        "text\n```json\n{}\n```\n<!-- from a.json -->\n```json\n{}\n```\n"
    )
    found = list(blocks(text))
    assert [(b.language, b.line, b.run) for b in found] == [
        ("python", 3, True),
        ("sh", 9, False),
        ("json", 13, True),
        ("json", 17, True),
    ]
    assert [b.shown for b in found] == [None, None, None, "a.json"]
    assert found[0].code == "x = 1\n"
    with pytest.raises(ValueError, match="no end"):
        list(blocks("```python\nx"))


def test_commands_are_read_as_a_shell_would() -> None:
    code = "$ meshwright plan \\\n    --pin tp=8   # eight\n\n# nothing\nmake 'a b'\n"
    assert commands(code) == [
        ["meshwright", "plan", "--pin", "tp=8"],
        ["make", "a b"],
    ]


def test_lines_that_are_shown_must_be_there() -> None:
    lines = ["a: 1", "  b: 2", "c: 3"]
    assert missing(["a: 1", "…", "c: …", ""], lines) is None
    assert missing(["  b: 2", "a: 1"], lines) == "a: 1"
    assert missing(["b: 2"], lines) == "b: 2"
    assert missing(["a: …2"], lines) == "a: …2"


def test_console_blocks_print_what_is_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.test_docs.main", lambda words: print(*words) or 0)
    (block,) = blocks("```console\n$ meshwright a b\na b\n$ meshwright c\nc\n```\n")
    _converse(block, "here", capsys)
    for wrong in ("a", "a b\nc"):
        (block,) = blocks(f"```console\n$ meshwright a b\n{wrong}\n```\n")
        with pytest.raises(AssertionError, match="here"):
            _converse(block, "here", capsys)


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 700
    assert text.count("<img ") == 1
    # One table of ten figures, and its head.
    assert sum(line.startswith("| ") for line in text.splitlines()) == 11
