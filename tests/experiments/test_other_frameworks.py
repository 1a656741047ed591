"""Tests of the benchmark that runs libraries of other environments.

A script that needs only NumPy replaces the libraries, but in the last test.
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedpax.experiments.benchmarks import other_frameworks, timing, torch_rounds
from fedpax.experiments.benchmarks.workloads import WORKLOADS, Workload
from fedpax.models.classifiers import CNNConfig, MLPConfig, cnn, mlp

MODELS = {
    "mlp": (mlp(MLPConfig(layer_sizes=(6, 5, 3))), (6,)),
    "cnn": (cnn(CNNConfig(image_height=8, image_width=8, filters=(2, 3), hidden_dim=4)), (8, 8, 1)),
}
NUMPY_ROUND = """
import sys
import numpy as np

_, arguments, result, *_ = sys.argv[1:]
server = dict(np.load(arguments))
images, labels, rate, _ = (server.pop(name) for name in ("image", "label", "rate", "mu"))


def train(images, labels):
    names = [f"dense_{i}/{kind}" for i in (0, 1) for kind in ("kernel", "bias")]
    params = [server[name] for name in names]
    for x, y in zip(images, labels):
        kernel_0, bias_0, kernel_1, bias_1 = params
        before = x @ kernel_0 + bias_0
        hidden = np.maximum(before, 0)
        scores = np.exp(hidden @ kernel_1 + bias_1)
        outer = (scores / scores.sum(1, keepdims=True) - np.eye(scores.shape[1])[y]) / len(y)
        inner = outer @ kernel_1.T * (before > 0)
        gradient = x.T @ inner, inner.sum(0), hidden.T @ outer, outer.sum(0)
        params = [p - rate * g for p, g in zip(params, gradient)]
    return dict(zip(names, params))


for turn, _ in enumerate(sys.stdin):
    trained = [train(*client) for client in zip(images, labels)]
    print("output of the library itself")
    if turn == 0:
        mean = {name: np.mean([t[name] for t in trained], axis=0) for name in server}
        np.savez(result, versions="numpy 1", **mean)
    print("done", flush=True)
"""


@pytest.fixture
def fake_library(monkeypatch, tmp_path):
    """Return a function that replaces the script of the libraries by another one."""
    monkeypatch.setitem(WORKLOADS, "tiny", lambda: Workload(MODELS["mlp"][0], (6,), 3))
    monkeypatch.setattr(timing, "on_devices", lambda _, fn, *args: fn(*args))

    def write(text):
        (tmp_path / "script.py").write_text(text)
        monkeypatch.setattr(other_frameworks, "SCRIPT", tmp_path / "script.py")
        return {"flower_python": sys.executable}

    return write


def measure(devices, method="fedavg", **pythons):
    """Measure a round of 4 clients."""
    settings = {"model": "tiny", "method": method, "repetitions": 1, **pythons}
    return other_frameworks.OtherFrameworks(**settings).measure_on(devices, 4)


@pytest.mark.slow
def test_libraries_run_the_same_round_in_turn(fake_library, capsys):
    fake_library(NUMPY_ROUND)
    sizes = ["--model=tiny", "--clients=4", "--devices=2", "--repetitions=3"]
    assert other_frameworks.main([*sizes, f"--flower_python={sys.executable}"]) == 0
    *table, content = capsys.readouterr().out.splitlines()
    assert len(table) == 2 + 2
    ours, theirs = json.loads(content)["rows"]
    assert (ours["library"], theirs["library"]) == ("fedpax", "flower")
    assert theirs["versions"] == "numpy 1" and (theirs["clients"], theirs["devices"]) == (4, 2)
    assert len(theirs["seconds"]) == 3 and min(theirs["seconds"]) > 0
    assert theirs["fedpax_ratio"] == timing.paired_ratio(ours["seconds"], theirs["seconds"])


def test_a_library_with_another_result_raises(fake_library):
    pythons = fake_library(
        NUMPY_ROUND.replace("zip(images, labels)]", "zip(images[1:], labels[1:])]")
    )
    with pytest.raises(AssertionError, match="flower differs from fedpax"):
        measure(1, **pythons)


def test_results_are_compared_in_full_precision(fake_library, monkeypatch):
    """And rounds are timed in JAX's default precision, in which a GPU rounds operands."""
    precisions, make_call = [], other_frameworks.make_call

    def record(*problem):
        precisions.append(jax.config.jax_default_matmul_precision)
        return make_call(*problem)

    monkeypatch.setattr(other_frameworks, "make_call", record)
    measure(1, **fake_library(NUMPY_ROUND))
    assert precisions == [None, "float32"]


def test_a_library_that_cannot_start_raises(fake_library):
    pythons = fake_library("raise SystemExit('no such library')")
    with pytest.raises(ChildProcessError, match=r"script\.py.* exited"):
        measure(1, **pythons)


@pytest.mark.slow
def test_pytorchs_layout_gives_the_same_matmuls_and_convolutions():
    init = jax.jit(MODELS["cnn"][0].init)
    params = other_frameworks.by_name(init(jax.random.key(0)))
    as_torch = {name: torch_rounds.as_torch(name, value, params) for name, value in params.items()}
    images = jax.random.normal(jax.random.key(1), (7, 2, 2, 3))  # after pooling, channels last
    channels_first = images.transpose(0, 3, 1, 2)
    ours = images.reshape(7, -1) @ params["dense_0/kernel"]
    theirs = channels_first.reshape(7, -1) @ as_torch["dense_0/kernel"].T
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)

    images = jax.random.normal(jax.random.key(2), (7, 8, 8, 1))
    kernel, layouts = params["convolution_0/kernel"], ("NHWC", "HWIO", "NCHW")
    ours = jax.lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=layouts)
    channels_first = jnp.moveaxis(images, -1, 1)
    theirs = jax.lax.conv(channels_first, as_torch["convolution_0/kernel"], (1, 1), "VALID")
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedprox", "scaffold"])
def test_other_methods_start_as_fedavg_does(fake_library, method, monkeypatch):
    """With mu 0, and with SCAFFOLD's first controls, a round is FedAvg's."""
    monkeypatch.setattr(other_frameworks, "MU", 0.0)
    monkeypatch.setitem(other_frameworks.METHODS, method, ("flower",))  # the script is no Flower
    pythons = fake_library(NUMPY_ROUND)
    rows = measure(1, method, **pythons)
    assert [row.library for row in rows] == ["fedpax", "flower"]


def test_pfl_runs_scaffold_with_one_worker():
    paths = pathlib.Path("arguments.npz"), pathlib.Path("result.npz")
    command = other_frameworks.command_of("pfl", "python", 2, *paths, "scaffold")
    assert "--nproc_per_node=1" in command
    command = other_frameworks.command_of("pfl", "python", 2, *paths, "fedprox")
    assert "--nproc_per_node=2" in command


def test_methods_that_a_library_lacks_are_refused(capsys):
    with pytest.raises(SystemExit):
        other_frameworks.main(["--method=scaffold", "--flower_python=python"])
    assert "leave --flower_python out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("library", ["pfl", "flower"])
def test_the_library_itself_computes_the_same_round(fake_library, library):
    """Here the libraries run, if this environment has them."""
    for package in {"pfl": ["pfl", "torch"], "flower": ["flwr", "ray", "torch"]}[library]:
        pytest.importorskip(package)
    for method in ("fedavg", "fedprox"):
        rows = measure(2, method, **{f"{library}_python": sys.executable})
        assert [row.library for row in rows] == ["fedpax", library]
