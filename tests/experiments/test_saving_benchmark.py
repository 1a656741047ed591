"""Tests of the benchmark that measures how long training waits for a checkpoint."""

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
    wanted = ["what", "MB written", "training waits, s", "complete after, s", "CPU s", "most MB"]
    assert [title.strip() for title in titles.split("|")[1:-1]] == wanted
    assert len(saves) == 2
    for line in saves:
        _, written, waits, complete, *_ = line.split("|")[1:-1]
        assert 0.5 < float(written) < 2 and 0 < float(waits) < float(complete)
    assert 0 < float(share.rpartition(" ")[2]) < 1
    assert not list(tmp_path.iterdir())  # the folder is left as it was


def test_of_clients_the_rows_that_changed_are_written(tmp_path: Path) -> None:
    arguments = ["--clients=4096", "--floats=1024", "--saves=2", "--cohort=10"]
    rows = saving.main.run([*arguments, f"--folder={tmp_path}"])
    assert [row.what for row in rows] == ["save 0", "save 1", "save 2", "restore"]
    first, second, third, _ = (row.megabytes for row in rows)
    assert first > 14 and second < 0.6 < third < 1
