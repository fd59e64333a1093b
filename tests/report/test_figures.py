"""Figures of a plan: the sheet of them, and its conversion to PNG."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.errors import PlanFileError
from planner.report import build_report, write_report
from planner.report.data import ReportData
from planner.report.figures import figure_sheet, plan_sheet
from planner.report.svg import palette
from planner.schema import Plan
from tests.cli.shell import ask
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import changed

HOSTILE = "$x_{1}$ \\frac 模型\n<b>&\x07" * 9
#: Left and right edge of a sheet.
LEFT, RIGHT = -6.0, 356.0
#: Generous width of a letter, as a share of its size.
LETTER = 0.6


def report(**pins: int | str) -> ReportData:
    return build_report(gpt2_plan(**pins), model=gpt2_graph())


def hostile() -> ReportData:
    """Names that nothing can draw, a near limit, and no timeline."""
    plan = changed(gpt2_plan(pp=4), "model", ref=None, name=HOSTILE)
    data = plan.to_data()
    for entry in data["prediction"]["memory"]:
        entry.update(device_type=HOSTILE, limit_bytes=4e9)
    data["prediction"]["breakdown_s"][HOSTILE[:20]] = 1e-3
    return build_report(Plan.from_data(data))


def elements(drawn: str, kind: str) -> list[ElementTree.Element]:
    """All of a kind, in a sheet that must be well-formed."""
    root = ElementTree.fromstring(drawn)
    return list(root.iter(f"{{http://www.w3.org/2000/svg}}{kind}"))


def test_the_same_report_gives_the_same_bytes() -> None:
    pytest.importorskip("resvg_py")
    made = report(pp=4, schedule="1F1B")
    for form in ("png", "svg"):
        assert figure_sheet([made], form) == figure_sheet([made], form)
    width, height = struct.unpack(">II", figure_sheet([made], "png")[16:24])
    assert width == 3.5 * 300
    assert width < height < 3 * width


def test_figures_have_the_colours_of_the_page() -> None:
    text = plan_sheet(report(pp=4, schedule="1F1B"))
    used = dict(re.findall(r"^\.([km]-[\w-]+) \{fill: (#[0-9a-f]{6});", text, re.M))
    for name in ("forward", "backward", "communication", "optimizer"):
        assert used[f"k-{name}"] == palette()[name]
    assert used["k-bubble"] == palette()["idle"]
    assert used["m-optimizer"] == palette()["states"]
    assert "var(" not in text
    assert not re.search(r"\d{4}-\d\d-\d\d", text)
    assert palette()["paper"] == "#ffffff"


def test_every_pattern_that_is_used_is_defined() -> None:
    text = plan_sheet(report(pp=4, schedule="InterleavedZeroBubble"))
    used = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert {"on-k-bubble", "on-k-backward-weight", "on-m-activations"} <= used
    assert used <= {one.get("id") for one in elements(text, "pattern")}


def test_the_timeline_is_that_of_the_report() -> None:
    made = report(pp=4, schedule="1F1B")
    assert made.timeline is not None
    text = plan_sheet(made)
    paths = [
        (one.get("class") or "", one.get("d") or "")
        for one in elements(text, "path")
        if (one.get("class") or "").startswith("k-")
    ]
    assert sum(path.count("M") for _, path in paths) == made.timeline.num_spans
    ends = [
        float(x) + float(wide)
        for _, path in paths
        for x, wide in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path)
    ]
    # The last span of each row ends with the step, at the right edge of the axis.
    assert max(ends) == pytest.approx(342, abs=0.02)
    longest = max(made.timeline.rows, key=lambda row: row.seconds()["forward"])
    wide = [
        sum(float(w) for w in re.findall(r"h([\d.]+)v", path))
        for css, path in paths
        if css == "k-forward"
    ]
    share = longest.seconds()["forward"] / made.timeline.step_time_s
    assert max(wide) / 300 == pytest.approx(share, abs=1e-3)


def test_a_long_timeline_is_drawn_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    made = report(pp=4, schedule="1F1B")
    assert made.timeline is not None
    monkeypatch.setattr("planner.report.figures._MOST_BLOCKS", 10)
    areas: dict[str, float] = {}
    for one in elements(plan_sheet(made), "path"):
        css = one.get("class") or ""
        for wide, high in re.findall(r"h([\d.]+)v([\d.]+)h", one.get("d") or ""):
            # Patterns over blocks have no class.
            if css:
                areas[css] = areas.get(css, 0.0) + float(wide) * float(high)
    spent = [row.seconds() for row in made.timeline.rows]
    total = 4 * made.timeline.step_time_s
    for kind in ("forward", "backward", "bubble"):
        share = sum(each[kind] for each in spent) / total
        assert areas[f"k-{kind}"] / sum(areas.values()) == pytest.approx(
            share, abs=0.01
        )


def test_memory_bars_are_as_long_as_the_memory() -> None:
    made = report(pp=4, schedule="1F1B")
    bars = [
        one
        for one in elements(plan_sheet(made), "rect")
        if (one.get("class") or "").startswith("m-") and one.get("data-tip")
    ]
    ends: dict[str, float] = {}
    for bar in bars:
        end = float(bar.get("x", 0)) + float(bar.get("width", 0))
        ends[bar.get("y", "")] = max(ends.get(bar.get("y", ""), 0.0), end)
    sizes = [row.total_bytes for row in made.memory]
    drawn = [(end - 46) / 208 * max(sizes) for end in ends.values()]
    assert drawn == pytest.approx(sizes, rel=1e-3)


@pytest.mark.parametrize("which", ["calm", "halves", "alone", "hostile"])
def test_words_are_on_the_sheet_and_apart(which: str) -> None:
    made = {
        "calm": lambda: report(pp=4, schedule="1F1B"),
        "halves": lambda: report(pp=4, schedule="InterleavedZeroBubble"),
        "alone": lambda: report(pp=1),
        "hostile": hostile,
    }[which]()
    text = plan_sheet(made)
    words = elements(text, "text")
    assert len(words) > 20
    for one in words:
        long = len(one.text or "") * LETTER * (8.5 if one.get("style") else 10)
        x = float(one.get("x", 0))
        before = {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "")]
        bold = 1.12 if one.get("class") == "strong" else 1.0
        assert x - before * long >= LEFT - 1, one.text
        assert x + (1 - before) * long * bold <= RIGHT + 1, one.text
    titles = re.findall(r'y="(\d+\.\d)" text-anchor="start" class="strong"', text)
    starts = re.findall(r'<g transform="translate\(0 ([\d.]+)\)">', text)
    assert len(titles) >= 4
    places = sorted(map(float, starts))
    # A panel begins below its title, and the next title below it.
    for title in map(float, titles[:4]):
        assert any(title < place < title + 20 for place in places)
    if which == "hostile":
        assert "Not shown. The model" in "\n".join(one.text or "" for one in words)


def test_the_command_writes_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("resvg_py")
    monkeypatch.chdir(tmp_path)
    gpt2_plan(pp=4).save("plan.json")
    ran = ask(capsys, "report", "plan.json", "--png", "a.png", "--svg", "a.svg")
    assert ran.code == 0, ran.err
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert Path("a.svg").read_text("utf-8").startswith("<?xml")
    two = ask(capsys, "report", "plan.json", "plan.json", "--md", "a", "--svg", "b.svg")
    assert "is of one plan, not of 2; name one" in two.error
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a.png", "a.svg", "plan.json")
    ]


def test_a_missing_converter_is_named_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    paths = {"md": tmp_path / "a.md", "png": tmp_path / "a.png"}
    with pytest.raises(PlanFileError, match=r"pip install 'meshwright\[figures\]'"):
        write_report(gpt2_plan(), paths, model=gpt2_graph())
    assert list(tmp_path.iterdir()) == []
    # SVG needs nothing.
    write_report(gpt2_plan(), {"svg": tmp_path / "a.svg"}, model=gpt2_graph())


def test_letters_reach_the_png(tmp_path: Path) -> None:
    """Fonts ship with the package: a machine without any draws the same words."""
    resvg_py = pytest.importorskip("resvg_py")
    made = figure_sheet([report(pp=1)], "png")
    blank = re.sub(r"<text.*?</text>", "", plan_sheet(report(pp=1)))
    without = bytes(resvg_py.svg_to_bytes(svg_string=blank, dpi=300))
    assert len(made) > 1.3 * len(without)
