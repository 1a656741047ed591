"""Public continuous integration, and pre-commit: the versions that are tested here."""

import os
import tomllib
from pathlib import Path

import yaml
from test_package import CONSTRAINTS

ROOT = Path(__file__).parent.parent


def test_the_workflow_runs_what_decides_on_every_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    classified = [text.rpartition(" ")[2] for text in project["classifiers"] if " 3." in text]
    assert job["strategy"]["matrix"]["python-version"] == classified == ["3.11", "3.12"]
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_hooks_have_the_versions_of_the_constraints() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    versions = {c.name: str(c.specifier).removeprefix("==") for c in CONSTRAINTS}
    ruff, local = hooks
    assert ruff["rev"] == f"v{versions['ruff']}"
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}
    assert [hook["entry"] for hook in local["hooks"]] == ["make typecheck"]
