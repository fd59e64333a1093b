"""The page of job streams in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.report import write_stream_reports
from planner.report.stream.page import SECTIONS
from planner.schema.stream import StreamJobs
from tests.report.browser import Page, open_browser
from tests.report.stream.made import made_record
from tests.report.stream.test_write import HOSTILE


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    yield from open_browser()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One policy on one stream; two on two, on more devices than there are rows."""
    made = tmp_path_factory.mktemp("pages")
    write_stream_reports([made_record()], {"html": made / "one.html"})
    records = [
        made_record(200, hosts=16, degree=degree, policy=f"always_{degree}", seed=seed)
        for degree in (4, 8)
        for seed in (0, 1)
    ]
    write_stream_reports(records, {"html": made / "two.html"})
    return made


def _in_sight(page: Page) -> set[str]:
    page.settle()
    return {
        element.text for element in page.every("figure .tools output") if element.text
    }


def _pixels(page: Page, selector: str) -> str:
    page.settle()
    return str(page.run("return arguments[0].toDataURL()", page.find(selector)))


def test_it_loads_alone_and_silently(page: Page, folder: Path) -> None:
    page.size(1280)
    for name in ("one.html", "two.html"):
        assert page.open(folder / name) == []
        page.run("window.scrollTo(0, document.body.scrollHeight)")
        page.settle()
        assert page.driver.get_log("browser") == []


def test_every_section_is_there_and_drawn(page: Page, folder: Path) -> None:
    page.open(folder / "two.html")
    page.settle()
    for anchor in SECTIONS:
        section = page.find(f"section#{anchor}")
        assert section.find_element("css selector", "h2").text
        assert page.every(f'nav a[href="#{anchor}"]')
    canvases = page.every("canvas[data-chart]")
    assert len(canvases) == 1 + 2 + 2 + 1
    for canvas in canvases:
        assert canvas.get_attribute("aria-label")
        drawn = page.run(
            "const c = arguments[0];"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const seen = new Set();"
            "for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8"
            " | d[i + 2]);"
            "return seen.size",
            canvas,
        )
        assert drawn > 3
    page.open(folder / "one.html")
    assert not page.every("section#policies")


def test_all_figures_zoom_together(page: Page, folder: Path) -> None:
    page.size(1280)
    page.open(folder / "two.html")
    (whole,) = _in_sight(page)
    assert whole.startswith("the whole stream")
    before = _pixels(page, 'canvas[data-chart="gantt"]')
    page.find('#blocking button[data-act="closer"]').click()
    (closer,) = _in_sight(page)
    assert " of " in closer
    assert _pixels(page, 'canvas[data-chart="gantt"]') != before
    page.find('canvas[data-chart="gantt"]').send_keys("0")
    assert _in_sight(page) == {whole}
    assert _pixels(page, 'canvas[data-chart="gantt"]') == before


def test_bars_are_coloured_by_model_or_outcome(page: Page, folder: Path) -> None:
    page.size(1280)
    page.open(folder / "one.html")
    page.settle()
    legend = '[data-legend="0"]'
    assert page.find(legend).text.split() == ["small", "middle", "large"]
    before = _pixels(page, 'canvas[data-chart="gantt"]')
    page.find('[data-colour="outcome"]').click()
    assert _pixels(page, 'canvas[data-chart="gantt"]') != before
    assert "met" in page.find(legend).text


def test_pointing_tells_what_it_is(page: Page, folder: Path) -> None:
    from selenium.webdriver import ActionChains

    page.size(1280)
    page.open(folder / "one.html")
    page.settle()
    for chart, pattern in (
        ("gantt", "devices"),
        ("causes", "jobs arrived"),
        ("use", "of 16 devices"),
    ):
        canvas = page.find(f'canvas[data-chart="{chart}"]')
        page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
        size = canvas.size
        # The first devices are hardly ever free.
        ActionChains(page.driver).move_to_element_with_offset(
            canvas, 0, 34 - size["height"] // 2
        ).perform()
        found = page.find("#tip").text
        assert pattern in found or (chart == "gantt" and "free" in found), found


