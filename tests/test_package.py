"""The installed package: its names, its versions, and imports without side effects."""

import ast
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

import fedpax

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def test_the_installed_version_is_that_of_the_project() -> None:
    assert importlib.metadata.version("fedpax") == PROJECT["project"]["version"]


def test_the_version_is_stated_once_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert fedpax.__version__ == version
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text()
    first = re.findall(r"^## (\S+)", (ROOT / "docs" / "changelog.md").read_text(), re.M)[0]
    assert first.rstrip(",") == version


def test_the_types_are_shipped() -> None:
    assert (Path(fedpax.__file__).parent / "py.typed").is_file()


def test_every_folder_of_modules_is_installed_but_the_benchmarks() -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("fedpax", "algorithms", "experiments")
        for path in (ROOT / top).rglob("*.py")
    }
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    assert find["where"] == [".src"]
    names = find_packages(str(ROOT / ".src"), exclude=find["exclude"])
    packages = [name.replace(".", "/") for name in names]
    installed = {(ROOT / ".src" / name).resolve().relative_to(ROOT).as_posix() for name in packages}
    assert folders - installed == {"experiments/benchmarks"} and installed <= folders


def test_the_folder_on_the_path_of_an_editable_installation_has_no_other_name() -> None:
    names = {path.name for path in (ROOT / ".src").iterdir()}
    assert names - {"fedpax.egg-info"} == {"fedpax"}
    for link in (".src/fedpax", "fedpax/algorithms", "fedpax/experiments"):
        assert (ROOT / link).is_symlink() and not Path(os.readlink(ROOT / link)).is_absolute()


def test_the_public_names_are_the_exported_ones_and_the_packages() -> None:
    public = {name for name in dir(fedpax) if not name.startswith("_")}
    assert {"algorithms", "data", "program", "training"} <= public
    assert not {"importlib", "pkgutil", "annotations"} & public
    packages = [name for name in sorted(public) if inspect.ismodule(getattr(fedpax, name))]
    assert public == {*fedpax.__all__, *packages}
    assert all(getattr(fedpax, name).__name__ == f"fedpax.{name}" for name in packages)
    assert packages == [
        module.name for module in pkgutil.iter_modules(fedpax.__path__) if module.ispkg
    ]
    with pytest.raises(AttributeError, match="has no attribute 'importlib'"):
        _ = fedpax.importlib


def test_every_name_of_a_stub_is_imported_on_first_use() -> None:
    stubs = [*(ROOT / "fedpax").rglob("__init__.pyi"), ROOT / "experiments" / "__init__.pyi"]
    assert len({*stubs}) >= 9
    for stub in stubs:
        parts = ["fedpax", *stub.parent.relative_to(ROOT).parts]
        package = importlib.import_module(".".join(dict.fromkeys(parts)))
        exported = {
            alias.name: node.module
            for node in ast.parse(stub.read_text()).body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.name == alias.asname
        }
        assert package.__all__ == sorted(n for n, m in exported.items() if m != package.__name__)
        assert exported.keys() <= {*dir(package)}
        assert all(getattr(package, name) is not None for name in exported)


def test_constraints_are_exact_versions_and_hold_no_address() -> None:
    for constraint in CONSTRAINTS:
        assert constraint.url is None, constraint
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(constraint.specifier)), constraint
    text = (ROOT / "constraints.txt").read_text()
    assert not re.search(r"://|^\s*-|(^|\s)[./~]+/", text, re.MULTILINE)


def test_every_dependency_is_constrained_on_every_python() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"]
    wanted = map(Requirement, project["dependencies"] + extras["dev"] + extras["tpu"])
    for requirement in wanted:
        for python in ("3.11", "3.12", "3.13"):
            versions = [
                str(constraint.specifier).removeprefix("==")
                for constraint in CONSTRAINTS
                if canonicalize_name(constraint.name) == canonicalize_name(requirement.name)
                and (
                    not constraint.marker or constraint.marker.evaluate({"python_version": python})
                )
            ]
            assert len(versions) == 1, f"{requirement} on Python {python}: {versions}"
            assert versions[0] in requirement.specifier, f"{requirement} excludes {versions[0]}"


def test_every_installed_package_is_constrained() -> None:
    """Follow dependencies of dependencies: a new installation is the tested one."""
    constrained = {canonicalize_name(constraint.name) for constraint in CONSTRAINTS}
    seen: set[tuple[str, str]] = set()
    waiting = [("fedpax", ""), ("fedpax", "dev")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, importlib.metadata.requires(name) or ()):
            if not requirement.marker or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, e) for e in ("", *requirement.extras)]
    missing = {name for name, _ in seen if canonicalize_name(name) not in constrained}
    assert missing == {"fedpax"}


def test_importing_every_module_starts_no_backend_and_changes_no_setting() -> None:
    program = """
import importlib, pkgutil, jax
before = dict(jax.config.values)
import fedpax, fedpax.algorithms, fedpax.experiments
for package in (fedpax, fedpax.algorithms, fedpax.experiments):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
assert dict(jax.config.values) == before
jax.config.update("jax_num_cpu_devices", 3)  # JAX refuses this once a backend has started
assert jax.device_count() == 3
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
