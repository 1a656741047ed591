"""The notebooks as files for Jupyter and Colab, which the build of the site writes."""

import re
from pathlib import Path

import nbformat
from myst_nb.core.read import read_myst_markdown_notebook
from sphinx.application import Sphinx

NOTEBOOKS = Path(__file__).parent / "notebooks"
INSTALL = """\
# Install fedpax if it is missing, from the wheel that `make package` builds.
import importlib.util
from pathlib import Path

if importlib.util.find_spec("fedpax") is None:
    wheels = [*Path.cwd().glob("fedpax-*.whl")]
    if not wheels:
        raise FileNotFoundError(
            f"there is no fedpax-*.whl in {Path.cwd()}. Build it in a checkout with "
            "`make package`, and copy or upload it from dist/ to this folder."
        )
    %pip install --quiet {wheels[-1]}[files,plot]
"""
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def notebook(text: str) -> nbformat.NotebookNode:
    """Make the file of a page: a cell that installs fedpax, and the cells of the page."""
    made = read_myst_markdown_notebook(text)
    for cell in made.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(r"\1", cell.source)  # other pages are not beside a download
    made.cells.insert(0, nbformat.v4.new_code_cell(INSTALL))
    for i, cell in enumerate(made.cells):
        cell.id = f"cell-{i}"  # in place of a random one: an unchanged notebook stays the same
    return made


def write_notebooks(app: Sphinx) -> None:
    """Write a file for each page."""
    for page in NOTEBOOKS.glob("*.md"):
        made = notebook(page.read_text(encoding="utf-8"))
        page.with_suffix(".ipynb").write_text(nbformat.writes(made) + "\n", encoding="utf-8")


def link_download(app: Sphinx, docname: str, source: list[str]) -> None:
    """Link the file below the title of its page."""
    folder, _, name = docname.rpartition("/")
    if folder == "notebooks":
        line = (
            f"Download {{download}}`{name}.ipynb <{name}.ipynb>` for Jupyter or Colab "
            "([how to open it](../notebooks.md))."
        )
        source[0] = re.sub(r"(?m)^(# .*)$", rf"\1\n\n{line}", source[0], count=1)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the files before Sphinx looks for the targets of links."""
    app.connect("builder-inited", write_notebooks)
    app.connect("source-read", link_download)
    return {"parallel_read_safe": True}
