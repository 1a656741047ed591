"""Tests of the benchmark that measures how long training waits for a checkpoint."""

import re
from pathlib import Path

import pytest

from fedpax.experiments.benchmarks import saving

pytestmark = pytest.mark.slow


def test_each_save_is_measured_until_it_returns_and_until_it_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving.main(["--megabytes=1", "--saves=2", f"--folder={tmp_path}"])
    head, titles, _, *saves, share, _ = capsys.readouterr().out.splitlines()
    assert head.startswith("1 MB in 48 arrays")
    assert titles == "| training waits, s | complete after, s |"
    assert len(saves) == 2
    for line in saves:
        result = re.fullmatch(r"\| *([\d.]+) *\| *([\d.]+) *\|", line)
        assert result and 0 < float(result[1]) < float(result[2])
    assert 0 < float(share.rpartition(" ")[2]) < 1
    assert not list(tmp_path.iterdir())  # the folder is left as it was
