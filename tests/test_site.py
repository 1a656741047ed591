"""The documentation site: it builds without warnings, and its pages refer to what exists."""

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
# `docs/methods.md` has the pages of the gallery, and `docs/notebooks.md` the notebooks.
ELSEWHERE = {"hosts", "gallery", "notebooks"}
PAGES = [p for p in (ROOT / "docs").rglob("*.md") if not ELSEWHERE & {*p.parts}]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
PACKAGE = re.compile(r"automodule:: (\S+)")


class Page(HTMLParser):
    """The links, anchors, loaded files and pictures of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if name := attributes.get("id"):
            self.anchors.add(name)
        if tag == "a" and (link := attributes.get("href")):
            self.links.append(link)
        if tag in ("script", "img", "iframe") and (source := attributes.get("src")):
            self.loaded.append(source)
        relation = attributes.get("rel") or ""
        if tag == "link" and "stylesheet" in relation and (link := attributes.get("href")):
            self.loaded.append(link)
        if tag == "img":
            self.pictures.append(attributes)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """Build the site with warnings as errors and all notebooks run, and return its pages."""
    folder = tmp_path_factory.mktemp("site")
    cache = f"nb_execution_cache_path={folder / 'cache'}"  # empty
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    result = subprocess.run(
        [*command, "-D", cache, "-d", folder / "doctrees", ROOT / "docs", folder / "html"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return {path: Page(path) for path in (folder / "html").rglob("*.html")}


@pytest.mark.slow
def test_links_and_anchors_exist(site: dict[Path, Page]) -> None:
    assert len(site) > len(REFERENCE)
    missing = [
        (path.name, link)
        for path, page in site.items()
        for link in page.links
        if not urlsplit(link).netloc and not _exists(site, path, link)
    ]
    assert not missing


def _exists(site: dict[Path, Page], path: Path, link: str) -> bool:
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target not in site:
        return target.exists()
    return not parts.fragment or parts.fragment in site[target].anchors


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site: dict[Path, Page]) -> None:
    loaded = [source for page in site.values() for source in page.loaded]
    assert loaded and not [source for source in loaded if urlsplit(source).netloc]


@pytest.mark.slow
def test_pictures_have_alternative_texts(site: dict[Path, Page]) -> None:
    pictures = [picture for page in site.values() for picture in page.pictures]
    assert len(pictures) >= 5
    # Sphinx takes the file's name for a picture without one.
    assert not [p for p in pictures if not p.get("alt") or "_images/" in (p["alt"] or "")]


def public_names() -> Iterator[tuple[str, str]]:
    for page in REFERENCE:
        if match := PACKAGE.search(page.read_text()):
            package = importlib.import_module(match[1])
            yield from ((match[1], name) for name in package.__all__)


def test_public_names_have_docstrings() -> None:
    """A type alias has none of its own."""
    names = list(public_names())
    assert len(names) > 200
    without = [
        f"{package}.{name}"
        for package, name in names
        if callable(value := getattr(importlib.import_module(package), name))
        and isinstance(value, type | type(public_names))
        and not value.__doc__
    ]
    assert not without


def test_every_page_is_in_the_index() -> None:
    index = set((ROOT / "docs/index.md").read_text().splitlines())
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in PAGES}
    assert pages - index == {"index"}
