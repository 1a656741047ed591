"""The installed package: its names, its versions, and imports without side effects."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_the_types_are_shipped() -> None:
    assert (Path(fedpax.__file__).parent / "py.typed").is_file()


def test_every_folder_of_modules_is_installed() -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("fedpax", "algorithms", "experiments")
        for path in (ROOT / top).rglob("*.py")
    }
    placed = PROJECT["tool"]["setuptools"]["package-dir"]

    def folder(package: str) -> str:
        """Return the folder that setuptools takes a package from."""
        if package in placed or "." not in package:
            return placed.get(package, package)
        around, _, name = package.rpartition(".")
        return f"{folder(around)}/{name}"

    assert folders == {folder(name) for name in PROJECT["tool"]["setuptools"]["packages"]}


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
