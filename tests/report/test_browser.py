"""The page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.report import write_report
from planner.report.page import SECTIONS
from planner.schema import Plan
from tests.plans import gpt2_graph, gpt2_plan
from tests.report.browser import Page, open_browser
from tests.report.test_build import changed, measurement

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{css}}"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    yield from open_browser()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plan with a measurement, and two side by side."""
    made = tmp_path_factory.mktemp("pages")
    pipeline, plain = gpt2_plan(pp=4, schedule="1F1B"), gpt2_plan()
    write_report(
        pipeline,
        made / "one.html",
        model=gpt2_graph(),
        measurements=[measurement(pipeline)],
    )
    write_report(
        pipeline,
        made / "two.html",
        against=plain,
        names=("a.json", "b.json"),
        model=gpt2_graph(),
    )
    return made


def _in_sight(page: Page) -> list[str]:
    """Title of each timeline."""
    page.settle()
    return [element.text for element in page.every("#timeline output")]


def test_it_loads_alone_and_silently(page: Page, folder: Path) -> None:
    page.size(1280)
    for name in ("one.html", "two.html"):
        assert page.open(folder / name) == []
        page.run("window.scrollTo(0, document.body.scrollHeight)")
        page.settle()
        assert page.driver.get_log("browser") == []


def test_every_section_is_there(page: Page, folder: Path) -> None:
    page.open(folder / "one.html")
    for anchor in SECTIONS:
        section = page.find(f"section#{anchor}")
        assert section.find_element("css selector", "h2").text
        assert not section.find_elements("css selector", ".absent")
        assert page.every(f'nav a[href="#{anchor}"]')
    assert len(page.every("h1")) == 1
    for canvas in page.every("canvas"):
        assert canvas.get_attribute("aria-label")
        drawn = page.run(
            "const c = arguments[0];"
            "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            "const seen = new Set();"
            "for (let i = 0; i < d.length; i += 4)"
            "  seen.add((d[i] << 16) + (d[i + 1] << 8) + d[i + 2]);"
            "return seen.size",
            canvas,
        )
        assert drawn > 5


def test_buttons_and_keys_zoom(page: Page, folder: Path) -> None:
    page.size(1280)
    page.open(folder / "one.html")
    (whole,) = _in_sight(page)
    assert whole.startswith("the whole step")
    page.find('button[data-act="closer"]').click()
    (closer,) = _in_sight(page)
    assert re.fullmatch(r"\S+ m?s to \S+ m?s of \S+ m?s", closer)
    page.find('button[data-act="whole"]').click()
    assert _in_sight(page) == [whole]
    canvas = page.find("canvas.timeline")
    canvas.send_keys("+")
    (keyed,) = _in_sight(page)
    assert keyed == closer
    from selenium.webdriver.common.keys import Keys

    canvas.send_keys(Keys.ARROW_RIGHT)
    assert _in_sight(page) != [keyed]
    canvas.send_keys("0")
    assert _in_sight(page) == [whole]


def test_the_wheel_zooms_after_a_click_and_dragging_moves(
    page: Page, folder: Path
) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    page.size(1280)
    page.open(folder / "one.html")
    canvas = page.find("canvas.timeline")
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    (whole,) = _in_sight(page)
    origin = ScrollOrigin.from_element(canvas)
    ActionChains(page.driver).scroll_from_origin(origin, 0, -40).perform()
    assert _in_sight(page) == [whole]
    page.run("arguments[0].scrollIntoView({block: 'center'})", canvas)
    ActionChains(page.driver).click(canvas).perform()
    ActionChains(page.driver).scroll_from_origin(origin, 0, -240).perform()
    (closer,) = _in_sight(page)
    assert closer != whole
    ActionChains(page.driver).click_and_hold(canvas).move_by_offset(
        -120, 0
    ).release().perform()
    (moved,) = _in_sight(page)
    assert moved not in {closer, whole}


def test_pointing_tells_what_it_is(page: Page, folder: Path) -> None:
    from selenium.webdriver import ActionChains

    page.size(1280)
    page.open(folder / "one.html")
    for selector, pattern in (
        ("canvas.timeline", r"(Forward|Backward|Bubble)[\s\S]*pp rank \d"),
        ("canvas.grid", r"rank \d+\ndevice \d+, host \d+[\s\S]*stage \d"),
    ):
        element = page.find(selector)
        page.run("arguments[0].scrollIntoView({block: 'center'})", element)
        size = element.size
        ActionChains(page.driver).move_to_element_with_offset(
            element, 110 - size["width"] // 2, 40 - size["height"] // 2
        ).perform()
        tip = page.find("#tip")
        assert tip.is_displayed()
        assert re.search(pattern, tip.text), tip.text


