"""Tests of the benchmark of aggregators, in FedAvg's rounds and alone."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.experiments.benchmarks import aggregator_rounds, timing
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp


def numpy_median(results):
    return [np.median(np.stack(leaves), 0) for leaves in zip(*(r[0] for r in results), strict=True)]


@pytest.fixture
def tiny(monkeypatch):
    """Add a workload that compiles quickly, and measure in this process, with one peer."""
    model = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: model)
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))
    peers = {"coordinate_median": numpy_median}
    monkeypatch.setattr(aggregator_rounds, "flower_functions", lambda: peers)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [["sign"], pytest.param(None, marks=pytest.mark.slow)])
def test_every_aggregator_has_a_row_that_is_paired_with_the_mean(chosen, tiny, capsys):
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
                row.alone_seconds, rows[0].alone_seconds, rows[0].seconds, strict=True
            )
        ]
        assert row.added == statistics.median(added)
        assert f"| {row.name} " in printed
        assert f"| {row.added:+.1%} |".replace(" ", "") in printed.replace(" ", "")


def test_rows_are_paired_with_the_bound_and_with_flower(tiny, capsys):
    names = ["geometric_median", "coordinate_median"]
    arguments = ["--model=tiny", "--clients=16", "--repetitions=2"]
    rows = aggregator_rounds.main.run([*arguments, f"--aggregators={';'.join(names)}"])
    assert [row.name for row in rows] == ["mean", *names]
    mean, geometric, median = rows
    for row in (geometric, median):
        assert row.bound_ratio == timing.paired_ratio(row.alone_seconds, row.bound_seconds)
    assert median.flower_ratio == timing.paired_ratio(median.flower_seconds, median.alone_seconds)
    assert mean.bound_ratio is mean.flower_ratio is geometric.flower_ratio is None
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in names)


def test_another_result_than_flowers_is_an_error(tiny, monkeypatch):
    wrong = {"trimmed_mean(0.1)": numpy_median}
    monkeypatch.setattr(aggregator_rounds, "flower_functions", lambda: wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        aggregator_rounds.main.run(
            ["--model=tiny", "--clients=16", "--aggregators=trimmed_mean(0.1)", "--repetitions=1"]
        )


def test_every_bound_reads_all_updates():
    """The update of any client changes the result."""
    x = np.float32(np.random.default_rng(0).standard_normal((15, 4)))
    for name, bound in aggregator_rounds.BOUNDS.items():
        run = jax.jit(fedpax.program(clients=15)(bound))
        results = [run(x)]
        for i in (0, 7, 14):
            changed = x.copy()
            changed[i] = -50
            results.append(run(jnp.asarray(changed)))
        for changed in results[1:]:
            leaves = zip(jax.tree.leaves(results[0]), jax.tree.leaves(changed), strict=True)
            assert any(not np.array_equal(a, b) for a, b in leaves), name


@pytest.mark.parametrize(
    "clients", [2, *[pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5, 6, 16, 64)], 7]
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
