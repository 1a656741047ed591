"""What a program has that an engine or a file cannot have is told with the line of the program."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax import federated_map, federated_mean
from fedpax.deploy import Settings, export_stages, inspect_round, pack_program, pack_stages
from fedpax.deploy.runtime import program_hash

N = 3
X = np.random.default_rng(0).normal(size=(N, 4, 4)).astype(np.float32)


def line_of(mark):
    """The line of this file that ends with a mark, as messages name it."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {mark}"))
    return rf"\({Path(__file__).name}:{number}\)"


@fedpax.program(clients=N)
def divides(w, x):
    return jnp.mean(federated_map(lambda x: w * x, x), axis=0)  # mean


@fedpax.program(clients=N)
def loops(w, x):
    def body(w, _):
        return w + federated_mean(federated_map(lambda x: w * x.sum(), x)), None

    return jax.lax.scan(body, w, None, length=2)[0]  # loop


@fedpax.program(clients=N)
def sorts(w, x):
    largest = jnp.sort(x, axis=0)[-1]  # sort
    return largest + federated_mean(federated_map(lambda x: w * x, x))


@fedpax.program(clients=N)
def takes_medians(w, x):
    scale = jnp.median(w * jnp.ones((N, 4, 4)), axis=0)  # the first call, with the same types
    median = jnp.median(x, axis=0)  # median
    return scale + median + federated_mean(federated_map(lambda x: w * x, x))


def on_the_host(x):
    size = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.sort, size, x)  # callback


@fedpax.program(clients=N)
def calls_python(w, x):
    return federated_mean(federated_map(lambda x: w * on_the_host(x), x))


@fedpax.program(clients=N)
def server_calls_python(w, x):
    return on_the_host(federated_mean(federated_map(lambda x: w * x, x)))


@fedpax.program(clients=N)
def solves(w, x):
    def local(x):
        q, _ = jnp.linalg.qr(w * x)  # qr
        return jnp.linalg.inv(q)  # inverse

    return federated_mean(federated_map(local, x))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (divides, rf"divided by 3 {line_of('mean')}, .*Use federated_mean\(\)"),
        (sorts, rf"the server reads x {line_of('sort')}, a value of the participants"),
        (takes_medians, rf"the server reads x {line_of('median')}, a value of the participants"),
        (loops, f"inside 'scan' {line_of('loop')}, expected all maps outside"),
    ],
)
def test_a_program_that_cannot_be_divided(program, message):
    with pytest.raises(ValueError, match=message):
        fedpax.stages(program, jnp.float32(2), X, own=["x"])


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (calls_python, rf"participant's part \(client_0\) has pure_callback {line_of('callback')}"),
        (
            server_calls_python,
            rf"server's part \(server_1\) has pure_callback {line_of('callback')}",
        ),
    ],
)
def test_callbacks_are_told_when_they_are_exported(program, message):
    stages = fedpax.stages(program, jnp.float32(2), X)
    with pytest.raises(ValueError, match=message):
        pack_stages(stages)


def test_callbacks_are_told_when_they_are_exported_for_flower():
    def init(params):
        return params

    def round(w, cohort):
        return calls_python(w, cohort.batches), {}

    algorithm = fedpax.FederatedAlgorithm(init, round)
    with pytest.raises(ValueError, match=f"pure_callback {line_of('callback')}, which a file"):
        pack_program(algorithm, lambda key: jnp.ones(()), fedpax.Cohort(X), Settings(num_clients=N))


def test_custom_calls_are_told_to_devices_and_leave_the_hash_alone(tmp_path):
    artifact = export_stages(fedpax.stages(solves, jnp.float32(2), X), tmp_path / "round")
    report = inspect_round(tmp_path / "round").splitlines()[-1]
    assert report.startswith("  not for devices without JAX: it has the custom call")
    for call, mark in (("lapack_sgeqrf_ffi", "qr"), ("lapack_sgetrf_ffi", "inverse")):
        assert f"{call} {line_of(mark)}".replace("\\", "") in report
    moved = dict(artifact.manifest, lines={})
    assert program_hash(moved) == artifact.program
