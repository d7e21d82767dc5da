"""A real headless Chromium, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from shared_server import until

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page:
    """A browser with one page open.

    Args:
        driver: selenium's.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(f"{url}/ui")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def text(self, selector: str) -> str:
        """The text of the first element, also where it is not shown; "" if there is none."""
        found = self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        assert isinstance(found, str)
        return found

    def attribute(self, selector: str, name: str) -> str | None:
        found: str | None = self.run(
            "return document.querySelector(arguments[0])?.getAttribute(arguments[1]) ?? null", selector, name
        )
        return found

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until something is so; fails with the page's text if that takes too long."""
        try:
            until(condition)
        except AssertionError:
            raise AssertionError(f"it did not come true; the page says: {self.text('body')[:3000]}") from None

    def scheme(self, name: str) -> None:
        """`dark` or `light`, as the person's system has it."""
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def size(self, width: int, height: int, *, phone: bool = False) -> None:
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def cdp(self, command: str, **arguments: object) -> Any:
        return self.driver.execute_cdp_cmd(command, arguments)

    def complaints(self) -> list[str]:
        """Complaints of the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]


@contextmanager
def browser() -> Iterator[Page]:
    """Skips the test where there is no Chromium, or no driver of it."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.skip("no Chromium with its driver here (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    # In containers there is neither a sandbox for root nor much shared memory.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    try:
        driver.set_page_load_timeout(120)
        yield Page(driver)
    finally:
        driver.quit()
