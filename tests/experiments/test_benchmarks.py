"""Tests of the benchmarks of a FedAvg round and of its gradient."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import fedpax
from fedpax.experiments.benchmarks import fedavg_round, timing
from fedpax.experiments.benchmarks.fedavg_round import FedAvgRound, fedpax_round, vmap_round
from fedpax.experiments.benchmarks.harness import Row
from fedpax.experiments.benchmarks.timing import on_devices
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload, changed, method
from fedpax.models.classifiers import CNNConfig, MLPConfig, mlp

TINY = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Add a workload that compiles quickly, and measure in this process."""
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: TINY)
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))


pytestmark = pytest.mark.usefixtures("quick_compilation")


def measure(devices, clients, **settings):
    """Measure FedAvg rounds of the tiny workload."""
    sizes = {"devices": [devices], "clients": [clients]}
    return list(FedAvgRound(model="tiny", **sizes, **settings).measure())


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_every_implementation_of_the_round_has_a_row(devices):
    baselines = ["scan", "vmap"] + ["drjax"] * timing.is_installed("drjax")
    rows = measure(devices, 4, chunk_size=["auto", 2], baselines=baselines, repetitions=2)
    assert [row.implementation for row in rows] == ["fedpax auto", "fedpax 2", *baselines]
    for row in rows:
        assert (row.model, row.devices, row.clients) == ("tiny", devices, 4)
        assert len(row.seconds) == 2 and min(row.seconds) > 0 and row.compile_seconds > 0
        assert row.fedpax_ratio == timing.paired_ratio(rows[0].seconds, row.seconds)


def test_rounds_with_different_results_raise(monkeypatch):
    def wrong(local_train, clients):
        right = vmap_round(local_train, clients)
        return lambda params, batches, weights: right(params, batches, jnp.ones_like(weights))

    monkeypatch.setitem(fedavg_round.BASELINES, "unweighted", wrong)
    with pytest.raises(AssertionError, match="unweighted differs from fedpax auto"):
        measure(1, 4, baselines=["vmap", "unweighted"], repetitions=1)


@pytest.mark.slow
def test_compiling_without_repetitions_draws_no_data(monkeypatch):
    monkeypatch.setattr(Workload, "random_arguments", lambda *_: pytest.fail("drew data"))
    compiled_only = {"chunk_size": [1], "baselines": ["vmap"], "repetitions": 0}
    small, large = (
        {row.implementation: row for row in measure(2, n, **compiled_only)} for n in (8, 2**20)
    )
    assert large["fedpax 1"].seconds == [] and large["fedpax 1"].fedpax_ratio is None
    assert large["fedpax 1"].temporary_bytes <= 1.05 * small["fedpax 1"].temporary_bytes
    assert large["vmap"].temporary_bytes > 1000 * small["vmap"].temporary_bytes


@pytest.mark.slow
def test_drjax_is_left_out_if_it_is_not_installed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(timing, "is_installed", lambda _: False)
    path = tmp_path / "rows.json"
    arguments = ["--model=tiny", "--clients=2,4", "--devices=1", "--chunk_size=2"]
    assert fedavg_round.main([*arguments, "--repetitions=1", f"--json={path}"]) == 0
    first, _, _, *lines = capsys.readouterr().out.splitlines()
    assert "drjax is not installed" in first and "fedpax[bench]" in first
    content = json.loads(path.read_text())
    assert content["settings"]["clients"] == [2, 4]
    assert content["versions"]["jax"] == jax.__version__ and content["machine"]["cores"] >= 1
    rows = [(row["clients"], row["implementation"]) for row in content["rows"]]
    assert rows == [(n, name) for n in (2, 4) for name in ("fedpax 2", "scan", "vmap")]
    assert len(lines) == len(rows)


@pytest.mark.slow
def test_the_gradient_of_a_round_equals_plain_jax():
    mesh = fedpax.make_mesh(devices=jax.devices()[:1], clients=1)
    arguments, rates = TINY.random_arguments(4, mesh), {"server": 0.7, "client": 0.2}
    averages = {
        "streamed": lambda train, rate: fedpax_round(train, 4, 1, rate),
        "plain": fedavg_round.plain_average(4),
    }
    ours, expected = (
        jax.jit(fedavg_round.gradient_round(TINY, average, rates))(*arguments)
        for average in averages.values()
    )
    chex.assert_trees_all_close(ours, expected, rtol=1e-4, atol=1e-6)
    assert min(abs(value) for value in expected[1].values()) > 1e-3


