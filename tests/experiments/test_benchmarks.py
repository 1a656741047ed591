"""The benchmarks compare equal things, and measure what they say."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.experiments.benchmarks import fedavg_round, gradient, timing
from fedpax.experiments.benchmarks.rounds import vmap_round
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import MLPConfig, mlp

TINY = Workload(mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,), 3)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Adds a workload that compiles quickly, and measures in this process."""
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: TINY)
    for module in (fedavg_round, gradient):
        monkeypatch.setattr(module, "on_devices", lambda _, fn, *args: fn(*args))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """Compiles without optimizing: the tests wait for the compiler, hardly for the programs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_round_has_a_row_for_each_way_to_write_it(devices):
    others = ["scan", "vmap"] + ["drjax"] * timing.is_installed("drjax")
    rows = fedavg_round.measure("tiny", devices, 4, ("auto", 2), others, repetitions=2)
    assert [row.round for row in rows] == ["fedpax auto", "fedpax 2", *others]
    for row in rows:
        assert (row.model, row.devices, row.clients) == ("tiny", devices, 4)
        assert len(row.seconds) == 2 and min(row.seconds) > 0 and row.compile_seconds > 0
        assert row.fedpax_ratio == timing.paired_ratio(rows[0].seconds, row.seconds)


def test_rounds_that_differ_are_not_timed(monkeypatch):
    def wrong(local_train, clients):
        right = vmap_round(local_train, clients)
        return lambda params, batches, weights: right(params, batches, jnp.ones_like(weights))

    monkeypatch.setitem(fedavg_round.OTHERS, "unweighted", wrong)
    with pytest.raises(AssertionError, match="unweighted against fedpax auto"):
        fedavg_round.measure("tiny", 1, 4, others=["vmap", "unweighted"], repetitions=1)


def test_without_repetitions_no_data_is_made(monkeypatch):
    monkeypatch.setattr(Workload, "draw", lambda *_: pytest.fail("made data"))
    small, large = (
        {row.round: row for row in fedavg_round.measure("tiny", 2, n, (1,), ["vmap"], 0)}
        for n in (8, 2**20)
    )
    assert large["fedpax 1"].seconds == [] and large["fedpax 1"].fedpax_ratio is None
    assert large["fedpax 1"].temporary_bytes <= 1.05 * small["fedpax 1"].temporary_bytes
    assert large["vmap"].temporary_bytes > 1000 * small["vmap"].temporary_bytes


def test_what_is_not_installed_is_left_out(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fedavg_round, "is_installed", lambda _: False)
    path = tmp_path / "figures.json"
    arguments = ["--model=tiny", "--clients=2,4", "--devices=1", "--chunk_size=2"]
    assert fedavg_round.main([*arguments, "--repetitions=1", f"--json={path}"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert "drjax is not installed" in first and "fedpax[bench]" in first
    figures = json.loads(path.read_text())
    assert figures["settings"]["clients"] == "2,4"
    assert figures["versions"]["jax"] == jax.__version__ and figures["machine"]["cores"] >= 1
    rows = [(row["clients"], row["round"]) for row in figures["rows"]]
    assert rows == [(n, name) for n in (2, 4) for name in ("fedpax 2", "scan", "vmap")]
    assert len(lines) == len(rows)


def test_the_gradient_of_a_round_is_that_of_plain_jax():
    mesh = fedpax.make_mesh(devices=jax.devices()[:1], clients=1)
    arguments = TINY.draw(4, mesh)
    rates = {"server": jnp.float32(0.7), "client": jnp.float32(0.2)}

    def plain(rates, params, batches, num_examples):
        train = lambda params, batches: TINY.local_train(params, batches, rates["client"])
        moved = vmap_round(train, 4)(params, batches, num_examples)
        return jax.tree.map(lambda p, m: p + rates["server"] * (m - p), params, moved)

    streamed = gradient.make_round(TINY, 4, chunk_size=1, unroll=2)
    ours, expected = (
        jax.jit(jax.value_and_grad(gradient.loss_after(TINY, fn)))(rates, *arguments)
        for fn in (streamed, plain)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), ours, expected
    )
    assert min(abs(value) for value in expected[1].values()) > 1e-3


@pytest.mark.slow
def test_the_gradient_is_timed_against_its_round_in_flat_memory(capsys, tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["--model=tiny", "--devices=2", "--unroll=1", f"--json={path}"]
    assert gradient.main([*arguments, "--clients=8,4096", "--repetitions=2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2
    small, large = json.loads(path.read_text())["rows"]
    assert (small["clients"], large["clients"], small["devices"]) == (8, 4096, 2)
    assert large["gradient_temporary_bytes"] <= 1.05 * small["gradient_temporary_bytes"]
    for row in (small, large):
        assert row["ratio"] == timing.paired_ratio(row["gradient_seconds"], row["round_seconds"])


def test_a_wrong_gradient_is_not_timed(monkeypatch):
    right = gradient.make_round

    def wrong(*arguments):
        """Another server's learning rate, which changes the derivative and not the round."""
        fn = right(*arguments)
        return lambda rates, *data: fn(rates | {"server": 2 * rates["server"] - 1}, *data)

    monkeypatch.setattr(gradient, "make_round", wrong)
    with pytest.raises(AssertionError, match="fedpax against plain JAX"):
        gradient.measure("tiny", 1, 4, repetitions=1)


def test_figures_are_printed_where_no_file_is_named(capsys):
    assert gradient.main(["--model=tiny", "--devices=1", "--clients=2", "--repetitions=0"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert figures["settings"]["model"] == "tiny" and figures["rows"][0]["clients"] == 2


def test_calls_are_timed_in_turn_after_one_that_is_not():
    calls = []
    functions = {name: lambda x, name=name: calls.append((name, x)) for name in "abc"}
    seconds = timing.interleaved(functions, (7,), repetitions=20)
    repetitions = [calls[i : i + 3] for i in range(0, 63, 3)]
    assert all(sorted(r) == [("a", 7), ("b", 7), ("c", 7)] for r in repetitions)
    # None always follows the same one.
    assert {r[0][0] for r in repetitions} == {"a", "b", "c"}
    assert {name: len(times) for name, times in seconds.items()} == {"a": 20, "b": 20, "c": 20}


def test_a_process_of_its_own_has_its_own_devices():
    assert timing.on_devices(3, jax.device_count) == 3
