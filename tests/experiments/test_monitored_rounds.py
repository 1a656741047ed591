"""Tests of the benchmark of rounds that report norms or skip spikes."""

import json
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import monitored_rounds

pytestmark = pytest.mark.slow


def test_each_setting_is_compared_with_the_plain_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    options = ["--num_layers=1", "--batch_size=1", "--repetitions=1", f"--json={path}"]
    monitored_rounds.main(options)
    rows = json.loads(path.read_text())["rows"]
    assert [row["setting"] for row in rows] == ["plain", "gradient_norm", "update_norm", "skip"]
    assert rows[0]["temporaries_over_state"] == 0 and rows[0]["time_ratio"] == 1
    # Two states at once: the former and the new one.
    assert rows[3]["temporaries_over_state"] > 0.9
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| setting") and lines[5].startswith("| skip")
