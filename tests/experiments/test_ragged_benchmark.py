"""Tests of the benchmark of clients with different numbers of steps."""

import json

import pytest

from fedpax.experiments.benchmarks import ragged_clients
from fedpax.experiments.benchmarks.ragged_clients import RaggedClients

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_the_rows_count_the_steps_of_each_variant(devices):
    benchmark = RaggedClients(batch_size=2, repetitions=2)
    rows = {r.variant: r for r in benchmark.measure_size(devices, 16)}
    assert list(rows) == ["balanced", "as drawn", "padded", "equal clients"]
    assert all(len(r.seconds) == 2 and r.slowdown > 0 for r in rows.values())
    own, longest = rows["balanced"].steps, rows["padded"].steps
    assert own == rows["as drawn"].steps < longest
    assert rows["padded"].padded_or_idle_fraction == pytest.approx(1 - own / longest)
    assert rows["balanced"].padded_or_idle_fraction <= rows["as drawn"].padded_or_idle_fraction
    assert (
        rows["equal clients"].padded_or_idle_fraction
        == pytest.approx(0)
        == 1 - rows["equal clients"].slowdown
    )


def test_the_command_prints_a_row_per_variant(tmp_path, capsys):
    arguments = ["--clients=8", "--devices=1,2", "--batch_size=2", "--repetitions=1"]
    assert ragged_clients.main([*arguments, f"--json={tmp_path / 'rows.json'}"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 4
    content = json.loads((tmp_path / "rows.json").read_text())
    assert [r["devices"] for r in content["rows"]] == [1] * 4 + [2] * 4
