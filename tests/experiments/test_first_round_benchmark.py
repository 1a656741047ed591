"""Tests of the benchmark of starts."""

import json
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import first_round

pytestmark = pytest.mark.slow


def test_a_warm_cache_makes_the_first_round_earlier(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "rows.json"
    assert first_round.main(["--repetitions=1", f"--json={path}"]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == [*first_round.COMMANDS, first_round.COLD, first_round.WARM]
    assert rows["first round, cache warm"]["ratio"] < 1 and rows["fedpax list"]["ratio"] < 1
    *table, empty, bar = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + len(rows) and empty == "" and bar.endswith("met.")


def test_a_training_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"--exp=nothing.*failed with status 2, expected 0"):
        first_round.train_first_round("nothing", tmp_path / "run", tmp_path / "cache")
