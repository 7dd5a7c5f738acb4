"""
Every page of the site in a browser, as wide as a laptop and as narrow as a phone: nothing is wider than the screen but
what scrolls by itself, every picture shows, the console is empty, and code fits its box on the laptop. They are read
from the disk, where the search works, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import NEEDS_BROWSER, open_browser, resize
from tests.helpers.waiting import until

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
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
    with open_browser(tmp_path_factory.mktemp("browser")) as driver:
        yield driver


def faults_of(page: Path, browser: Any) -> list[str]:
    """At both widths, and on the console."""
    faults = []
    for width, height in ((1280, 800), (390, 844)):
        resize(browser, width, height)
        if width == 1280:
            browser.get(page.as_uri())
        faults += [f"at {width} pixels: {fault}" for fault in browser.execute_script(FAULTS, width == 1280)]
    return faults + [f"console: {entry['message']}" for entry in browser.get_log("browser")]


def test_every_page_fits_its_screen(site: Path, browser: Any):
    pages = sorted(site.rglob("*.html"))
    faults = {str(page.relative_to(site)): faults_of(page, browser) for page in pages}
    assert len(pages) > 40 and not {page: what for page, what in faults.items() if what}


def test_the_search_finds_a_page_without_a_server(site: Path, browser: Any):
    browser.get(f"{(site / 'index.html').as_uri()}?q=perplexity")
    links = "return [...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    found = until(lambda: browser.execute_script(links))
    assert any("/upit.html" in link for link in found)


def test_a_page_with_faults_is_told(tmp_path: Path, browser: Any):
    """Otherwise the test above would say little."""
    page = tmp_path / "page.html"
    code = '<pre style="width: 300px"><code style="display: block; overflow: auto">' + "x" * 200 + "</code></pre>"
    page.write_text(f'<p style="width: 1500px">wide</p><img src="none.png">{code}')
    faults = " ".join(faults_of(page, browser))
    assert all(words in faults for words in ("1280 pixels: scrolls", "no image", "code wider", "console: "))
