"""
Every page of the site in a browser, as wide as a laptop and as narrow as a phone: nothing is wider than the screen but
what scrolls by itself, every picture shows, the console is empty, and code fits its box on the laptop.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER, DRIVER = next(filter(None, map(shutil.which, NAMES)), None), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="needs chromium and chromedriver"),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-software-rasterizer --process-per-site "
    "--allow-file-access-from-files"
)
# What a page has of each fault, at the width that the window has.
FAULTS = """
const wide = element => element.scrollWidth > element.clientWidth + 1, root = document.documentElement;
const said = element => element.textContent.trim().split("\\n")[0].slice(0, 100);
const faults = [];
if (root.scrollWidth > innerWidth) faults.push(`scrolls sideways: ${root.scrollWidth} of ${innerWidth} pixels`);
for (const image of document.images) if (!(image.complete && image.naturalWidth)) faults.push(`no image: ${image.src}`);
if (arguments[0]) for (const code of document.querySelectorAll("pre > code"))
    if (wide(code)) faults.push(`code wider than its box: ${said(code)}`);
return faults;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def faults_of(page: Path, browser: Any) -> list[str]:
    """At both widths, and on the console."""
    faults = []
    for width, height in ((1280, 800), (390, 844)):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 1000}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        if width == 1280:
            browser.get(page.as_uri())
        faults += [f"at {width} pixels: {fault}" for fault in browser.execute_script(FAULTS, width == 1280)]
    return faults + [f"console: {entry['message']}" for entry in browser.get_log("browser")]


def test_every_page_fits_its_screen(site: Path, browser: Any):
    pages = sorted(site.rglob("*.html"))
    faults = {str(page.relative_to(site)): faults_of(page, browser) for page in pages}
    assert len(pages) > 40 and not {page: what for page, what in faults.items() if what}


def test_a_page_with_faults_is_told(tmp_path: Path, browser: Any):
    """Otherwise the test above would say little."""
    page = tmp_path / "page.html"
    code = '<pre style="width: 300px"><code style="display: block; overflow: auto">' + "x" * 200 + "</code></pre>"
    page.write_text(f'<p style="width: 1500px">wide</p><img src="none.png">{code}')
    faults = " ".join(faults_of(page, browser))
    assert all(words in faults for words in ("1280 pixels: scrolls", "no image", "code wider", "console: "))
