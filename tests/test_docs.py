"""Run every example: the doctests of all modules, and the Python blocks of all pages.

The blocks of a page run in order in one namespace: blocks with >>> as doctests, other blocks as
code. Blocks in other languages than `python` are not run. A page runs in an empty folder. A block
that begins with a file name in a comment (`# mine.py`) is saved there under this name first.
"""

import doctest
import importlib
import itertools
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import fedpax
import fedpax.algorithms
import fedpax.experiments
from fedpax.commands.parts.options import override
from fedpax.experiments.catalog import experiments
from fedpax.parallel.mesh import default_devices

ROOT = Path(__file__).parent.parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PACKAGES = (fedpax, fedpax.algorithms, fedpax.experiments)
MODULES = sorted(
    {package.__name__ for package in PACKAGES}
    | {
        module.name
        for package in PACKAGES
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    }
)
# The build writes the pages of the gallery and of the packages: their examples are in docstrings.
WRITTEN = {*(ROOT / "docs").glob("gallery/*.md"), *(ROOT / "docs").glob("reference/fedpax*.md")}
PAGES = [ROOT / "README.md", *sorted({*(ROOT / "docs").rglob("*.md")} - WRITTEN)]
# The others are slow: most compile what tests among the fast ones compile in other sizes. CI runs
# all by `make test-docs`.
FAST = {
    "README.md",
    "fedpax.algorithms.diloco",
    "fedpax.algorithms.fedavg",
    "fedpax.primitives.map",
    "fedpax.primitives.mean",
    "fedpax.transforms.program",
}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$? *(fedpax (?:[^\n]|(?<=\\)\n)*)$", re.MULTILINE)
FIELD = re.compile(r"--(?!model\.weights)(\w+\.|method=|aggregator=)")
FILE_NAME = re.compile(r"# (\w+\.py)\n")


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run the test in an empty folder, and forget the modules that it imports from there."""
    jax.devices()  # so that a command cannot change their number
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


def run_page(path: Path) -> int:
    """Run the Python blocks of a Markdown page and return their number."""
    text = path.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        code, line = block[1], text.count("\n", 0, block.start(1))
        if name := FILE_NAME.match(code):
            Path(name[1]).write_text(code)
        if ">>>" not in code:
            # Empty lines in front, so that an error names the line of the page.
            exec(compile("\n" * line + code, str(path), "exec"), namespace)
            continue
        test = doctest.DocTestParser().get_doctest(code, namespace, path.name, str(path), line)
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, clear_globs=False)
        assert result.failed == 0, (
            f"{path.name}, line {line + 1}: the output above was not expected"
        )
        namespace.update(test.globs)
    return len(blocks)


def fast_or_slow(name: str, value: Any) -> Any:
    return pytest.param(value, id=name, marks=[] if name in FAST else [pytest.mark.slow])


@pytest.mark.parametrize("name", [fast_or_slow(name, name) for name in MODULES])
def test_examples_of_module(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=FLAGS)
    assert result.failed == 0, f"{result.failed} examples of {name} failed: see the output above"


@pytest.mark.parametrize(
    "path", [fast_or_slow(path.relative_to(ROOT).as_posix(), path) for path in PAGES]
)
@pytest.mark.usefixtures("empty_folder")
def test_examples_of_page(path: Path) -> None:
    run_page(path)


@pytest.mark.slow
def test_the_table_of_transfers_is_printed_as_its_page_shows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "cost.md").read_text()
    shown = page.partition("```text\n")[2].partition("\nFLOPs")[0]
    exec(BLOCK.findall(page)[0], {})
    assert capsys.readouterr().out.partition("\nFLOPs")[0] == shown


@pytest.mark.parametrize("name", getattr(fedpax, "__all__", ()))
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(fedpax, name).__doc__ or "")


def commands() -> list[tuple[str, list[str]]]:
    """Return the commands of all pages that name experiments and fields of theirs, or a mesh."""
    collected = []
    for page in PAGES:
        for match in COMMAND.finditer(page.read_text()):
            words = shlex.split(match[1].replace("\\\n", " "), comments=True)
            if any(re.match(r"--\w+\.|--topology=cpu:", word) for word in words):
                collected.append((f"{page.name}: {match[1]}", words))
    return collected


def fields_of(words: list[str]) -> list[str]:
    """Return the fields of an experiment, with the further values of a field that has several."""
    fields, is_field = [], False
    for word in itertools.takewhile(lambda word: word not in ("&", "|", ">"), words):
        is_field = bool(FIELD.match(word)) if word.startswith("--") else is_field
        fields += [word] * is_field
    return fields


def test_commands_of_pages_have_fields_and_meshes_that_exist() -> None:
    known = experiments()
    assert len(commands()) > 20
    for text, words in commands():
        flags = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        fields = fields_of(words)
        for name in filter(known.get, flags.get("exp", "").split(",")):
            try:
                experiment = override(known[name](), fields, "fedpax", "")
            except SystemExit:
                pytest.fail(f"{text}: {name} does not accept {' '.join(fields)}")
            if count := flags.get("topology", "").removeprefix("cpu:"):
                if count.isdigit() and int(count) <= jax.device_count():
                    with default_devices(jax.devices()[: int(count)]):
                        experiment.make_mesh()


def test_blocks_of_a_page_share_a_namespace(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 2\n```\n```bash\nnot python\n```\n```python\n>>> y = x + 1\n>>> y\n3\n```\n"
        "```python\nassert y == 3\n```\n"
    )
    assert run_page(page) == 3


def test_a_block_that_begins_with_a_file_name_is_saved(empty_folder: Path) -> None:
    page = empty_folder / "page.md"
    page.write_text(
        "```python\n# saved.py\nx = 2\n```\n```python\nimport sys\nsys.path.insert(0, '.')\n"
        "from saved import x as y\nassert y == 2\n```\n"
    )
    assert run_page(page) == 2


@pytest.mark.parametrize("code", ["assert 1 == 2", ">>> 1\n2", ">>> undefined\n1"])
def test_a_wrong_example_fails(tmp_path: Path, code: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{code}\n```\n")
    with pytest.raises(AssertionError):
        run_page(page)
