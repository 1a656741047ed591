"""The documentation site: it builds without warnings, and its pages refer to what exists."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from nbclient import NotebookClient

import fedpax
from fedpax.experiments.listing import EXPERIMENTS

ROOT = Path(__file__).parent.parent
# `docs/methods.md` has the pages of the gallery, and `docs/notebooks.md` the notebooks.
ELSEWHERE = {"hosts", "gallery", "notebooks"}
PAGES = [
    p
    for p in (ROOT / "docs").rglob("*.md")
    if not ELSEWHERE & {*p.parts} and not p.match("reference/fedpax*")
]
spec = importlib.util.spec_from_file_location("api_index", ROOT / "docs/api_index.py")
assert spec and spec.loader
api_index = importlib.util.module_from_spec(spec)
spec.loader.exec_module(api_index)
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(fedpax(?:\.\w+)+)")
BLOCK = re.compile(r"^```(?:python|{code-cell}[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    assert len(site) > 100
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


@pytest.mark.slow
def test_downloads_of_notebooks_run_in_jupyter(site: dict[Path, Page]) -> None:
    """Each page links its own file; one runs in a fresh kernel."""
    files = {}
    for path, page in site.items():
        if path.parent.name == "notebooks":
            (link,) = {link for link in page.links if link.endswith(".ipynb")}
            files[path.stem] = (path.parent / link).resolve()
            assert files[path.stem].name == f"{path.stem}.ipynb"
            nbformat.validate(nbformat.read(files[path.stem], as_version=4))
    assert len(files) == 7
    notebook = nbformat.read(files["scaffold"], as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_public_names_have_docstrings() -> None:
    """Constants and type aliases have a text behind their assignment."""
    names = list(api_index.public_names())
    assert len(names) > 300
    assert not [f"{name[0]}.{name[1]}" for name in names if not api_index.summary(*name)]


def test_each_public_name_has_one_home_with_the_shortest_path() -> None:
    homes = api_index.homes()
    for package in api_index.PUBLIC:
        module = importlib.import_module(package)
        assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert not name.startswith("_")
            home = homes[name, id(getattr(module, name))]
            assert len(home.split(".")) <= len(package.split("."))
    assert homes["cost", id(fedpax.cost)] == "fedpax"
    assert homes["read_metrics", id(fedpax.training.read_metrics)] == "fedpax.training"
    assert len({*api_index.table().splitlines()}) == len(homes) + 2


def test_pages_import_public_names_alone() -> None:
    """Experiments are imported from their modules, as `fedpax list` names them."""
    public = {f"{package}.{n}" for package, n, _ in api_index.public_names()}
    public |= {f"{p}.{n}" for p in api_index.PUBLIC for n in importlib.import_module(p).__all__}
    public |= {*api_index.PUBLIC, "fedpax.main", "fedpax.main.main"}
    public |= {f"fedpax.{name}" for name in dir(fedpax)}
    public |= {f"fedpax.experiments.{entry.module}.{n}" for n, entry in EXPERIMENTS.items()}
    pages = [ROOT / "README.md", *PAGES, *(ROOT / "docs/notebooks").glob("*.md")]
    imported = {
        (page.name, name)
        for page in pages
        for block in BLOCK.findall(page.read_text())
        for name in imported_names(block)
    }
    assert len(imported) > 200
    assert not {(page, name) for page, name in imported if name not in public}


def test_names_in_texts_are_public() -> None:
    """A page gives the shortest path. The pages for developers name private modules too."""
    public = {f"{package}.{name}" for package, name, _ in api_index.public_names()}
    developers = {"architecture.md", "contributing.md", "changelog.md"}
    named = {
        (page.name, name)
        for page in [ROOT / "README.md", *PAGES, *(ROOT / "docs/notebooks").glob("*.md")]
        if page.name not in developers
        for name in NAMED.findall(CODE.sub("", page.read_text()))
    }
    assert len(named) > 20
    assert not {
        (page, name)
        for page, name in named
        if not {name, name.rpartition(".")[0]} & public  # a name, or an attribute of one
        and name not in api_index.PUBLIC
        and not name.startswith("fedpax.experiments.")
    }


def imported_names(block: str) -> Iterator[str]:
    """Yield what a block imports from fedpax."""
    code = re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE)
    for statement in re.findall(r"^ *((?:from|import) fedpax[^(\n]*(?:\([^)]*\))?)", code, re.M):
        (node,) = ast.parse(statement).body
        names = [alias.name for alias in node.names]  # type: ignore[attr-defined]
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        yield from (f"{prefix}{name}" for name in names)


def test_every_page_is_in_the_index() -> None:
    index = set((ROOT / "docs/index.md").read_text().splitlines())
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in PAGES}
    assert pages - index == {"index"}
