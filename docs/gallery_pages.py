"""The gallery of methods: a page for each method, made from its docstring and measured results.

`make gallery` measures, writes `gallery/results.json` and draws the figures. The pages are made
when the site is built. `gallery/methods.toml` has the methods, and the need that each one meets.
"""

import ast
import doctest
import functools
import html
import inspect
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import fedpax
from fedpax import aggregators, algorithms, clients
from fedpax.aggregators import codecs
from fedpax.console import format_bytes, markdown_table

DOCS = Path(__file__).parent
GALLERY = DOCS / "gallery"
TESTS = DOCS.parent / "tests"
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Reference|Attributes):$", re.MULTILINE)
BASELINES = {"clients": "fedavg", "islands": "diloco", "aggregators": "mean"}
PROBLEMS = ("digits", "synthetic")
PACKAGES = {"aggregators": aggregators, "algorithms": algorithms}


class Method(NamedTuple):
    """A method of the gallery: its function's name, and its entry of `methods.toml`."""

    name: str
    group: str
    title: str
    when: str

    @property
    def package(self) -> str:
        """The package with the function."""
        return "aggregators" if self.name in aggregators.__all__ else "algorithms"

    @property
    def function(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = getattr(PACKAGES[self.package], self.name)
        return function

    @property
    def baseline(self) -> str:
        """The method that its figure compares with."""
        group = self.group
        if group == "asynchronous":
            group = results()["rows"][self.name]["placement"]
        name = BASELINES[group]
        return {"fedavg": "data_parallel", "diloco": "data_parallel"}.get(self.name, name)

    @property
    def docstring(self) -> dict[str, str]:
        """The sections of the docstring; the text in front of the first section is `""`."""
        first, *rest = SECTION.split(inspect.getdoc(self.function) or "")
        sections = {"": first}
        for name, text in zip(rest[::2], rest[1::2], strict=True):
            sections[name] = inspect.cleandoc(text)
        return sections


@functools.cache
def methods() -> dict[str, Method]:
    """Read the methods, by the names of their functions."""
    groups = tomllib.loads((GALLERY / "methods.toml").read_text())
    return {
        name: Method(name, group, **fields)
        for group, entries in groups.items()
        for name, fields in entries.items()
    }


@functools.cache
def results() -> dict[str, Any]:
    """Read the measured results, with their rows by name."""
    content: dict[str, Any] = json.loads((GALLERY / "results.json").read_text())
    return content | {"rows": {row["method"]: row for row in content["rows"]}}


def page(method: Method) -> str:
    """Write the page of a method."""
    sections = method.docstring
    summary, _, body = sections[""].strip().partition("\n\n")
    function = f"fedpax.{method.package}.{method.name}"
    parts = [
        f"# {method.title}",
        f"{markdown(summary)} Use it when {method.when}.",
        markdown(body),
        f"## Example\n\n```python\n{example(method, sections['Example'])}\n```\n\n"
        f"{{py:obj}}`{function}` has all arguments.",
        f"## On two problems\n\n![{alternative_text(method)}]({method.name}.svg)",
        figures(method),
    ]
    if reference := sections.get("Reference"):
        parts.append(f"## Paper\n\n{with_links(markdown(reference))}")
    parts.append(f"## Tests\n\n{tests_of(method)}")
    return "\n\n".join(part for part in parts if part) + "\n"


def example(method: Method, text: str) -> str:
    """Add the imports that the example of a docstring takes from its module."""
    code = "".join(part.source for part in doctest.DocTestParser().get_examples(text))
    nodes_of_code = list(ast.walk(ast.parse(code)))
    loaded = {node.id for node in nodes_of_code if isinstance(node, ast.Name)}
    imported = {
        alias.asname or alias.name
        for node in nodes_of_code
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    module = inspect.getmodule(method.function)
    lines = []
    for name in sorted(loaded - imported):
        value = vars(module).get(name)
        if inspect.ismodule(value):
            plain = value.__name__ == name
            lines.append(f">>> import {value.__name__}" + ("" if plain else f" as {name}"))
        elif value is not None:
            lines.append(f">>> from {shortest_package(name)} import {name}")
    return "\n".join([*dict.fromkeys(lines), text])


def shortest_package(name: str) -> str:
    """Return the package that exports a name of an example."""
    for package in (fedpax, algorithms, aggregators, codecs, clients):
        if name in package.__all__:
            return package.__name__
    raise LookupError(f"no package exports {name}, which an example needs")


def markdown(text: str) -> str:
    """Convert the text of a docstring: indented lines are equations, single backticks are code."""
    blocks = []
    for block in re.split(r"\n\n+(?=\S)", text.strip("\n")):
        prose, *equations = re.split(r"\n\n(?=    )", block)
        blocks.append(
            "`".join(
                part if i % 2 else re.sub(r"([*<$\\])", r"\\\1", part)
                for i, part in enumerate(prose.split("`"))
            )
        )
        blocks += [f"```text\n{inspect.cleandoc(lines)}\n```" for lines in equations]
    return "\n\n".join(blocks)


def with_links(text: str) -> str:
    """Link the papers of a text."""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def alternative_text(method: Method) -> str:
    """Describe the figure of a method."""
    row = results()["rows"][method.name]
    ends = " and ".join(f"{row['accuracy'][p][-1]:.1%} on {p}" for p in PROBLEMS)
    return f"Held-out accuracy of {method.title} over rounds: {ends} at the end"


def figures(method: Method) -> str:
    """Write the table of a page."""
    rounds = results()["settings"]["rounds"]
    compared = [methods()[name] for name in (method.name, method.baseline)]
    rows = [results()["rows"][other.name] for other in compared]
    if method.name == method.baseline:
        compared, rows = compared[:1], rows[:1]
    lines = [
        [f"accuracy on {p} after {rounds} rounds", *(f"{r['accuracy'][p][-1]:.3f}" for r in rows)]
        for p in PROBLEMS
    ]
    if rows[0]["attacked"]:
        lines += [
            [f"the same on {p} with two faulty participants", *(faulty(r, p) for r in rows)]
            for p in PROBLEMS
        ]
    for title, key in ("receives", "received_bytes"), ("sends", "sent_bytes"):
        cells = (format_bytes(r[key]) for r in rows)
        lines.append([f"a participant {title} in a round of digits", *cells])
    lines.append(["FLOPs of a participant in a round", *(f"{r['flops']:.2e}" for r in rows)])
    head = ["", *(f"[{other.title}]({other.name}.md)" for other in compared)]
    return (
        f"{markdown_table(head, lines)}\n\n"
        "[The two problems](../methods.md#two-problems) and the settings are the same for all "
        "methods, and are not tuned. `fedpax.cost` counts bytes and FLOPs. `make gallery` measures "
        "and draws."
    )


def faulty(row: dict[str, Any], problem: str) -> str:
    """Format the accuracy under faulty updates."""
    return f"{row['attacked'][problem][-1]:.3f}" if row["attacked"] else "-"


@functools.cache
def imports_of_tests() -> dict[Path, set[str]]:
    """Return what each file of the tests imports: names of methods, and modules beside it."""
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        nodes_of_file = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        imports = [node for node in nodes_of_file if isinstance(node, ast.ImportFrom)]
        modules = {str(node.module) for node in imports}
        packages = ("fedpax.algorithms", "fedpax.aggregators")
        names = {a.name for node in imports if node.module in packages for a in node.names}
        found[path] = names | {module for module in modules if not module.startswith("fedpax")}
    return found


def tests_of(method: Method) -> str:
    """List the tests of a method: its own, and the number of those that run a table of methods."""
    imports = imports_of_tests()
    own = {path for path, names in imports.items() if method.name in names}
    reached, tables = set(own), {path.stem for path in own if not path.name.startswith("test_")}
    while tables:
        more = {path for path, names in imports.items() if names & tables} - reached
        reached |= more
        tables = {path.stem for path in more if not path.name.startswith("test_")}
    is_test = [path for path in sorted(own) if path.name.startswith("test_")]
    indirect = [path for path in sorted(reached - own) if path.name.startswith("test_")]
    lines = [f"- `{path.relative_to(TESTS.parent)}`" for path in is_test]
    if indirect:
        lines.append(
            f"- {len(indirect)} files that test all methods of a table, such as "
            f"`{indirect[0].relative_to(TESTS.parent)}`"
        )
    return "\n".join(lines)


def table(group: str) -> str:
    """Write the table of a group."""
    lines = []
    for method in methods().values():
        if method.group == group:
            row = results()["rows"][method.name]
            papers = re.findall(r"arXiv:(\d{4}\.\d{4,5})", method.docstring.get("Reference", ""))
            lines.append(
                [
                    f"[{method.title}](gallery/{method.name}.md)",
                    method.when,
                    *(f"{row['accuracy'][p][-1]:.2f}" for p in PROBLEMS),
                    *([faulty(row, "digits")] if group == "aggregators" else []),
                    f"{format_bytes(row['received_bytes'])} / {format_bytes(row['sent_bytes'])}",
                    ", ".join(f"[{p}](https://arxiv.org/abs/{p})" for p in dict.fromkeys(papers)),
                ]
            )
    head = ["method", "use it when", "digits", "synthetic", "receives / sends", "paper"]
    if group == "aggregators":
        head.insert(4, "two faulty")
    return markdown_table(head, lines)


class GalleryTable(SphinxDirective):
    """Insert the table of a group of methods."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the parsed table."""
        return self.parse_text_to_nodes(table(self.arguments[0]))


WIDTH, HEIGHT, GAP = 260, 150, 60  # of a panel, and between panels, in pixels


def draw(method: Method) -> str:
    """Draw the figure of a method as SVG: a panel for each problem, and a legend below."""
    rows, rounds = results()["rows"], results()["settings"]["rounds"]
    lines = [(method.title, "#0072B2", "", rows[method.name]["accuracy"])]
    if method.baseline != method.name:
        title = methods()[method.baseline].title
        lines.insert(0, (title, "#999999", "", rows[method.baseline]["accuracy"]))
    if attacked := rows[method.name]["attacked"]:
        lines.append(("two faulty participants", "#D55E00", "5 3", attacked))
    parts = []
    for left, problem in zip((GAP, 2 * GAP + WIDTH), PROBLEMS, strict=True):
        for share in (0, 0.5, 1):
            y = _height(share)
            parts.append(f'<path d="M{left} {y}h{WIDTH}" stroke="#ddd"/>')
            parts.append(_text(left - 8, y + 4, f"{share:g}", "end"))
        for number in (0, rounds // 2, rounds):
            parts.append(_text(left + number * WIDTH / rounds, HEIGHT + 46, str(number)))
        parts.append(_text(left + WIDTH / 2, 20, f"accuracy on {problem}"))
        parts.append(_text(left + WIDTH / 2, HEIGHT + 62, "round"))
        for _, color, dashes, accuracy in lines:
            points = " ".join(
                f"{left + x * WIDTH / rounds:.1f},{_height(y)}"
                for x, y in enumerate(accuracy[problem])
            )
            parts.append(f'<polyline points="{points}" {_stroke(color, dashes)}/>')
    for i, (title, color, dashes, _) in enumerate(lines):
        x, y = GAP + i * 210, HEIGHT + 88
        parts.append(f'<path d="M{x} {y - 4}h24" {_stroke(color, dashes)}/>')
        parts.append(_text(x + 30, y, title, "start"))
    width, height = 2 * WIDTH + 3 * GAP, HEIGHT + 100
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12" fill="#333">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _height(share: float) -> float:
    return round(30 + HEIGHT * (1 - share), 1)


def _stroke(color: str, dashes: str) -> str:
    return f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes or "none"}"'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'


def write_pages(app: Sphinx) -> None:
    """Write the pages that changed."""
    for method in methods().values():
        path, text = GALLERY / f"{method.name}.md", page(method)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the pages before Sphinx looks for files."""
    app.connect("builder-inited", write_pages)
    app.add_directive("gallery-table", GalleryTable)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for each in methods().values():
        (GALLERY / f"{each.name}.svg").write_text(draw(each))
