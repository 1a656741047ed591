"""Tests of `fedpax doctor`."""

import tomllib
from pathlib import Path

import jax
import pytest
from small_runs import Command

import fedpax
from fedpax.commands import doctor
from fedpax.extras import EXTRAS

ROOT = Path(__file__).parent.parent.parent


def test_a_whole_installation_has_no_problems(command: Command) -> None:
    status, output, errors = command("doctor")
    assert (status, errors) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in output.splitlines() if line)
    assert lines["fedpax"] == f"{fedpax.__version__} in {ROOT / 'fedpax'}"
    assert lines["jax"] == jax.__version__
    assert lines["devices"] == f"{jax.device_count()} cpu (cpu)"
    assert lines["compiled"].split(maxsplit=1)[1] == "not kept (JAX_ENABLE_COMPILATION_CACHE=0)"
    assert output.endswith("\nNo problems found.\n")


def test_every_extra_of_the_project_is_listed(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert EXTRAS.keys() == project["optional-dependencies"].keys() - {"dev"}
    output = command("doctor")[1]
    for name, extra in EXTRAS.items():
        (line,) = (line for line in output.splitlines() if line.startswith(f"extra {name} "))
        result = doctor._version(extra.package)
        expected = f"{extra.package} {result}" if result else f'pip install "fedpax[{name}]" for '
        assert expected in line


@pytest.mark.parametrize(
    ("package", "version", "words"),
    [
        ("optax", None, 'optax is missing, expected {} or newer. Run: pip install "optax>={}"'),
        ("chex", "0.0.9", 'chex 0.0.9, expected {} or newer. Run: pip install "chex>={}"'),
        ("tqdm", None, 'tqdm is missing, expected {} or newer. Run: pip install "tqdm>={}"'),
    ],
)
def test_a_missing_or_old_package_is_a_problem(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    version: str | None,
    words: str,
) -> None:
    installed, oldest = doctor._version, doctor._requirements()[package]
    monkeypatch.setattr(
        doctor, "_version", lambda name: version if name == package else installed(name)
    )
    status, output, _ = command("doctor")
    assert status == 1
    assert output.splitlines()[-1] == f"Problem: {words.format(oldest, oldest)}"


def test_devices_that_cannot_be_used_are_a_problem(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("Unable to initialize backend 'tpu'\nmore lines")

    monkeypatch.setattr(jax, "devices", broken)
    status, output, _ = command("doctor")
    assert status == 1
    reason = "RuntimeError: Unable to initialize backend 'tpu'"
    assert f"devices broken ({reason})" in " ".join(output.split())
    assert f"Problem: devices: {reason}. Correct JAX_PLATFORMS" in output


def test_an_argument_is_refused(command: Command) -> None:
    status, _, errors = command("doctor", "now")
    assert status == 2 and "got 'now', expected no arguments" in errors


def test_versions_are_compared_by_number() -> None:
    assert doctor._numbers("0.10.2.dev3") < doctor._numbers("0.11")
