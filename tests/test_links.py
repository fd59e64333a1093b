"""The checker of links finds those that are dead, and no others."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.links import PUBLIC, dead_links, dead_site_links, main, slugs

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"


def test_headings_get_the_anchors_of_their_hosts(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `plan`, and why?\n## Links [here](x.md)\n## Twice\n## Twice\n"
        "```sh\n# no heading\n```\n### dp_shard × cp\n",
        encoding="utf-8",
    )
    assert slugs(page) == {
        "a-plan-and-why",
        "links-here",
        "twice",
        "twice-1",
        "dp_shard--cp",
    }


def test_dead_links_of_a_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text("# There\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md#there) [b](#here) [c](https://x.org/y#z) `[d](no.md)`\n"
        "![e](no.svg) [f](other.md#not) [g](#gone) [h](folder)\n"
        "```text\n[i](no.md)\n```\n",
        encoding="utf-8",
    )
    assert [line.split(": ")[1] for line in dead_links(page)] == [
        "no.svg",
        "other.md#not",
        "#gone",
        "folder",
    ]


def test_dead_links_of_a_site_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text(
        '<a href="sub/a.html#x">1</a><a href="sub/a.html#y">2</a><a href="#top">3</a>'
        '<img src="no.png"/><a href="https://x.org/#q">4</a><p id="top"></p>',
        encoding="utf-8",
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.html").write_text(
        '<p id="x"></p><a href="../index.html">0</a>', encoding="utf-8"
    )
    assert dead_site_links(tmp_path) == [
        "index.html: no.png",
        "index.html: sub/a.html#y",
    ]
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "sub/a.html#y" in said
    assert "planner.schema.Plan is not in the reference" in said


def test_a_site_that_was_not_built_is_an_error(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 1


def test_the_reference_names_public_data() -> None:
    """`automodule` describes classes and functions; data needs its own directive."""
    pages = "".join(page.read_text("utf-8") for page in REFERENCE.glob("*.md"))
    described = set(re.findall(r"autodata:: (\S+)", pages))
    data = {
        f"{package.__name__}.{name}"
        for package in map(importlib.import_module, PUBLIC)
        for name in package.__all__
        if not inspect.isclass(it := inspect.unwrap(getattr(package, name)))
        and not inspect.isroutine(it)
    }
    assert data - described == set()