@pytest.mark.slow
def test_the_memory_of_the_gradient_does_not_grow_with_clients(capsys, tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["--model=tiny", "--devices=2", "--baselines=gradient", f"--json={path}"]
    arguments += ["--clients=8,4096", "--chunk_size=auto", "--repetitions=2"]
    assert fedavg_round.main(arguments) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4
    small_round, small, large_round, large = json.loads(path.read_text())["rows"]
    assert (small["clients"], large["clients"], small["devices"]) == (8, 4096, 2)
    assert small["implementation"] == large["implementation"] == "gradient"
    assert large["temporary_bytes"] <= 1.05 * small["temporary_bytes"]
    for row, plain in ((small, small_round), (large, large_round)):
        assert row["fedpax_ratio"] == timing.paired_ratio(plain["seconds"], row["seconds"])


@pytest.mark.slow
def test_a_wrong_gradient_raises(monkeypatch):
    def wrong(local_train, clients, chunk_size, rate=1.0):
        """Change the server's learning rate such that the gradient changes, but not the round."""
        return fedpax_round(local_train, clients, chunk_size, 2 * rate - 1)

    monkeypatch.setattr(fedavg_round, "fedpax_round", wrong)
    with pytest.raises(AssertionError, match="gradient differs from plain JAX"):
        measure(1, 4, baselines=["gradient"], repetitions=1)


def test_calls_are_timed_in_turn_after_a_warmup():
    calls = []
    functions = {name: lambda x, name=name: calls.append((name, x)) for name in "abc"}
    seconds = timing.interleaved(functions, (7,), repetitions=20)
    repetitions = [calls[i : i + 3] for i in range(0, 63, 3)]
    assert all(sorted(r) == [("a", 7), ("b", 7), ("c", 7)] for r in repetitions)
    # The order changes, so no function always follows the same one.
    assert {r[0][0] for r in repetitions} == {"a", "b", "c"}
    assert {name: len(times) for name, times in seconds.items()} == {"a": 20, "b": 20, "c": 20}


def test_the_picture_has_the_times_and_the_memory_of_each_round():
    def row(name, clients, seconds):
        kinds = {"model": "tiny", "devices": 1, "implementation": name}
        return Row(**kinds, clients=clients, seconds=seconds, temporary_bytes=100 * clients)

    rows = [row(name, n, []) for name in ("scan", "drjax") for n in (4, 8)]
    rows += [row("fedpax auto", 4, [3.0, 1.0, 2.0]), row("fedpax auto", 8, [4.0])]
    seconds, temporaries = FedAvgRound().draw(rows).axes
    assert [line.get_xydata().tolist() for line in seconds.lines] == [[[4, 2], [8, 4]]]
    lines = {line.get_label(): line.get_xydata().tolist() for line in temporaries.lines}
    assert set(lines) == {"DrJAX", "hand-written loop", "fedpax"}
    assert all(points == [[4, 400], [8, 800]] for points in lines.values())
    with pytest.raises(ValueError, match="rows of 2 pairs"):
        FedAvgRound().draw([*rows, Row(**{**vars(rows[0]), "devices": 2})])


def test_fields_of_fields_are_changed():
    base = CNNConfig()
    experiment = dataclasses.make_dataclass("Experiment", [("model", CNNConfig), ("size", int)])
    result = changed(experiment(base, 1), model={"hidden_dim": 7}, size=2)
    assert result == experiment(dataclasses.replace(base, hidden_dim=7), 2)
    with pytest.raises(TypeError, match="unexpected keyword"):
        changed(experiment(base, 1), model={"hiden_dim": 7})


def test_a_method_gets_the_settings_that_it_takes():
    settings = {"cohort_size": 2, "client_optimizer": optax.sgd(0.1), "num_clients": 5}
    for function in ("fedavg", "scaffold"):
        state = method(function, TINY.loss_fn, **settings).init({"w": jnp.zeros(3)})
        assert ("controls" in str(state._fields)) == (function == "scaffold")


def test_a_new_process_has_its_own_number_of_devices():
    assert on_devices(3, jax.device_count) == 3
