"""A streamed program computes what plain JAX computes, and holds no more than it must."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import (
    PROGRAMS,
    WEIGHTS,
    Federated,
    N,
    Plain,
    W,
    X,
    close,
    expected,
    federated,
    local,
    normal,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_sum,
)
from fedpax.parallel.collectives import collectives
from fedpax.primitives._jax import inner_jaxprs
from fedpax.transforms.streaming import stream


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_every_mesh(name, current_mesh):
    close(federated(name)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("at_once", [None, "auto", 5, N])
@pytest.mark.parametrize("name", ["metrics_beside_deltas", "two_stages", "wanted_of_each"])
def test_chunks(name, at_once):
    close(federated(name, at_once)(W, X, WEIGHTS), expected(name))


SMOOTH = ["average", "weights_from_the_map", "two_stages", "wanted_of_each", "rounds_in_a_scan"]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name, current_mesh):
    def total(fn):
        return lambda *args: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(fn(*args)))

    gradient = lambda fn: jax.jit(jax.grad(total(fn), argnums=(0, 1, 2)))(W, X, WEIGHTS)
    close(gradient(federated(name)), gradient(functools.partial(PROGRAMS[name], Plain)), 1e-4)


def test_clients_inside_islands(current_mesh):
    x = normal(4, N, 3, seed=4)

    @fedpax.program(islands=4, clients=N, clients_per_step=1)
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
    close(program(w, x), (moved.mean(0), moved.max(0)))
    gradient = jax.grad(lambda w: jnp.sum(program(w, x)[0] ** 2))(w)
    close(gradient, 2 * moved.mean(0) * (1 + np.sin(x).mean((0, 1))))
    text = fedpax.explain(program, w, x)
    assert text.count("nothing is stored") == 2


def test_a_server_array_as_long_as_there_are_participants(current_mesh):
    x, v = normal(N, N, seed=6), normal(N, seed=7)

    def program(f, v, x):
        turned = f.map(jnp.sin, x)
        rows, columns = turned * v[:, None], turned * jnp.broadcast_to(v, (N, N))
        return f.mean(rows), f.sum(columns), f.max(turned + v), jnp.broadcast_to(v, (N, N)).T

    found = fedpax.program(clients=N, clients_per_step=1)(functools.partial(program, Federated))
    close(found(v, x), program(Plain, v, x))


# ---- structure


def shapes_inside(jaxpr):
    """The shapes of all values that equations make, at any depth."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in inner_jaxprs(eqn):
            yield from shapes_inside(inner)


