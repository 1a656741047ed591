"""The API: a page of each public package, and the index of all public names.

The pages are made when the site is built.
"""

import ast
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from fedpax.console import markdown_table

REFERENCE = Path(__file__).parent / "reference"
PUBLIC = (
    "fedpax",
    "fedpax.algorithms",
    "fedpax.aggregators",
    "fedpax.aggregators.codecs",
    "fedpax.clients",
    "fedpax.data",
    "fedpax.data.tables",
    "fedpax.models",
    "fedpax.models.attention",
    "fedpax.models.huggingface",
    "fedpax.models.lora",
    "fedpax.models.presets",
    "fedpax.parallel",
    "fedpax.simulation",
    "fedpax.training",
    "fedpax.experiments",
    "fedpax.checkpoints",
    "fedpax.planning",
    "fedpax.sites",
    "fedpax.islands",
    "fedpax.transport",
    "fedpax.secure_sums",
    "fedpax.deploy",
    "fedpax.deploy.flower",
    "fedpax.processes",
    "fedpax.transforms",
    "fedpax.inspect",
    "fedpax.hlo",
    "fedpax.primitives",
    "fedpax.commands",
    "fedpax.errors",
)
"""The packages and modules with public names. All other modules are private."""


@functools.cache
def homes() -> dict[tuple[str, int], str]:
    """Return the package with the shortest path of each public name, by name and identity."""
    found: dict[tuple[str, int], str] = {}
    for package in sorted(PUBLIC, key=lambda p: (p.count("."), len(p), PUBLIC.index(p))):
        module = importlib.import_module(package)
        for name in module.__all__:
            found.setdefault((name, id(getattr(module, name))), package)
    return found


def public_names() -> Iterator[tuple[str, str, object]]:
    """Yield each public name once: its package, the name and the object."""
    for (name, _), package in homes().items():
        yield package, name, getattr(importlib.import_module(package), name)


def page(package: str) -> str:
    """Write the page of a package."""
    members = "\n".join(f"   :{option}:" for option in ("members", "imported-members"))
    return f"# {package}\n\n```{{eval-rst}}\n.. automodule:: {package}\n{members}\n```\n"


def constant_doc(module: str, name: str) -> str:
    """Return the text behind the assignment of a name that a module defines or imports."""
    lines = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
    if lines is not None:
        return "\n".join(lines)
    file = Path(inspect.getfile(importlib.import_module(module)))
    stub = file.with_suffix(".pyi")  # of a package whose names load when they are used
    tree = ast.parse((stub if stub.exists() else file).read_text(encoding="utf-8"))
    (origin,) = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}
    }
    return constant_doc(str(origin), name)


def summary(package: str, name: str, value: object) -> str:
    """Return the first line of what is written on a public name."""
    described = inspect.isroutine(value) or inspect.isclass(value)
    text = inspect.getdoc(value) or "" if described else constant_doc(package, name)
    return text.partition("\n")[0]


def table() -> str:
    """Write the index of all names, sorted."""
    lines = []
    for package, name, value in sorted(public_names(), key=lambda e: (e[1].lower(), e[0])):
        text = summary(package, name, value)
        text = text.replace("|", r"\|").replace("*", r"\*").replace("<", r"\<")
        lines.append([f"{{py:obj}}`{name} <{package}.{name}>`", f"`{package}`", text])
    return markdown_table(["name", "import it from", ""], lines)


class APIIndex(SphinxDirective):
    """Insert the index of all public names."""

    def run(self) -> list[nodes.Node]:
        """Return the parsed table; the next build makes it again, as the code may have changed."""
        self.env.note_reread()
        return self.parse_text_to_nodes(table())


def skip_longer_path(
    app: Sphinx, what: str, name: str, value: object, skip: bool, options: object
) -> bool | None:
    """Document a name on the page of its shortest path alone."""
    package = app.env.docname.removeprefix("reference/")
    home = homes().get((name.rpartition(".")[2], id(value)))
    return True if what == "module" and home and home != package else None


def write_pages(app: Sphinx) -> None:
    """Write the pages that changed."""
    for package in PUBLIC:
        path, text = REFERENCE / f"{package}.md", page(package)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the pages before Sphinx looks for files."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-skip-member", skip_longer_path)
    app.add_directive("api-index", APIIndex)
    return {"parallel_read_safe": True}
