"""The benchmark of federated methods."""

import json
import sys

import numpy as np
import pytest

from fedpax.data.populations.logistic_clients import logistic_clients
from fedpax.experiments.benchmarks import methods


@pytest.mark.slow
def test_the_table_counts_rounds_bytes_and_flops_to_the_target(monkeypatch, capsys, tmp_path):
    file = tmp_path / "rows.json"
    arguments = ["--problem=synthetic", "--rounds=25", "--rates=0.03", f"--json={file}"]
    arguments += ["--methods=FedAvg;SCAFFOLD", f"--plot={tmp_path / 'plot.png'}"]
    monkeypatch.setattr(sys, "argv", ["methods", *arguments])
    methods.main()
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    params = 4 * (60 * 10 + 10)
    for name, copies in (("FedAvg", 1), ("SCAFFOLD", 2)):
        row = rows[name]
        assert row["learning_rate"] == 0.03
        assert (
            row["accuracies"][row["rounds"] - 1]
            >= 0.7
            > max(row["accuracies"][: row["rounds"] - 1])
        )
        # Down and up, with the metrics (and the sum of weights) beside the update.
        up_and_down = row["bytes_per_round"] / 10
        assert 0 < up_and_down - 2 * copies * params <= 12
        assert row["flops_per_round"] > 0
    assert rows["SCAFFOLD"]["rounds"] < rows["FedAvg"]["rounds"]
    out = capsys.readouterr().out
    assert "rounds to 70%" in out and out.index("| SCAFFOLD") < out.index("| FedAvg")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_unknown_methods_and_too_few_rounds_are_refused(monkeypatch, capsys):
    for argument, words in (("--methods=Fedavg", "unknown methods"), ("--rounds=0", "at least 1")):
        monkeypatch.setattr(sys, "argv", ["methods", "--problem=synthetic", argument])
        with pytest.raises(SystemExit):
            methods.main()
        assert words in capsys.readouterr().err


def test_logistic_clients_differ_by_alpha_and_beta():
    def spread(alpha: float, beta: float) -> tuple[float, float]:
        """Return the variance between clients of their inputs' mean, and of their labels."""
        examples, population = logistic_clients(200, alpha=alpha, beta=beta, seed=1)
        means = [examples["image"][part].mean() for part in population]
        largest = [np.bincount(examples["label"][part]).max() / len(part) for part in population]
        return np.var(means), np.mean(largest)

    # The mean over 60 inputs of v_k ~ N(B_k, 1), B_k ~ N(0, beta), has variance beta + 1 / 60.
    assert abs(spread(1.0, 0.0)[0] - 1 / 60) < 0.01
    assert abs(spread(1.0, 4.0)[0] - 4) < 4 * 4 * np.sqrt(2 / 200)
    again, population = logistic_clients(3, alpha=1.0, beta=1.0, seed=1)
    assert sorted(np.concatenate(population)) == list(range(len(again["label"])))
    assert all(50 <= len(part) <= 5000 for part in population)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"alpha": -1.0, "beta": 0.0}, "alpha is -1.0"), ({"num_classes": 0}, "num_classes 0")],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        logistic_clients(3, **({"alpha": 1.0, "beta": 1.0} | settings))
