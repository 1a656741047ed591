"""The commands of docs/tables.md, run one after another in an empty folder."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fedpax.data.tables import TableFeatures

PAGE = Path(__file__).parents[2] / "docs" / "tables.md"


@pytest.mark.slow
def test_the_five_commands_give_the_figures_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    files, *_ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    exec(compile(files, str(PAGE), "exec"), {})
    commands, *_ = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(commands.splitlines()) == 5
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        assert program == "fedpax"
        run = [sys.executable, "-m", "fedpax.main", *arguments]
        assert subprocess.run(run).returncode == 0
    figures = {"open": 0.93, "private": 0.91}
    for name, accuracy in figures.items():
        content = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert round(content["metrics"]["accuracy"], 2) == accuracy
        assert len(content["clients"]) == 12
        assert {"client", "examples", "loss", "accuracy", "auc"} <= set(content["clients"][0])
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    export = ["export", "--job_log_dir=runs/open", "--out=model", "--format=orbax"]
    assert subprocess.run([sys.executable, "-m", "fedpax.main", *export]).returncode == 0
    columns = json.loads((tmp_path / "model" / "table.json").read_text("utf-8"))["columns"]
    assert TableFeatures.from_json(columns).names[:2] == ("radius", "radius is missing")
