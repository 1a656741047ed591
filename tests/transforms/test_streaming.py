"""A streamed program computes what plain JAX computes."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import (
    MESHES,
    PROGRAMS,
    WEIGHTS,
    Federated,
    N,
    Plain,
    Rematerialized,
    W,
    X,
    cases,
    close,
    expected,
    federated,
    gradient_of,
    normal,
    slow,
    together,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_sum,
)
from fedpax.hlo.collectives import collectives


def test_a_program_is_streamed_whatever_has_been_imported():
    """Public names are imported on first use."""
    code = """
import jax
import jax.numpy as jnp
from fedpax import federated_map, federated_mean, program
body = lambda x: federated_mean(federated_map(jnp.sin, x))
run = jax.jit(program(clients=64, chunk_size=1)(body)).lower(jnp.ones((64, 1000))).compile()
print(run.memory_analysis().temp_size_in_bytes)
"""
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert int(completed.stdout) < 64 * 1000 * 4


# Programs with server arrays or control flow between maps, for the partitioner to lay out.
ON_AUTOMATIC = ["two_phases", "rounds_in_a_scan"]
# The others are rematerialized programs in the fast tests.
ON_EXPLICIT = [
    *(*ON_AUTOMATIC, "weights_from_the_map", "weights_of_a_later_phase", "values_per_participant"),
    *("server_arrays_between", "reductions_of_numpy", "under_a_condition", "gradient_inside"),
    *("small_and_boolean_types", "extremes", "clipped_twice", "variance"),
]


@pytest.mark.parametrize(
    ("name", "current_mesh"),
    cases(
        PROGRAMS,
        MESHES,
        fast={*itertools.product(ON_EXPLICIT, ["explicit"])}
        | {*itertools.product(ON_AUTOMATIC, ["automatic"])},
    ),
    indirect=["current_mesh"],
)
def test_programs_on_every_mesh(name, current_mesh):
    close(federated(name)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("chunk_size", [None, "auto", 5, N])
@pytest.mark.parametrize(
    "name", [slow("metrics_beside_deltas"), "two_phases", slow("values_per_participant")]
)
def test_chunks(name, chunk_size):
    close(federated(name, chunk_size)(W, X, WEIGHTS), expected(name))


SMOOTH = [
    "average",
    "weights_from_the_map",
    "two_phases",
    "values_per_participant",
    "rounds_in_a_scan",
    "extremes",
    "clipped_twice",
    "variance",
]
# A gradient compiles for more than a second. The test of second derivatives has a fast one of a
# rematerialized program.
FAST_GRADIENTS = {
    ("weights_from_the_map", Federated, "automatic"),
    ("values_per_participant", Federated, "explicit"),
}


@pytest.mark.parametrize(
    ("name", "functions", "current_mesh"),
    cases(SMOOTH, [Federated, Rematerialized], MESHES, fast=FAST_GRADIENTS),
    indirect=["current_mesh"],
)
def test_gradients(name, functions, current_mesh):
    gradient = gradient_of(federated(name, functions=functions))
    plain = gradient_of(functools.partial(PROGRAMS[name], Plain))
    close(*together(gradient, plain)(W, X, WEIGHTS), 1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rematerialized_programs(name):
    close(federated(name, functions=Rematerialized)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("name", [slow("two_phases"), slow("extremes"), "clipped_twice"])
def test_second_derivatives_of_rematerialized_programs(name):
    def along(fn):
        inside = lambda w: gradient_of(fn, 0)(w, X, WEIGHTS)
        return lambda w: jax.jvp(inside, (w,), (jnp.cos(w),))[1]

    rematerialized = along(federated(name, functions=Rematerialized))
    plain = along(functools.partial(PROGRAMS[name], Plain))
    close(*together(rematerialized, plain)(W), 1e-3)


def test_clients_inside_islands(current_mesh):
    x = normal(4, N, 3, seed=4)

    @fedpax.program(islands=4, clients=N, chunk_size=1)
    def program(w, x):
        def island(w, x):
            moved = federated_map(
                lambda w, x: w * jnp.sin(x),
                federated_broadcast(w, placement="clients"),
                x,
                placement="clients",
            )
            return w + federated_mean(moved, placement="clients")

        moved = federated_map(
            island, federated_broadcast(w, placement="islands"), x, placement="islands"
        )
        return federated_mean(moved, placement="islands"), federated_max(moved, placement="islands")

    w = normal(3)
    moved = w + (w * np.sin(x)).mean(1)
    gradient = jax.grad(lambda w, x: jnp.sum(program(w, x)[0] ** 2))
    result, slope = together(program, gradient)(w, x)
    close(result, (moved.mean(0), moved.max(0)))
    close(slope, 2 * moved.mean(0) * (1 + np.sin(x).mean((0, 1))))
    text = fedpax.explain(program, w, x)
    assert text.count("nothing is stored") == 2


def test_a_server_array_with_one_entry_per_participant(current_mesh):
    x, v = normal(N, N, seed=6), normal(N, seed=7)

    def program(f, v, x):
        turned = f.map(jnp.sin, x)
        rows, columns = turned * v[:, None], turned * jnp.broadcast_to(v, (N, N))
        return f.mean(rows), f.sum(columns), f.max(turned + v), jnp.broadcast_to(v, (N, N)).T

    result = fedpax.program(clients=N, chunk_size=1)(functools.partial(program, Federated))
    plain = jax.jit(functools.partial(program, Plain))
    close(result(v, x), plain(v, x))


def test_a_long_chain_of_equations_does_not_recurse():
    @fedpax.program(clients=N, chunk_size=1)
    def program(x):
        value = federated_map(jnp.sum, x)
        for _ in range(2000):
            value = value + 1
        return federated_sum(value)

    close(program(X), X.sum() + 2000 * N, 1e-4)


def test_a_value_with_many_uses_is_planned_once():
    """The plan visits each value once; there are 2 ** 64 paths here."""

    @fedpax.program(clients=N, chunk_size=1)
    def program(x):
        value = federated_map(jnp.sum, x)
        for _ in range(64):
            value = (value + value) / 2
        return federated_sum(value)

    close(program(X), X.sum(), 1e-4)


@pytest.mark.parametrize(
    "name", ["average", "metrics_beside_deltas", "gradient_inside", "server_arrays_between"]
)
def test_the_all_reduce_is_outside_the_loop(name):
    mesh = fedpax.make_mesh(clients=4, fsdp=2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(federated(name)).lower(W, X, WEIGHTS).compile()
    communication = [c for c in collectives(compiled.as_text(), mesh) if "clients" in c.axes]
    assert communication and not any(c.in_loop for c in communication)


def test_a_map_that_only_prints_still_runs(capfd):
    @fedpax.program(clients=3, chunk_size=1)
    def program(x):
        federated_map(lambda x: jax.debug.print("client {}", x), x)
        return federated_sum(x)

    assert program(jnp.arange(3)) == 3
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "client", "client", "client"]


def test_numpy_arguments_on_an_explicit_mesh():
    """The types of NumPy arrays have no mesh, so no result can alias them."""
    x = np.ones((2, 8, 3), np.float32)

    @fedpax.program(regions=2, clients=8, chunk_size=1)
    def program(w, x):
        def region(x):
            moved = federated_map(lambda x: jnp.tanh(x * w), x, placement="clients")
            return federated_mean(moved, placement="clients")

        means = federated_map(jax.checkpoint(region), x, placement="regions")
        return jnp.sum(jnp.sin(federated_sum(means, placement="regions")))

    expected = jax.grad(program, 1)(0.5, x)
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((4, 2), ("clients", "fsdp"), axis_types=kinds)):
        gradient = jax.grad(program, 1)(0.5, x)
    close(jax.device_get(gradient), jax.device_get(expected))
