"""Several forms of a report in one call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.errors import PlanFileError, UnknownNameError
from planner.report import write_report
from tests.cli.shell import ask
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import changed


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    gpt2_plan(pp=4).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_all_that_is_asked_for(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--md", "report.md", "--perfetto", "trace.json", "-o", "page.html"]
    ran = ask(capsys, "report", "plan.json", *words)
    assert ran.code == 0, ran.err
    assert ran.out.split() == ["page.html", "report.md", "trace.json"]
    assert (saved / "page.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    assert (saved / "report.md").read_text("utf-8").startswith("## gpt2 on dgx-a100")
    assert json.loads((saved / "trace.json").read_text("utf-8"))["traceEvents"]


def test_a_page_is_written_where_nothing_else_is_asked_for(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(capsys, "report", "plan.json", "--md", "a.md", "--json").json == ["a.md"]
    assert not (saved / "report.html").exists()
    assert ask(capsys, "report", "plan.json", "--json").json == ["report.html"]


def test_what_cannot_be_made_leaves_nothing(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(gpt2_plan(pp=4), "model", ref=None).save(saved / "plan.json")
    ran = ask(capsys, "report", "plan.json", "--md", "a.md", "--perfetto", "b.json")
    assert "there is no timeline to write as a trace" in ran.error
    same = ask(capsys, "report", "plan.json", "--md", "a", "--perfetto", "./a")
    assert "named for both md and perfetto" in same.error
    folder = ask(capsys, "report", "plan.json", "--md", "a.md", "--perfetto", ".")
    assert "it is a folder" in folder.error
    assert [path.name for path in saved.iterdir()] == ["plan.json"]


def test_forms_are_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="unknown form of a report 'pdf'"):
        write_report(gpt2_plan(), {"pdf": tmp_path / "a.pdf"}, model=gpt2_graph())
    with pytest.raises(PlanFileError, match="create it first"):
        write_report(gpt2_plan(), {"md": tmp_path / "gone" / "a.md"})