def streamed(fn, *args):
    """The streamed jaxprs of the programs that a function calls."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [stream(e.params["jaxpr"]) for e in jaxpr.eqns if "placements" in e.params]


FLAT = [
    "average",
    "metrics_beside_deltas",
    "elementwise_between",
    "elementwise_before",
    "server_arrays_between",
    "reductions_of_numpy",
    "weights_from_the_map",
    "several_maps_on_shared_inputs",
    "rounds_in_a_scan",
    "under_a_condition",
    "behind_calls",
    "gradient_inside",
]


@pytest.mark.parametrize("name", FLAT)
def test_nothing_is_held_of_all_participants(name):
    (closed,) = streamed(federated(name), W, X, WEIGHTS)
    held = [s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)]
    assert not held, held


def test_the_same_sees_what_is_held_where_the_pass_does_not_run():
    jaxpr = jax.make_jaxpr(federated("average"))(W, X, WEIGHTS).jaxpr
    (closed,) = [e.params["jaxpr"] for e in jaxpr.eqns if "placements" in e.params]
    assert (N, 3, 2) in shapes_inside(closed.jaxpr)


def test_only_what_is_wanted_of_each_is_stored():
    (closed,) = streamed(federated("wanted_of_each"), W, X, WEIGHTS)
    held = {s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)}
    assert held == {(N,), (N, 3, 2)}  # norms, and the broadcast that is returned
    deltas = [s for s in shapes_inside(closed.jaxpr) if s == (N, 3, 2)]
    assert len(deltas) == 1


def test_a_later_stage_stores_what_it_reads_again():
    text = fedpax.explain(federated("two_stages"), W, X, WEIGHTS)
    assert re.search(r"stage 0: .* stored of each participant:\n +float32\[12,3,2\]: a later", text)
    assert re.search(r"stage 1: .* nothing is stored", text)


def temporary_bytes(fn, participants):
    x, n = normal(participants, 5, 32), np.ones(participants, np.float32)
    return jax.jit(fn).lower(normal(32, 16), x, n).compile().memory_analysis().temp_size_in_bytes


def gradient_through_a_round(participants):
    @fedpax.program(clients=participants, clients_per_step=1)
    def program(w, x, n):
        deltas = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return w + federated_mean(deltas, n)

    return jax.grad(lambda w, x, n: jnp.sum(program(w, x, n) ** 2), argnums=0)


def nonlinear(w, x, n):
    deltas = federated_map(local, federated_broadcast(w), x)
    length = jnp.sqrt(jnp.sum(deltas**2, (1, 2), keepdims=True))
    clipped = deltas * jnp.minimum(1, 0.1 / length) + jnp.sin(w)
    return federated_mean(federated_map(lambda d: d * jnp.tanh(d), clipped), n)


def gradient_through(body, participants):
    program = fedpax.program(clients=participants, clients_per_step=1)(body)
    return jax.grad(lambda w, x, n: jnp.sum(program(w, x, n) ** 2), argnums=0)


def test_a_rematerialized_round_has_the_same_gradient(current_mesh):
    bodies = jax.checkpoint(nonlinear), nonlinear
    close(*(gradient_through(body, N)(W, X, WEIGHTS) for body in bodies))


@pytest.mark.parametrize(
    "make",
    [
        lambda size: federated("average", 1, size),
        lambda size: federated("metrics_beside_deltas", 4, size),
        lambda size: federated("gradient_inside", 1, size),
        lambda size: federated("server_arrays_between", 1, size),
        gradient_through_a_round,
        functools.partial(gradient_through, jax.checkpoint(nonlinear)),
    ],
    ids=["average", "metrics", "gradient inside", "server arrays", "linear", "nonlinear"],
)
def test_memory_is_flat_in_the_number_of_participants(make):
    few, many = (temporary_bytes(make(size), size) for size in (64, 2048))
    assert few > 0
    assert many <= 1.05 * few


@pytest.mark.parametrize(
    "name", ["average", "metrics_beside_deltas", "gradient_inside", "server_arrays_between"]
)
def test_no_all_reduce_stands_in_the_loop(name):
    mesh = fedpax.make_mesh(clients=4, fsdp=2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(federated(name)).lower(W, X, WEIGHTS).compile()
    found = [c for c in collectives(compiled.as_text(), mesh) if "clients" in c.axes]
    assert found and not any(c.in_loop for c in found)


# ---- words


def test_explain_says_who_needs_what_is_stored():
    text = fedpax.explain(federated("wanted_of_each"), W, X, WEIGHTS)
    assert "float32[12]: the program returns it" in text
    assert "float32[12]: the server reads it in 'argmax'" in text


def test_explain_looks_into_the_gradient():
    gradient = jax.grad(lambda w: jnp.sum(federated("average")(w, X, WEIGHTS)))
    assert fedpax.explain(gradient, W).count("program ") >= 2


def test_explain_looks_into_loops_and_conditionals():
    def stepped(reduce):
        def step(w, _):
            return w - reduce(federated_map(local, federated_broadcast(w), X)), jnp.sum(w)

        return lambda w: jax.lax.scan(step, w, length=3)[0]

    def either(w):
        again = lambda w: jax.lax.while_loop(lambda w: w[0, 0] < 3, stepped(federated_mean), w)
        return jax.lax.cond(jnp.sum(w) > 0, again, stepped(lambda d: jnp.median(d, 0)), w)

    def words(fn):
        return fedpax.explain(fedpax.program(clients=N, clients_per_step=1)(fn), W).splitlines()[1:]

    loop = "clients=12, stage 0: 1 map, 1 reduction, 1 at once on a device; nothing is stored."
    assert words(stepped(federated_mean)) == ["  in a loop of 3 steps:", "    " + loop]
    text = "\n".join(words(either))
    assert text.startswith("  in branch 0 of a conditional:\n    in a loop of 3 steps:")
    assert "0 reductions, 1 at once on a device; stored of each participant:" in text
    assert "float32[12,3,2]: the server reads it in 'sort'" in text
    assert re.search(r"branch 1 .*:\n +in a while loop:\n +in a loop of 3 steps:\n +clients", text)
    assert words(lambda w: w) == ["  No map runs in it: there is nothing to stream."]


def test_explain_of_a_function_without_programs():
    assert fedpax.explain(jnp.sin, 1.0) == "There is no fedpax program in this function."


def test_a_map_that_only_prints_still_runs(capfd):
    @fedpax.program(clients=3, clients_per_step=1)
    def program(x):
        federated_map(lambda x: jax.debug.print("client {}", x), x)
        return federated_sum(x)

    assert program(jnp.arange(3)) == 3
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split()) == ["0", "1", "2", "client", "client", "client"]
