"""The documentation's table is what the declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanFileError
from planner.export import exporter_names
from planner.export.table import main, targets_table, with_table
from planner.targets import get_target

PAGE = Path(__file__).parents[2] / "docs" / "exporters.md"


def test_the_page_is_what_the_command_makes(tmp_path: Path) -> None:
    copy = tmp_path / "exporters.md"
    copy.write_bytes(PAGE.read_bytes())
    assert main([str(copy)]) == 0
    assert copy.read_bytes() == PAGE.read_bytes(), (
        "run python -m planner.export.table docs/exporters.md"
    )


def test_every_target_has_a_row_with_its_version() -> None:
    rows = {line.split("|")[1].strip(): line for line in targets_table().splitlines()}
    for name in exporter_names():
        assert get_target(name).version in rows[f"`{name}`"]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(PlanFileError, match=r"page\.md has no place for the table"):
        with_table("# Nothing\n", "page.md")


def test_without_a_page_it_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "usage: python -m planner.export.table" in capsys.readouterr().err
