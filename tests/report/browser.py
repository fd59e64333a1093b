"""A headless Chromium that loads pages from files and says what went wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Page", "open_browser"]


class Page:
    """One browser; every page it opens is from a file."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def size(self, width: int, height: int = 900) -> None:
        """Make the window so large, in CSS pixels."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            },
        )

    def theme(self, name: str) -> None:
        """The system's preference: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [feature]}
        )

    def open(self, path: Path) -> list[str]:
        """Load a file; what the console says, and what else was asked for."""
        self.driver.get_log("performance")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())
        assert self.run("return document.documentElement.dataset.ready") == "yes"
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            event = json.loads(entry["message"])["message"]
            if event["method"] != "Network.requestWillBeSent":
                continue
            url = event["params"]["request"]["url"]
            if url != path.as_uri() and not url.startswith("data:"):
                said.append(f"request of {url}")
        return said

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page."""
        return self.driver.execute_script(script, *arguments)

    def beyond(self, path: Path, width: int) -> list[str]:
        """Open a page with everything unfolded; what is wider than the window."""
        self.size(width, 740)
        self.open(path)
        self.run("for (const d of document.querySelectorAll('details')) d.open = true")
        self.settle()
        found: list[str] = self.run(
            "return [...document.querySelectorAll('main *')].filter((e) =>"
            "  !e.closest('.scroll') &&"
            "  e.getBoundingClientRect().right > arguments[0] + 1"
            ").map((e) => e.outerHTML.slice(0, 80))",
            width,
        )
        whole = self.run("return document.documentElement.scrollWidth")
        return found if whole == width else [*found, f"a page of {whole} px"]

    def settle(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0];"
            "requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        )

    def find(self, selector: str) -> Any:
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def every(self, selector: str) -> list[Any]:
        """All elements of a CSS selector."""
        found: list[Any] = self.driver.find_elements("css selector", selector)
        return found


def open_browser() -> Iterator[Page]:
    """A browser, closed at the end; skips where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing")
    from selenium.webdriver.chrome.service import Service

    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium with chromedriver: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    opened = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield Page(opened)
    finally:
        opened.quit()
