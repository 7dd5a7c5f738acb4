"""Headless chromium, for tests that open pages in it, where it and its driver are."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER, DRIVER = next(filter(None, map(shutil.which, NAMES)), None), shutil.which("chromedriver")
NEEDS_BROWSER = pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-software-rasterizer --process-per-site "
    "--allow-file-access-from-files"
)


@contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """
    A selenium driver, whose logs `browser` and `performance` have the pages' console and requests.

    Args:
        profile: an empty folder.
    """
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def resize(browser: Any, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 1000}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
