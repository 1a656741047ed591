"""The benchmark of clients' loaders runs, and says which libraries are not installed."""

import pytest

from fedpax.experiments.benchmarks import client_loaders


def test_the_benchmark_measures_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(images: object, cohort: int) -> None:
        raise ImportError("no such library")

    own = {name: make for name, make in client_loaders.READERS.items() if "fedpax" in name}
    monkeypatch.setattr(client_loaders, "READERS", {**own, "other": missing})
    rows = client_loaders.main.run(["--clients=3", "--images=4", "--repetitions=2"])
    assert {row.name: len(row.seconds) for row in rows} == {**dict.fromkeys(own, 2), "other": 0}
    assert {row.name: row.ratio is None for row in rows} == {
        **dict.fromkeys(own, False),
        "other": True,
    }
    assert "not installed: no such library" in capsys.readouterr().out
