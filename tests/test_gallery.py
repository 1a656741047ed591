"""The gallery: every method has a page, whose example runs and whose figure is measured."""

import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from fedpax import aggregators, algorithms
from fedpax.experiments.benchmarks import gallery, gallery_methods

DOCS = Path(__file__).parent.parent / "docs"


def _pages():
    """Import the module of the site that makes the pages."""
    spec = importlib.util.spec_from_file_location("gallery_pages", DOCS / "gallery_pages.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("gallery_pages", module)
    spec.loader.exec_module(module)
    return module


pages = _pages()
MADE = re.compile("FederatedAlgorithm|Aggregator|GradientTransformation")
FAST = ("fedavg", "diloco", "krum", "fedbuff")  # one of each group
# Without a page: an optimizer that clients of Mime take.
PARTS = {"mime_adam"}


def is_method(function):
    """Return whether a public function makes a method, an aggregator or a server optimizer."""
    return inspect.isfunction(function) and bool(
        MADE.search(str(inspect.signature(function).return_annotation))
    )


def test_every_method_has_a_page_and_a_measurement():
    public = {
        name
        for package in (algorithms, aggregators)
        for name in package.__all__
        if is_method(getattr(package, name))
    }
    assert len(public) > 40
    assert set(pages.methods()) == public - PARTS
    assert set(gallery_methods.NAMES) == set(pages.methods())
    assert set(pages.results()["rows"]) == set(pages.methods())


def test_figures_are_drawn_from_the_results():
    """`make gallery` draws them anew."""
    for method in pages.methods().values():
        assert (DOCS / "gallery" / f"{method.name}.svg").read_text() == pages.draw(method)


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in pages.methods()
    ],
)
def test_examples_of_pages_run_without_their_modules(name):
    text = pages.page(pages.methods()[name])
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    test = doctest.DocTestParser().get_doctest(code, {}, name, None, 0)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def test_a_page_has_the_parts_of_the_template():
    text = pages.page(pages.methods()["scaffold"])
    for part in (
        "# SCAFFOLD",
        "Use it when clients' data differ",
        "```text\ny_i <- y_i - eta_l (grad f_i(y_i) - c_i + c) ",
        "[SCAFFOLD](scaffold.md)",
        "[arXiv:1910.06378](https://arxiv.org/abs/1910.06378)",
        "tests/algorithms/test_scaffold.py",
        "files that test all methods of a table",
    ):
        assert part in text
    assert "Args:" not in text and "Raises:" not in text


def test_prose_of_docstrings_is_escaped_but_not_code_or_equations():
    text = "One <b> of `a*b` * 2:\n\n    x <- y * 2\n\nand more."
    expected = "One \\<b> of `a*b` \\* 2:\n\n```text\nx <- y * 2\n```\n\nand more."
    assert pages.markdown(text) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "diloco", "krum", "fedbuff", "async_diloco"])
def test_measurements_repeat(name):
    """The committed results are of a machine with other rounding: close, not equal."""
    (row,) = gallery.Gallery(rounds=3, methods=[name]).measure()
    committed = pages.results()["rows"][name]
    assert row.received_bytes == committed["received_bytes"]
    assert row.sent_bytes == committed["sent_bytes"]
    if name in ("fedavg", "diloco", "krum"):  # batches of the first rounds depend on their number
        assert len(row.accuracy["digits"]) == 4
        assert row.accuracy["digits"][0] == committed["accuracy"]["digits"][0]
