"""The page's text, its colours, and the command that writes it."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from planner.report import build_report, html_page
from planner.report.canvas import payload
from planner.report.markup import asset
from planner.report.svg import ticks
from planner.schema import Plan
from tests.cli.shell import ask
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import changed, measurement

#: Text on ground, as the style sheet pairs them.
PAIRS = (
    ("ink", "paper"),
    ("ink", "panel"),
    ("muted", "paper"),
    ("muted", "panel"),
    ("accent", "paper"),
    ("warn", "warn-panel"),
    ("paper", "ink"),
    ("forward-ink", "forward"),
    ("backward-ink", "backward"),
    ("backward-input-ink", "backward-input"),
    ("backward-weight-ink", "backward-weight"),
    ("transfer-ink", "transfer"),
    ("communication-ink", "communication"),
    ("optimizer-ink", "optimizer"),
)


def themes() -> dict[str, dict[str, str]]:
    """Colours of the style sheet, by theme."""
    css = asset("report.css")
    found: dict[str, dict[str, str]] = {"light": {}, "media": {}, "chosen": {}}
    names = {
        ":root": "light",
        ':root:not([data-theme="light"])': "media",
        ':root[data-theme="dark"]': "chosen",
    }
    for selector, body in re.findall(r"(:root[^{]*?)\s*\{([^}]*)\}", css):
        colours = dict(re.findall(r"--([\w-]+):\s*(#[0-9a-f]{6});", body))
        found[names[selector]].update(colours)
    assert found["media"] == found["chosen"] != {}
    dark = {**found["light"], **found["media"]}
    return {"light": found["light"], "dark": dark}


def luminance(colour: str) -> float:
    """Source: Web Content Accessibility Guidelines 2.2, relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    """Contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(("ink", "ground"), PAIRS, ids="-on-".join)
def test_text_can_be_read(theme: str, ink: str, ground: str) -> None:
    colours = themes()[theme]
    assert contrast(colours[ink], colours[ground]) >= 4.5


def test_contrast_is_that_of_the_guidelines() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


def test_the_page_is_whole_and_repeatable() -> None:
    plan = gpt2_plan(pp=4)
    report = build_report(plan, model=gpt2_graph(), measurement=measurement(plan))
    text = html_page([report])
    assert text == html_page([report])
    assert not re.search(r"\{\{\w+\}\}", text)
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", text)
    assert "@import" not in text
    # Patterns are in the page itself.
    assert re.findall(r"url\((?!#on-)", text) == []
    for cell in re.findall(r"<thead>(.*?)</thead>", text):
        assert 'scope="col"' in cell
    # Headings do not skip a level.
    levels = [int(level) for level in re.findall(r"<h(\d)", text)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_what_cannot_be_made_says_why() -> None:
    report = build_report(changed(gpt2_plan(pp=4), "model", ref=None))
    text = html_page([report])
    assert text.count("passed to Meshwright as an object") == 2
    assert "make one with meshwright run" in text
    assert 'canvas class="grid"' in text
    assert 'canvas class="timeline"' not in text


def test_the_payload_keeps_the_times() -> None:
    report = build_report(gpt2_plan(pp=4, schedule="1F1B"), model=gpt2_graph())
    data = payload(report, "")
    assert report.timeline is not None
    row = data["timeline"]["rows"][1]
    now, step = 0, data["timeline"]["step"]
    shown = [s for s in report.timeline.rows[1].spans() if s.kind != "bubble"]
    assert len(row["spans"]) == 5 * len(shown)
    for index, span in enumerate(shown):
        kind, stage, _, gap, long = row["spans"][5 * index : 5 * index + 5]
        assert data["timeline"]["kinds"][kind] == span.kind
        assert stage == span.stage
        start = (now + gap) / data["timeline"]["ticks"] * step
        now += gap + long
        assert start == pytest.approx(span.start_s, abs=1e-6 * step)
        assert now / data["timeline"]["ticks"] * step == pytest.approx(
            span.end_s, abs=1e-6 * step
        )
    assert data["grid"]["ranks"] == [[0, 8]]
    assert data["grid"]["hosts"] == [[8, 1]]


def test_a_long_timeline_keeps_some_rows() -> None:
    report = build_report(gpt2_plan(pp=4, schedule="1F1B"), model=gpt2_graph())
    assert report.timeline is not None
    most = -(-report.timeline.num_spans // 2)
    half = payload(report, "", most)
    assert [row["rank"] for row in half["timeline"]["rows"]] == [0, 2]
    assert half["timeline"]["every"] == 2
    assert "One pp rank in 2 is drawn" in html_page([report], most_spans=most)


def test_ticks_are_round() -> None:
    assert ticks(0, 80, 4) == [0, 20, 40, 60, 80]
    assert ticks(0, 0, 4) == [0]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    gpt2_plan(pp=4).save(tmp_path / "plan.json")
    return tmp_path


def test_the_command_writes_a_page(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = saved / "plan.json", saved / "page.html"
    ran = ask(capsys, "report", plan, "-o", out)
    assert ran.code == 0, ran.err
    assert ran.out.strip() == str(out)
    assert out.read_text("utf-8").startswith("<!DOCTYPE html>")
    both = ask(capsys, "report", plan, plan, "-o", out, "--json")
    assert json.loads(both.out) == [str(out)]
    assert "Two plans side by side" in out.read_text("utf-8")


def test_the_command_takes_a_measurement(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan.load(saved / "plan.json")
    run = saved / "run.json"
    measurement(plan).save(run)
    out = saved / "page.html"
    ran = ask(capsys, "report", saved / "plan.json", "-o", out, "--measurement", run)
    assert ran.code == 0, ran.err
    assert "Predicted beside measured" in out.read_text("utf-8")
    many = ask(
        capsys, "report", saved / "plan.json", "-o", out, "--measurement", run, run
    )
    assert "2 measurements for 1 plan" in many.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.json"], "cannot read plan gone.json"),
        (["plan.json", "plan.json", "plan.json"], "3 plans"),
        (["plan.json", "-o", "gone/page.html"], "gone is not a folder"),
        (["plan.json", "--cluster", "dgx-h100:1"], "not the one the plan was made for"),
        (["plan.json", "--model", "gpt-2"], "unknown model"),
        (["plan.json", "--measurement", "plan.json"], "plan.json"),
    ],
)
def test_wrong_input_writes_nothing(
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(saved)
    ran = ask(capsys, "report", *arguments)
    assert message in ran.error
    assert [path.name for path in saved.iterdir()] == ["plan.json"]
