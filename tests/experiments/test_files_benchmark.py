"""The benchmark of files runs, and leaves nothing behind."""

from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import files


def test_the_benchmark_prints_a_row_for_each_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--clients=50", "--cohort=5", "--repetitions=2", f"--folder={tmp_path}"]
    rows = files.main.run([*arguments, f"--json={tmp_path / 'a.json'}"])
    # Rounds alternate with those of few clients, thirty times as often.
    assert [len(row.seconds) for row in rows] == [2, 2, 2, 60, 60, 60, 60]
    assert [row.ratio is None for row in rows] == [False, True, True, *[False] * 4]
    assert "prepare; DuckDB's sort" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