def test_jobs_are_picked_sorted_and_paged(page: Page, folder: Path) -> None:
    from selenium.webdriver.support.select import Select

    page.size(1280)
    page.open(folder / "two.html")
    rows = page.every("table.jobs tbody tr")
    assert len(rows) == 50
    count = page.find('[data-jobs="count"]')
    assert count.text.endswith("jobs")
    page.find('[data-page="1"]').click()
    assert page.find("table.jobs tbody th").text == "50"
    Select(page.find('[data-pick="outcome"]')).select_by_visible_text("no room")
    told = {row.text.split()[2] for row in page.every("table.jobs tbody tr")}
    assert told == {"no"}
    Select(page.find('[data-pick="outcome"]')).select_by_visible_text("met")
    page.find('[data-sort="ran"]').click()
    page.find('[data-sort="ran"]').click()
    heads = page.every('th[aria-sort="descending"]')
    assert [head.text.split()[0] for head in heads] == ["ran"]
    first = page.find("table.jobs tbody tr").text
    assert "large" in first
    # Another policy, another stream: the rows follow.
    Select(page.find('[data-pick="run"]')).select_by_visible_text("always_8")
    assert page.find("table.jobs tbody tr").text != first
    before = page.find("table.jobs").text
    Select(page.find("#stream")).select_by_index(1)
    page.settle()
    assert page.find("table.jobs").text != before
    assert page.driver.get_log("browser") == []


@pytest.mark.parametrize("name", ["one.html", "two.html"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(
    page: Page, folder: Path, name: str, theme: str
) -> None:
    page.theme(theme)
    assert page.beyond(folder / name, 390) == []
    page.theme("light")
    page.size(1280)


def test_it_prints_on_white_without_controls(page: Page, folder: Path) -> None:
    page.size(1280)
    page.theme("dark")
    page.open(folder / "two.html")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert (
        page.run("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert not page.find("#cluster .tools").is_displayed()
    # About the width of paper: no column of a table is cut off.
    page.size(700)
    cut = page.run(
        "return [...document.querySelectorAll('section table')].filter((t) =>"
        "  t.getBoundingClientRect().right > 701).map((t) => t.caption.textContent)"
    )
    assert cut == []
    page.size(1280)
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert len(page.driver.print_page()) > 20_000
    page.theme("light")


def test_a_stream_without_jobs_and_taken_devices_are_drawn(
    page: Page, tmp_path: Path
) -> None:
    record = made_record(1)
    columns = dict.fromkeys(StreamJobs.model_fields, ())
    empty = record.model_copy(
        update={
            "jobs": StreamJobs.model_validate(columns),
            "cluster": record.cluster.model_copy(update={"occupied": ((12, 15),)}),
        }
    )
    path = tmp_path / "empty.html"
    write_stream_reports([empty], {"html": path})
    page.size(1280)
    assert page.open(path) == []
    page.settle()
    assert page.find('[data-jobs="count"]').text == "0 of 0 jobs"
    assert "No job arrived" in page.find("#happened").text
    page.find("#use canvas").send_keys("+")
    page.settle()
    assert page.driver.get_log("browser") == []


def test_hostile_names_are_text(page: Page, tmp_path: Path) -> None:
    record = made_record(
        policy=HOSTILE, cluster=HOSTILE, names=(HOSTILE, "middle", "large")
    )
    other = made_record(degree=2, cluster=HOSTILE, names=(HOSTILE, "middle", "large"))
    path = tmp_path / "hostile.html"
    write_stream_reports([record, other], {"html": path})
    text = path.read_text("utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert page.open(path) == []
    page.settle()
    assert page.run("return document.images.length") == 0
    assert HOSTILE in page.find("h1").text
    assert HOSTILE in page.find("table.jobs").text


def test_a_large_page_opens_soon_enough(page: Page, tmp_path: Path) -> None:
    """Small enough to be sent around, and every figure drawn; times are elsewhere."""
    record = made_record(30_000, hosts=128)
    path = tmp_path / "large.html"
    write_stream_reports([record], {"html": path})
    assert path.stat().st_size < 5_000_000
    page.size(1280)
    assert page.open(path) == []
    page.settle()
    assert "30,000" in page.find("dl.tiles").text or "29," in page.find("dl.tiles").text
