"""The report as Markdown, read back by a parser."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from planner.report import build_report, markdown_page
from planner.report.markdown import code_span, plain_text
from planner.report.page import html_page
from planner.schema import Plan
from planner.schema.describe import paragraph
from planner.units import format_bytes, format_seconds
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.test_build import changed, measurement

HOSTILE = (
    "a|b`c``d\\|e\n## f\n\n<img src=x onerror=alert(1)> **g** _h_ [i](j) ~~k~~ "
    "&amp; $l$"
)


class _Reader(HTMLParser):
    """Tags, and text by tag, of what the parser rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.in_cell = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in {"td", "th"}:
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.rows[-1][-1] += data


def read(text: str) -> _Reader:
    """The page as GitHub's dialect reads it, with tags of the text's own."""
    rules = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    found = _Reader()
    found.feed(rules.render(text))
    return found


def test_it_says_what_was_chosen_and_why() -> None:
    plan = gpt2_plan(pp=4, schedule="1F1B")
    report = build_report(plan, model=gpt2_graph(), measurement=measurement(plan))
    found = read(markdown_page([report]))
    assert paragraph(plan) in found.text
    for row in report.memory:
        (line,) = [r for r in found.rows if len(r) == 10 and r[0] == f"{row.rank}"]
        assert line[1:3] == [row.device_type, f"{report.devices_alike}"]
        assert line[7:9] == [
            format_bytes(row.total_bytes),
            format_bytes(row.limit_bytes),
        ]
    assert report.timeline is not None
    spent = report.timeline.rows[3].seconds()
    assert format_seconds(spent["forward"] + spent["backward"]) in found.text
    for part in report.breakdown:
        assert [part.name, format_seconds(part.seconds), f"{part.share:.1%}"] in (
            found.rows
        )
    for other in plan.provenance.alternatives:
        named = [row for row in found.rows if row[0] == other.label]
        assert [row[4] for row in named] == [other.reason]
    assert "predicted ÷ measured" in found.text
    assert set(found.tags) <= {
        *("h2", "h3", "p", "code", "strong", "table", "thead", "tbody", "tr", "th"),
        *("td", "ul", "li", "sub"),
    }


def test_both_pages_say_how_certain_the_time_is() -> None:
    told = ("ring attention: no runs, ± 25%",)
    ends = (0.5, 2.25)
    plan = changed(
        gpt2_plan(pp=4), "prediction", leans_on=told, step_time_interval_s=ends
    )
    report = build_report(plan, model=gpt2_graph())
    found, page = read(markdown_page([report])), html_page([report])
    for text in (found.text, page):
        assert told[0] in text
        assert "What the time rests on without measured runs" in text
        assert "500 ms to 2.25 s" in text


def test_what_cannot_be_timed_says_why() -> None:
    text = markdown_page([build_report(changed(gpt2_plan(pp=4), "model", ref=None))])
    assert "Without times: The model gpt2 was passed to Meshwright" in text
    assert "| bubble |" not in text


def test_two_plans_lie_side_by_side() -> None:
    first, second = gpt2_plan(pp=4), gpt2_plan()
    reports = [build_report(plan, model=gpt2_graph()) for plan in (first, second)]
    found = read(markdown_page(reports, ("a.json", "b_.json")))
    assert found.rows[0] == ["", "A a.json", "B b_.json", "difference"]
    assert found.rows[1][1:3] == [
        format_seconds(plan.prediction.step_time_s) for plan in (first, second)
    ]
    assert "schedule" in found.text


def test_hostile_names_are_text() -> None:
    plan = gpt2_plan(pp=4)
    calm = markdown_page([build_report(plan, model=gpt2_graph())])
    plan = changed(plan, "model", name=HOSTILE)
    plan = changed(plan, "cluster", name=HOSTILE)
    plan = changed(plan, "provenance", bound_by=HOSTILE, assumptions=[HOSTILE])
    data = plan.to_data()
    data["provenance"]["alternatives"][0].update(label=HOSTILE, reason=HOSTILE)
    for entry in data["prediction"]["memory"]:
        entry["device_type"] = HOSTILE
    report = build_report(Plan.from_data(data), model=gpt2_graph())
    found, calm_found = read(markdown_page([report])), read(calm)
    shown = " ".join(HOSTILE.split())
    # Title, model, cluster, device, label, reason, bound by, assumption.
    assert found.text.count(shown) >= 12
    assert "img" not in found.tags
    assert set(found.tags) <= {*calm_found.tags, "ul", "li"}
    assert [len(row) for row in found.rows] == [len(row) for row in calm_found.rows]


@pytest.mark.parametrize(
    "text",
    [
        *("# a", "- a", "+ a", "1. a", "1) a", "= a", "> a", "    a", "---", "a\\"),
        *("`", "``", " ` ", "|", "\\|", "__a__", "a_b", "_", "*", "&lt;", "<!--"),
        *("[a]: b", "![a](b)", "a\u2028b", "a\x00b", "~~~", "a  \nb"),
    ],
)
def test_text_stays_text(text: str) -> None:
    seen = " ".join(
        "".join(sign if sign.isprintable() else " " for sign in text).split()
    )
    plain = read(plain_text(text))
    assert plain.tags == ["p"]
    assert plain.text.strip() == seen
    cells = read(f"| a | b |\n|---|---|\n| {code_span(text)} | {plain_text(text)} |")
    assert cells.rows[1] == [seen, seen]


def test_nobody_is_mentioned() -> None:
    assert plain_text("@all fixes #7") == "@<!-- -->all fixes #<!-- -->7"
    assert read(plain_text("@all fixes #7")).text.strip() == "@all fixes #7"
