"""The documentation site in Chromium: every page at three widths, the search, and dark mode.

`make test-browser` builds the site and installs playwright; Chromium is the system's (Debian's
package chromium). `SITE` is the folder of the site. Default: build it.
"""

import functools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]
ROOT = Path(__file__).parent.parent
TIMEOUT = 300_000  # of a page, in milliseconds: a busy machine takes long, and is no error
WIDTHS = (390, 820, 1400)  # a phone, a tablet, a screen
TERMS = (
    "federated_mean",
    "SCAFFOLD",
    "DiLoCo",
    "chunk_size",
    "Dirichlet",
    "privacy",
    "checkpoint",
    "Slurm",
    "tokenizer",
    "Parquet",
)
# Tables of two columns, and that of all names, are read without scrolling sideways.
TABLES_THAT_SCROLL = """[
    ...document.querySelectorAll("#all-names table"),
    ...document.querySelectorAll("table:has(th:nth-child(2)):not(:has(th:nth-child(3)))"),
].filter((table) => table.scrollWidth > table.clientWidth + 1).length"""


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site; build it if there is none."""
    if built := os.environ.get("SITE"):
        return ROOT / built
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", "-d", folder / "doctrees"]
    subprocess.run([*command, ROOT / "docs", folder / "html"], check=True, timeout=1800)
    return folder / "html"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on the loopback interface."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Without networking of its own: no update, no look-up of other hosts.
    arguments = ["--disable-background-networking", "--disable-component-update", "--disable-quic"]
    with playwright.sync_playwright() as session:
        process = session.chromium.launch(
            executable_path=CHROMIUM, args=arguments, chromium_sandbox=False, timeout=TIMEOUT
        )
        yield process
        process.close()


def new_page(browser: Any, **options: Any) -> Any:
    """Open a page that waits for a slow machine."""
    page = browser.new_page(**options)
    page.set_default_timeout(TIMEOUT)
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_the_width_and_load_without_errors(
    browser: Any, site: Path, address: str, width: int
) -> None:
    files = (path.relative_to(site) for path in site.rglob("*.html"))
    pages = sorted(path.as_posix() for path in files if path.parts[0] != "_static")
    page = new_page(browser, viewport={"width": width, "height": 900})
    errors: list[str] = []
    page.on("console", lambda message: message.type == "error" and errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("response", lambda reply: reply.status < 400 or errors.append(reply.url))
    page.on(
        "request",
        lambda request: request.url.startswith((address, "data:")) or errors.append(request.url),
    )
    wide, cut = [], []
    for name in pages:
        page.goto(f"{address}/{name}")
        if page.evaluate(TABLES_THAT_SCROLL):
            cut.append(name)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wide.append(name)
    page.close()
    assert len(pages) > 80 and not wide and not errors
    assert not cut


@pytest.mark.parametrize("term", TERMS)
def test_the_search_finds(browser: Any, address: str, term: str) -> None:
    page = new_page(browser)
    page.goto(f"{address}/search.html?q={term}")
    page.wait_for_selector("#search-results li a")
    assert page.locator("#search-results li").count() >= 1
    page.close()


def test_dark_mode_changes_the_background(browser: Any, address: str) -> None:
    colors = []
    for scheme in ("light", "dark"):
        page = new_page(browser, color_scheme=scheme)
        page.goto(f"{address}/index.html")
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert colors[0] != colors[1]
