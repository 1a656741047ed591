"""The benchmark of the input of one host."""

import json
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks.input_rate import main


def test_the_benchmark_measures_one_host(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--tokenizer=bytes", "--documents=600", "--cpu_seconds=0.1", "--rounds=1"]
    sizes = ["--chips=16", "--batch_size=8", "--seq_len=64", f"--json={path}"]
    assert main([*arguments, *sizes]) == 0
    assert "tokens/s for each of 4 hosts" in capsys.readouterr().out
    content = json.loads(path.read_text())
    (row,) = content["rows"]
    assert row["tokenizer"] == "bytes" and row["tokens_per_core"] > 1e5
    total = row["read"] + row["tokenize"] + row["pack"]
    assert total * row["tokens_per_core"] == pytest.approx(1e9)
    assert row["cores"] == pytest.approx(row["tokens_per_second"] / row["tokens_per_core"])
    assert 0 <= row["waiting"] < 1
