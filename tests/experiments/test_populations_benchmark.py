"""Tests of the benchmark of populations."""

import json
from pathlib import Path

from fedpax.experiments.benchmarks import populations


def test_every_step_has_a_row_with_its_bar(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(populations, "COHORT", 8)
    monkeypatch.setattr(populations, "cpu_seconds", lambda step: 0.0 * (step() is None))
    populations.main(["--clients=64", f"--json={path}"])
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 12 and all(row["bytes"] > 0 for row in rows)
    assert [row["bar"] for row in rows if "sample" in row["step"]] == [0.01]
    assert all(row["met"] for row in rows[6:])  # of the first ones, some exceed 200 bytes a client


def test_slow_steps_miss_the_bar(monkeypatch) -> None:
    monkeypatch.setattr(populations, "cpu_seconds", lambda _: 1.0)
    monkeypatch.setattr(populations, "peak_bytes", lambda _: 1)
    assert populations.main(["--clients=64"]) == 1
    monkeypatch.setattr(populations, "cpu_seconds", lambda _: 0.0)
    assert populations.main(["--clients=64"]) == 0
