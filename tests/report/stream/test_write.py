"""Forms of a report of job streams, and the command that writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planner.errors import PlanFileError
from planner.report import write_stream_reports
from planner.report.markup import asset
from planner.report.stream import (
    build_stream_report,
    stream_markdown,
    stream_page,
)
from planner.report.trace import stream_trace
from tests.cli.shell import ask
from tests.report.stream.made import made_record
from tests.report.test_page import contrast, themes

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&|`$(x)@you #1"


def test_the_page_is_whole_and_repeatable() -> None:
    records = [made_record(), made_record(degree=2, policy="always_2")]
    text = stream_page(build_stream_report(records))
    assert text == stream_page(build_stream_report(records))
    assert not re.search(r"\{\{\w+\}\}", text)
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text)
    assert "@import" not in text
    assert "url(" not in text
    assert next(int(level) for level in re.findall(r"<h(\d)", text)) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_can_be_told_from_the_ground(theme: str) -> None:
    """Source: Web Content Accessibility Guidelines 2.2, 1.4.11: 3 to 1."""
    css = asset("stream.css")
    blocks = [
        dict(re.findall(r"--(p\d):\s*(#\w{6});", part)) for part in css.split("}")
    ]
    light, media, chosen = (block for block in blocks if block)
    assert media == chosen
    ground = themes()[theme]["paper"]
    for name, colour in (light if theme == "light" else media).items():
        assert contrast(colour, ground) >= 3.0, name


def test_markdown_has_the_tables_and_no_mention() -> None:
    records = [
        made_record(policy="a|b", cluster=HOSTILE, names=(HOSTILE, "m", "l")),
        made_record(
            degree=2, policy=HOSTILE, cluster=HOSTILE, names=(HOSTILE, "m", "l")
        ),
    ]
    text = stream_markdown(build_stream_report(records))
    for heading in ("### Policies", "### Models"):
        assert heading in text
    assert "<img" not in text.replace("\\<img", "")
    assert "@<!-- -->you" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    bars = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if "a\\|b" in row}
    assert len(bars) == 2


def test_the_trace_has_a_bar_for_each_device_of_a_job() -> None:
    record = made_record(60)
    trace = json.loads(stream_trace(build_stream_report([record])))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    ran = [i for i, start in enumerate(record.jobs.start_s) if start is not None]
    assert len(bars) == 4 * len(ran)
    first = next(bar for bar in bars if bar["args"]["job"] == ran[0])
    start = record.jobs.start_s[ran[0]]
    assert start is not None
    assert first["ts"] == pytest.approx(start * 1e6, abs=1e-3)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"host 0", "host 1", "device 15"} <= names


def test_what_a_trace_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = build_stream_report([made_record(seed=seed) for seed in range(2)])
    with pytest.raises(PlanFileError, match="a trace is of one stream, not of 2"):
        stream_trace(two)
    monkeypatch.setattr("planner.report.trace.MOST_EVENTS", 10)
    with pytest.raises(PlanFileError, match="is too large to open"):
        stream_trace(build_stream_report([made_record()]))


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    made_record(60).save(folder / "a.json")
    made_record(60, degree=2, policy="always_2").save(folder / "b.json")
    return folder


def test_the_command_writes_all_forms(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = kept.parent
    words = [out / "p.html", "--md", out / "p.md", "--perfetto", out / "p.json"]
    ran = ask(capsys, "report", kept, "-o", *words, "--json")
    assert ran.code == 0, ran.err
    assert len(json.loads(ran.out)) == 3
    page = (out / "p.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "Policies side by side" in page
    assert json.loads((out / "p.json").read_text())["traceEvents"]
    # Files are told from plans by what is in them; several may be named.
    files = ask(
        capsys, "report", kept / "b.json", kept / "a.json", "-o", out / "q.html"
    )
    assert files.code == 0, files.err
    one = ask(capsys, "report", kept / "b.json", "--md", out / "one.md")
    assert one.code == 0
    assert "always_2" in (out / "one.md").read_text()
    assert "always_4" not in (out / "one.md").read_text()


def test_wrong_input_writes_nothing(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = kept.parent
    before = sorted(root.rglob("*"))
    out = root / "p.html"
    with_model = ask(capsys, "report", kept, "-o", out, "--model", "gpt2-xl")
    assert "--model is for reports of plans" in with_model.error
    with pytest.raises(PlanFileError, match="named for both"):
        write_stream_reports([made_record()], {"html": out, "md": out})
    assert sorted(root.rglob("*")) == before
    (kept / "c.json").write_text('{"schema_version": 1, "strategy": {}}')
    mixed = ask(capsys, "report", kept, "-o", out)
    assert "c.json: field" in mixed.error
    empty = root / "empty"
    empty.mkdir()
    assert "has no records" in ask(capsys, "report", empty, "-o", out).error
    assert not out.exists()
