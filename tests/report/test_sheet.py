"""The sheet of figures."""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

import pytest

from planner.errors import PlanFileError
from planner.report import build_report, write_reports
from planner.report.data import ReportData
from planner.report.palette import palette
from planner.schema import Plan
from tests.cli.shell import ask
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import changed

pytest.importorskip("matplotlib")

from planner.report.sheet import draw_sheet, figure_sheet

HOSTILE = "$x_{1}$ \\frac 模型\n<b>&\x07" * 9


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


def test_the_same_report_gives_the_same_bytes() -> None:
    made = report(pp=4, schedule="1F1B")
    for form in ("png", "svg"):
        assert figure_sheet(made, form) == figure_sheet(made, form)
    width, height = struct.unpack(">II", figure_sheet(made, "png")[16:24])
    assert width == 3.5 * 300
    assert width < height < 3 * width


def test_figures_have_the_colours_of_the_page() -> None:
    text = figure_sheet(report(pp=4, schedule="1F1B"), "svg").decode()
    used = set(re.findall(r"#[0-9a-f]{6}", text))
    for name in ("forward", "backward", "communication", "optimizer", "idle"):
        assert palette()[name] in used
    assert not re.search(r"\d{4}-\d\d-\d\d", text)
    assert palette()["paper"] == "#ffffff"


def test_the_timeline_is_that_of_the_report() -> None:
    made = report(pp=4, schedule="1F1B")
    assert made.timeline is not None
    timeline = draw_sheet(made).axes[0]
    drawn = sum(len(one.get_paths()) for one in timeline.collections)
    assert drawn == made.timeline.num_spans
    assert timeline.get_xlim()[1] == pytest.approx(1e3 * made.timeline.step_time_s)
    memory = draw_sheet(made).axes[1]
    ends = max(bar.get_x() + bar.get_width() for bar in memory.patches)
    assert ends == pytest.approx(max(row.total_bytes for row in made.memory) / 1e9)


@pytest.mark.parametrize("which", ["calm", "halves", "alone", "hostile"])
def test_words_are_on_the_sheet_and_panels_apart(which: str) -> None:
    made = {
        "calm": lambda: report(pp=4, schedule="1F1B"),
        "halves": lambda: report(pp=4, schedule="InterleavedZeroBubble"),
        "alone": lambda: report(pp=1),
        "hostile": hostile,
    }[which]()
    figure = draw_sheet(made)
    figure.draw_without_rendering()
    wide, tall = figure.bbox.width, figure.bbox.height
    texts = [*figure.texts]
    for axes in figure.axes:
        texts += axes.texts
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            texts += [
                tick.label1
                for tick in axis.get_major_ticks()
                if axis.get_visible() and low <= tick.get_loc() <= high
            ]
        if axes.get_legend() is not None:
            texts += axes.get_legend().get_texts()
    shown = [text for text in texts if text.get_text() and text.get_visible()]
    for text in shown:
        box = text.get_window_extent()
        assert box.x0 >= 0, text
        assert box.x1 <= wide, text
        assert box.y0 >= 0, text
        assert box.y1 <= tall, text
    # Each panel with its ticks and legend ends above the next one's title.
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    titles = [text.get_window_extent() for text in figure.texts]
    for above, title in zip(boxes, titles[2:], strict=False):
        assert above is not None
        assert above.y0 >= title.y1
    if which == "hostile":
        assert "Not shown. The model" in shown_text(shown)


def shown_text(texts: list[object]) -> str:
    return "\n".join(text.get_text() for text in texts)  # type: ignore[attr-defined]


def test_the_command_writes_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    gpt2_plan(pp=4).save("plan.json")
    ran = ask(capsys, "report", "plan.json", "--png", "a.png", "--svg", "a.svg")
    assert ran.code == 0, ran.err
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert Path("a.svg").read_text("utf-8").startswith("<?xml")
    two = ask(capsys, "report", "plan.json", "plan.json", "--md", "a", "--png", "b.png")
    assert "is of one plan, not of 2; name one" in two.refusal
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("a.png", "a.svg", "plan.json")
    ]


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    paths = {"md": tmp_path / "a.md", "png": tmp_path / "a.png"}
    with pytest.raises(PlanFileError, match=r"pip install 'meshwright\[figures\]'"):
        write_reports(gpt2_plan(), paths, model=gpt2_graph())
    assert list(tmp_path.iterdir()) == []
