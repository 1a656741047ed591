"""The first example of each client of a prepared data set."""

from pathlib import Path

from fedpax.sources.source import read_client_starts, write_client_starts


def test_starts_are_counted_over_all_parts(tmp_path: Path):
    assert read_client_starts(tmp_path, [("train", 2, 6)]) is None
    write_client_starts(tmp_path, {"train": [0, 3, 4]})
    starts = read_client_starts(tmp_path, [("train", 2, 6)])
    assert starts is not None and starts.tolist() == [0, 1, 2, 4]
