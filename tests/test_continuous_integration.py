"""Public continuous integration, and pre-commit."""

import os
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent


def test_the_workflow_runs_what_decides_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = [text.rpartition(" ")[2] for text in project["classifiers"] if " 3." in text]
    assert job["strategy"]["matrix"]["python-version"] == classified == ["3.11", "3.12"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_hooks_are_local_targets_of_make() -> None:
    """They have the versions of constraints.txt, and need no network."""
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    assert [hook["entry"] for hook in local["hooks"]] == ["make lint", "make typecheck"]
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{hook['entry'].removeprefix('make ')}: " in targets for hook in local["hooks"])
