"""Tests of the benchmark of aggregations alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.experiments.benchmarks import aggregations, timing
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp


def numpy_median(results):
    return [np.median(np.stack(leaves), 0) for leaves in zip(*(r[0] for r in results), strict=True)]


@pytest.fixture
def tiny(monkeypatch):
    model = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: model)
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))
    monkeypatch.setattr(
        aggregations, "flower_functions", lambda: {"coordinate_median": numpy_median}
    )


def test_rows_are_paired_with_the_bound_and_with_flower(tiny, capsys):
    names = ["coordinate_median", "geometric_median"]
    arguments = ["--model=tiny", "--clients=16", "--repetitions=2"]
    rows = aggregations.main.run([*arguments, f"--aggregators={';'.join(names)}"])
    assert [row.aggregator for row in rows] == names
    for row in rows:
        assert row.bound_ratio == timing.paired_ratio(row.seconds, row.bound_seconds)
    median, geometric = rows
    assert median.flower_ratio == timing.paired_ratio(median.flower_seconds, median.seconds)
    assert geometric.flower_ratio is None
    printed = capsys.readouterr().out
    assert all(f"| {name} " in printed for name in names)


def test_another_result_than_flowers_is_an_error(tiny, monkeypatch):
    wrong = {"trimmed_mean(0.1)": numpy_median}
    monkeypatch.setattr(aggregations, "flower_functions", lambda: wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        aggregations.main.run(
            ["--model=tiny", "--clients=16", "--aggregators=trimmed_mean(0.1)", "--repetitions=1"]
        )


def test_every_bound_reads_all_updates():
    """The update of any client changes the result."""
    x = np.float32(np.random.default_rng(0).standard_normal((15, 4)))
    for name, (_, bound) in aggregations.aggregations().items():
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
    ("argument", "words"),
    [
        ("--aggregators=median", "unknown aggregators"),
        ("--clients=14", "expected at least 15"),
    ],
)
def test_arguments_out_of_range_are_refused(argument, words, capsys):
    with pytest.raises(SystemExit):
        aggregations.main([argument])
    assert words in capsys.readouterr().err
