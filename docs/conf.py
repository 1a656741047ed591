"""Configuration of the documentation site: `make docs` builds it without a network."""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import fedpax
from fedpax.console import markdown_table
from fedpax.experiments.listing import EXPERIMENTS, GROUPS
from fedpax.main import USAGE

project = "fedpax"
author = "the fedpax authors"
copyright = "the fedpax authors"
version = release = fedpax.__version__

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
extensions = [
    "api_index",
    "gallery_pages",
    "myst_nb",
    "notebook_downloads",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "notebooks/*.ipynb"]
suppress_warnings = ["myst.header"]  # pages begin sections at the level of their title's children

# Pages. `$...$` is an equation, and every heading is an anchor.
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4

# The build runs the notebooks whose code has changed. An error in a cell is an error of the build.
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build/notebooks")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 1200  # seconds of a cell, on a busy machine
nb_output_stderr = "remove"  # progress, which a page need not show

# Docstrings are in Google style, with single backticks around code.
default_role = "code"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# A copied example has neither prompts nor output.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "sphinx_book_theme"
html_title = "fedpax"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}  # light or dark, as the system
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # the sidebar has the search
}


class CommandLineHelp(SphinxDirective):
    """Insert what `fedpax --help` prints."""

    def run(self) -> list[nodes.Node]:
        """Return the text as one block."""
        self.env.note_reread()  # the code may have changed
        return [nodes.literal_block(USAGE, USAGE, language="text")]


class ExperimentList(SphinxDirective):
    """Insert a table of the experiments, and one of the groups."""

    def run(self) -> list[nodes.Node]:
        """Return the parsed tables."""
        self.env.note_reread()
        tables = [
            markdown_table([title, ""], [[f"`{n}`", e.summary] for n, e in entries.items()])
            for title, entries in (("experiment", EXPERIMENTS), ("group", GROUPS))
        ]
        return self.parse_text_to_nodes("\n\n".join(tables))


SECTION = re.compile(r"([A-Z][a-z]+):$")


def convert_docstring(
    app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Make indented equations literal blocks, and the rest reStructuredText."""
    result: list[str] = []
    section, literal = "", False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith("    ")
        if line and not indented:
            match = SECTION.match(line)
            section, literal = (match[1] if match else ""), False
        elif indented and not before and not section and not literal:
            result += ["::", ""]
            literal = True
        result.append(line if literal or section == "Example" else escape(line))
    lines[:] = result


def escape(line: str) -> str:
    """Escape the bars of absolute values, and letters that follow code (`Array`s)."""
    parts = line.split("`")
    parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
    for i in range(2, len(parts), 2):
        parts[i] = re.sub(r"^(?=\w)", r"\\ ", parts[i])
    return "`".join(parts)


def setup(app: Sphinx) -> None:
    """Register the directive and what changes docstrings."""
    app.add_directive("command-line-help", CommandLineHelp)
    app.add_directive("experiment-list", ExperimentList)
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", convert_docstring, priority=400)
