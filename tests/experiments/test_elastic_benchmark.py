"""Tests of the benchmark of elastic restarts."""

import json
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import elastic_restarts


@pytest.mark.slow
def test_every_event_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "rows.json"
    assert elastic_restarts.main(["--processes=2", "--repetitions=1", f"--json={path}"]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert tuple(rows) == elastic_restarts.EVENTS
    assert rows["start"]["ratio"] == 1
    assert all(0 < row["seconds"][0] < elastic_restarts.LONGEST for row in rows.values())
    assert all(0 < row["cpu"][0] < elastic_restarts.LONGEST for row in rows.values())
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@pytest.mark.parametrize("wrong", ["--processes=1", "--repetitions=0"])
def test_settings_that_measure_nothing(wrong: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        elastic_restarts.main([wrong])
    name, least = ("--processes", 2) if "processes" in wrong else ("--repetitions", 1)
    text = f"{name} is {wrong[-1]}, expected at least {least}"
    assert text in capsys.readouterr().err
