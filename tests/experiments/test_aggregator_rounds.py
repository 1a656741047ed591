"""Tests of the benchmark of FedAvg's rounds with each aggregator."""

import statistics

import jax
import jax.numpy as jnp
import pytest

import fedpax
from fedpax.experiments.benchmarks import aggregator_rounds, timing
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["sign"], pytest.param(None, marks=pytest.mark.slow)])
def test_every_aggregator_has_a_row_that_is_paired_with_the_mean(chosen, monkeypatch, capsys):
    tiny = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: tiny)
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))
    arguments = ["--model=tiny", "--clients=8", "--repetitions=2"]
    arguments += [] if chosen is None else [f"--aggregators={';'.join(chosen)}"]
    rows = aggregator_rounds.main.run(arguments)
    names = chosen or [name for name in aggregator_rounds.aggregators(8) if name != "mean"]
    assert [row.name for row in rows] == ["mean", *names]
    assert rows[0].ratio == 1
    printed = capsys.readouterr().out
    for row in rows:
        assert row.ratio == timing.paired_ratio(row.seconds, rows[0].seconds)
        added = [
            (own - least) / whole
            for own, least, whole in zip(
                row.untrained_seconds, rows[0].untrained_seconds, rows[0].seconds, strict=True
            )
        ]
        assert row.added == statistics.median(added)
        assert f"| {row.name} " in printed
        assert f"| {row.added:+.1%} |".replace(" ", "") in printed.replace(" ", "")


@pytest.mark.parametrize(
    "clients", [2, *[pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5, 6)], 7, 64]
)
def test_the_settings_of_all_aggregators_fit_the_number_of_clients(clients: int):
    updates = jax.ShapeDtypeStruct((clients, 3), jnp.float32)
    for name, aggregator in aggregator_rounds.aggregators(clients).items():

        @fedpax.program(clients=clients)
        def average(updates, aggregator=aggregator):
            state = aggregator.init(jnp.zeros(3))
            return aggregator.aggregate(state, updates, None)[0]

        assert jax.eval_shape(average, updates).shape == (3,), name


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--aggregators=Sign", "unknown aggregators"),
        ("--clients=1", "expected at least 2"),
        ("--repetitions=0", "expected at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, words: str, capsys):
    with pytest.raises(SystemExit):
        aggregator_rounds.main([argument])
    assert words in capsys.readouterr().err