def test_the_grid_changes_its_axis(page: Page, folder: Path) -> None:
    page.size(1280)
    page.open(folder / "one.html")
    before = page.run("return document.querySelector('canvas.grid').toDataURL()")
    buttons = page.every("#devices .tools button")
    assert [button.text for button in buttons] == ["pp", "dp_shard"]
    buttons[1].click()
    assert buttons[1].get_attribute("aria-pressed") == "true"
    legend = page.find("#devices .legend").text
    assert "dp_shard 0" in legend
    after = page.run("return document.querySelector('canvas.grid').toDataURL()")
    assert after != before


def test_two_plans_move_together(page: Page, folder: Path) -> None:
    page.size(1280)
    page.open(folder / "two.html")
    assert len(page.every("canvas.timeline")) == 2
    assert "difference" in page.find("#difference table").text
    first, second = _in_sight(page)
    assert first == second
    page.every('button[data-act="closer"]')[1].click()
    assert _in_sight(page)[0] == _in_sight(page)[1] != first


@pytest.mark.parametrize("name", ["one.html", "two.html"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(
    page: Page, folder: Path, name: str, theme: str
) -> None:
    page.theme(theme)
    assert page.beyond(folder / name, 360) == []
    page.theme("light")
    page.size(1280)


def test_the_theme_can_be_switched(page: Page, folder: Path) -> None:
    page.size(1280)
    page.theme("light")
    page.open(folder / "one.html")
    ground = "return getComputedStyle(document.body).backgroundColor"
    light, button = page.run(ground), page.find("#theme")
    assert button.text == "Dark"
    button.click()
    assert page.run(ground) != light
    assert button.text == "Light"
    button.click()
    assert page.run(ground) == light


def test_ink_on_any_colour_can_be_read(page: Page, folder: Path) -> None:
    """Numbers of the grid: every colour of the ramp, as the page draws it."""
    page.size(1280)
    page.open(folder / "one.html")
    source = page.run("return document.scripts[document.scripts.length - 1].text")
    functions = source[source.index("function channels") :].split("// A tile of")[0]
    worst = page.run(
        "const palette = new Map();"
        "const colour = (name) => getComputedStyle(document.documentElement)"
        ".getPropertyValue('--' + name).replace(/#(..)(..)(..)/, (_, r, g, b) =>"
        " `rgb(${parseInt(r,16)}, ${parseInt(g,16)}, ${parseInt(b,16)})`);"
        + functions
        + "let worst = 21;"
        "for (let i = 0; i < 256; i += 1) {"
        "  const ground = rampColour(i, 256);"
        "  const light = luminance(channels(ground));"
        "  const ink = inkOn(ground) === '#ffffff' ? 1 : 0;"
        "  const [a, b] = [Math.max(light, ink), Math.min(light, ink)];"
        "  worst = Math.min(worst, (a + 0.05) / (b + 0.05));"
        "}"
        "return worst"
    )
    assert 4.5 <= worst < 21


def test_it_prints_on_white_without_controls(page: Page, folder: Path) -> None:
    page.size(1280)
    page.theme("dark")
    page.open(folder / "one.html")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert (
        page.run("return getComputedStyle(document.body).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    assert not page.find("#timeline .tools").is_displayed()
    assert not page.find("nav").is_displayed()
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    printed = page.driver.print_page()
    assert len(printed) > 20_000
    assert page.run("return document.documentElement.dataset.theme ?? 'none'") == "none"
    page.theme("light")


def test_hostile_names_are_text(page: Page, tmp_path: Path) -> None:
    plan = changed(gpt2_plan(pp=4), "model", name=HOSTILE)
    plan = changed(plan, "cluster", name=HOSTILE)
    plan = changed(plan, "provenance", bound_by=HOSTILE, assumptions=[HOSTILE])
    data = plan.to_data()
    data["strategy"]["stages"][0]["modules"][0] = HOSTILE
    data["provenance"]["alternatives"][0].update(label=HOSTILE, reason=HOSTILE)
    for entry in data["prediction"]["memory"]:
        entry["device_type"] = HOSTILE
    plan = Plan.from_data(data)
    path = tmp_path / "hostile.html"
    write_report(plan, path, against=plan, names=(HOSTILE, HOSTILE))
    text = path.read_text("utf-8")
    assert "<img" not in text
    assert text.count("</script>") == 2
    page.size(1280)
    assert page.open(path) == []
    assert HOSTILE in page.find("h1").text
    assert page.run("return document.images.length") == 0
    assert page.run("return JSON.parse(plans.textContent)[0].stages[0].units[0]") == (
        HOSTILE
    )
