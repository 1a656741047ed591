"""Tests of the benchmark of the input of rounds of clients."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from fedpax.experiments.benchmarks import cohort_input, timing
from fedpax.experiments.benchmarks.cohort_input import CohortInput


def test_rows_have_the_kinds_and_their_bars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cohort_input, "round_seconds", lambda *_: 0.5)
    monkeypatch.setattr(timing, "interleaved", lambda *_: {"next": [2.4], "copy": [1.0]})
    fractions = itertools.cycle([0.05, 0.2, 0.1])
    seconds = []
    monkeypatch.setattr(
        cohort_input, "waiting", lambda stream, *rest: seconds.append(rest) or next(fractions)
    )
    path = tmp_path / "rows.json"
    arguments = ["--clients=4", "--examples=50", f"--json={path}"]
    assert cohort_input.main(arguments) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["kind"], row["met"]) for row in rows] == [
        ("float32", True),
        ("uint8", False),
        ("uint8 to float32", True),
    ]
    assert seconds == [(0.01, 5, "wall")] * 3  # 50 times as fast
    monkeypatch.setattr(cohort_input, "waiting", lambda *_: 0.11)
    assert not any(row.met for row in cohort_input.main.run(arguments))
    monkeypatch.setattr(timing, "interleaved", lambda *_: {"next": [2.6], "copy": [1.0]})
    monkeypatch.setattr(cohort_input, "waiting", lambda *_: 0.0)
    assert cohort_input.main(arguments) == 1


def test_integers_stay_integers_and_a_slow_stream_is_waited_for() -> None:
    streams = dict(cohort_input.streams(CohortInput(clients=4, examples=50)))
    dtypes = {kind: next(stream).batches["image"].dtype for kind, stream in streams.items()}
    assert dtypes == {"float32": np.float32, "uint8": np.uint8, "uint8 to float32": np.float32}
    assert cohort_input.waiting(streams["uint8"], 1e-6, 2) > 0.5
    for clock in ("cpu", "wall"):
        assert 0 <= cohort_input.waiting(streams["uint8"], 0.3, 2, clock) < 0.5


def test_a_round_of_the_cohort_is_timed() -> None:
    _, stream = next(cohort_input.streams(CohortInput(clients=4, examples=50)))
    assert cohort_input.round_seconds(next(stream)) > 0
