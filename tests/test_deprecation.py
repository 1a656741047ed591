"""Deprecated names warn where they are used, and are removed after one minor version."""

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

import fedpax
from fedpax.lazy_names import warn_deprecated

ROOT = Path(__file__).parent.parent


def removals(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the version of each deprecation in a source text."""
    if "warn_deprecated" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_deprecated"):
            (version,) = (word.value for word in node.keywords if word.arg == "removed_in")
            yield node.lineno, ast.literal_eval(version)


def test_nothing_outlives_its_deprecation() -> None:
    overdue = [
        f"{path.relative_to(ROOT)}:{line}: remove what fedpax {version} no longer has"
        for top in ("fedpax", "algorithms", "experiments")
        for path in (ROOT / top).rglob("*.py")
        for line, version in removals(path.read_text(encoding="utf-8"))
        if Version(version) <= Version(fedpax.__version__)
    ]
    assert not overdue, "\n".join(overdue)


def test_a_deprecation_is_found() -> None:
    source = "def old():\n    deprecation.warn_deprecated('old', 'new', removed_in='0.4.0')"
    assert list(removals(source)) == [(2, "0.4.0")]


def test_the_warning_is_at_the_users_line() -> None:
    def old(x: int) -> int:
        warn_deprecated("old()", "new()", removed_in="99.0.0")
        return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert old(3) == 3
    (warning,) = caught
    assert warning.category is DeprecationWarning and warning.filename == __file__
    assert "old(3)" in Path(__file__).read_text().splitlines()[warning.lineno - 1]


@pytest.mark.parametrize(
    ("package", "name", "new"),
    [
        ("fedpax.sites", "join", "fedpax.islands.join"),
        ("fedpax.sites", "run_syncer", "fedpax.islands.run_syncer"),
        (
            "fedpax.sites.signed_keys",
            "CertificateSigner",
            "fedpax.transport.signed_keys.CertificateSigner",
        ),
        ("fedpax.checkpoints", "participant_weights", "fedpax.checkpoints.resize_weights"),
    ],
)
def test_a_moved_name_is_at_its_old_path_with_a_warning(package: str, name: str, new: str) -> None:
    pytest.importorskip("grpc")
    old = importlib.import_module(package)
    with pytest.deprecated_call(match=rf"{package}\.{name} is .* Use {new}\.") as caught:
        value = getattr(old, name)
    module, _, new_name = new.rpartition(".")
    assert value is getattr(importlib.import_module(module), new_name)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        old.nothing  # noqa: B018


def test_fedpax_itself_uses_no_deprecated_name() -> None:
    """Warnings that name fedpax's own modules are errors in all tests."""
    with pytest.raises(DeprecationWarning, match=r"old is deprecated .* 99\.0\.0\. Use new\."):
        warnings.warn_explicit(
            "old is deprecated and will be removed in fedpax 99.0.0. Use new.",
            DeprecationWarning,
            "fedpax/x.py",
            1,
            module="fedpax.x",
        )
