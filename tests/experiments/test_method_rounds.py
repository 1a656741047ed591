"""Tests of the benchmark of the federated methods' rounds."""

import pytest

from fedpax.experiments.benchmarks import method_rounds, timing
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp


@pytest.mark.slow
def test_every_method_has_a_row_that_is_paired_with_fedavg(monkeypatch, capsys, tmp_path):
    tiny = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: tiny)
    monkeypatch.setattr(method_rounds, "on_devices", lambda _, fn, *args: fn(*args))
    rows = []
    monkeypatch.setattr(method_rounds, "write", lambda path, found, **_: rows.extend(found))
    assert method_rounds.main(["--model=tiny", "--clients=8", "--repetitions=2"]) == 0
    table = capsys.readouterr().out.splitlines()
    by_name = {row.method: row for row in rows}
    assert len(table) == 1 + len(rows) == 1 + len(by_name)
    for line, row in zip(table[1:], rows, strict=True):
        assert line.startswith(row.method)
        assert row.ratio == timing.paired_ratio(row.seconds, by_name["FedAvg"].seconds)
    assert by_name["FedAvg"].ratio == 1 and by_name["Mime"].passes == 3
