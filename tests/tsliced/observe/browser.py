"""A headless Chromium that has no network, to look at pages as people do."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

LIMIT_S = 60
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


class Browser:
    """One window."""

    def __init__(self, driver: WebDriver) -> None:
        self.driver = driver

    def open(
        self, page: Path, *, dark: bool = False, width: int = 1280, height: int = 1000
    ) -> None:
        """Loads a file as somebody with this theme and this window would see it."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(page.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """Returns the value of a script."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """Returns the first element of a selector, and brings it into view."""
        element = self.driver.find_element(By.CSS_SELECTOR, selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        return element

    def mouse(self) -> ActionChains:
        """Returns a mouse that moves at once."""
        return ActionChains(self.driver, duration=0)

    def complaints(self) -> list[str]:
        """Returns what went to the console since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]  # selenium leaves it untyped


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts one, or skips the test where there is none."""
    program, control = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or control is None:
        pytest.skip("there is no browser; on Debian: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = program
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(control))
        try:
            driver.set_page_load_timeout(LIMIT_S)
            driver.set_script_timeout(LIMIT_S)
            yield Browser(driver)
        finally:
            driver.quit()
