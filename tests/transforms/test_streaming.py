"""A streamed program computes what plain JAX computes, and holds no more than it must."""

import functools
import re

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from program_table import (
    PROGRAMS,
    WEIGHTS,
    Federated,
    N,
    Plain,
    Rematerialized,
    W,
    X,
    close,
    expected,
    federated,
    gradient_of,
    local,
    normal,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_max,
    federated_mean,
    federated_min,
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


SMOOTH = [
    "average",
    "weights_from_the_map",
    "two_stages",
    "wanted_of_each",
    "rounds_in_a_scan",
    "extremes",
    "clipped_twice",
    "variance",
]


@pytest.mark.parametrize("functions", [Federated, Rematerialized])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients(name, functions, current_mesh):
    found = gradient_of(federated(name, functions=functions))
    plain = gradient_of(functools.partial(PROGRAMS[name], Plain))
    close(*(jax.jit(fn)(W, X, WEIGHTS) for fn in (found, plain)), 1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_rematerialized_programs(name):
    close(federated(name, functions=Rematerialized)(W, X, WEIGHTS), expected(name))


@pytest.mark.parametrize("name", ["two_stages", "extremes", "clipped_twice"])
def test_second_derivatives_of_rematerialized_programs(name):
    def along(fn):
        inside = lambda w: gradient_of(fn, 0)(w, X, WEIGHTS)
        return jax.jvp(inside, (W,), (np.cos(W),))[1]

    found = along(federated(name, functions=Rematerialized))
    close(found, along(functools.partial(PROGRAMS[name], Plain)), 1e-3)


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


def is_flat(make):
    few, many = (temporary_bytes(make(size), size) for size in (64, 2048))
    return 0 < few and many <= 1.05 * few


@pytest.mark.parametrize(
    "make",
    [
        lambda size: federated("average", 1, size),
        lambda size: federated("metrics_beside_deltas", 4, size),
        lambda size: federated("gradient_inside", 1, size),
        lambda size: federated("server_arrays_between", 1, size),
    ],
    ids=["average", "metrics", "gradient inside", "server arrays"],
)
def test_memory_is_flat_in_the_number_of_participants(make):
    assert is_flat(make)


@pytest.mark.parametrize("name", ["two_stages", "variance", "server_arrays_between"])
def test_memory_is_flat_where_participants_are_rematerialized(name):
    assert is_flat(lambda size: federated(name, 1, size, Rematerialized))


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(
    "name",
    [
        "average",
        "weights_from_the_map",
        "two_stages",
        "clipped_twice",
        "variance",
        "rematerialized_rounds",
    ],
)
def test_memory_of_a_gradient_is_flat_where_participants_are_rematerialized(name, where):
    def make(size):
        if where == "outside":
            return gradient_of(federated(name, 1, size, Rematerialized), 0)
        inside = gradient_of(functools.partial(PROGRAMS[name], Rematerialized), 0)
        return fedpax.program(clients=size, clients_per_step=1)(inside)

    assert is_flat(make)


def test_a_program_under_checkpoint_stores_nothing_for_its_gradient():
    def make(size):
        body = jax.checkpoint(functools.partial(PROGRAMS["clipped_twice"], Federated))
        return gradient_of(fedpax.program(clients=size, clients_per_step=1)(body), 0)

    close(make(N)(W, X, WEIGHTS), gradient_of(federated("clipped_twice"), 0)(W, X, WEIGHTS))
    assert is_flat(make)


def test_what_is_computed_again():
    """Only what `jax.checkpoint` allows, and only where it is not stored anyway."""

    def words(name, functions):
        return fedpax.explain(federated(name, functions=functions), W, X, WEIGHTS)

    assert "again" not in words("variance", Federated)
    assert re.search(
        r"stage 0: 1 map, 1 red.*nothing.*\n.*stage 1: 1 map again, 1 red.*nothing",
        words("variance", Rematerialized),
    )
    assert "again" not in words("wanted_of_each", Rematerialized)
    # Norms whose maximum is sought are kept as they were; the deltas are computed again.
    text = words("weights_of_a_later_stage", Rematerialized)
    assert re.findall(r"(float32\S+): ", text) == ["float32[12]"] and "1 map again" in text

    @fedpax.program(clients=N, clients_per_step=1)
    def returned(w, x):
        delta = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return delta, federated_mean((delta - federated_mean(delta)) ** 2)

    assert "again" not in fedpax.explain(returned, W, X)


@pytest.mark.parametrize(
    ("fn", "repeated"),
    [
        (jax.jit(jax.checkpoint(local)), True),
        (jax.checkpoint(local, policy=jax.checkpoint_policies.everything_saveable), False),
        (lambda w, x: 2 * jax.checkpoint(local)(w, x), False),
    ],
    ids=["jitted", "with a policy", "in part"],
)
def test_a_map_is_repeated_if_all_of_it_is_under_checkpoint(fn, repeated):
    @fedpax.program(clients=N, clients_per_step=1)
    def program(w, x):
        delta = federated_map(fn, federated_broadcast(w), x)
        return federated_mean((delta - federated_mean(delta)) ** 2)

    assert ("again" in fedpax.explain(program, W, X)) == repeated


def handed_on(w, x, rounds):
    @fedpax.program(clients=N, clients_per_step=1)
    def program(w, x):
        for _ in range(rounds):
            x = federated_map(
                jax.checkpoint(lambda w, x: jnp.tanh(w + x)), federated_broadcast(w), x
            )
            w = w + federated_mean(x)
        return w

    return program(w, x)


def test_a_state_that_is_handed_on_is_stored():
    """Each stage would run all stages before it again: their maps would be 36, and are 11."""
    text = fedpax.explain(functools.partial(handed_on, rounds=8), X[0], X)
    assert re.findall(r"(\d) maps?", text) == list("1111211111"), text
    assert text.count("stored of each") == 5
    plain = X[0], X
    for _ in range(8):
        moved = jnp.tanh(plain[0] + plain[1])
        plain = plain[0] + moved.mean(0), moved
    close(handed_on(X[0], X, 8), plain[0])


def test_gradients_of_extremes_are_not_lost_by_rounding():
    """A loop that runs clients again may round otherwise than the loop that found the maximum."""
    fns = [
        lambda w, y, x: jnp.sin(y) + x * jnp.tanh(w),
        lambda w, y, x: jnp.tanh(y * w + x),
        lambda w, y, x: jnp.tanh(y) * jnp.sum(x * w) * 0.3,
        lambda w, y, x: y * w + x * jnp.sin(w),
    ]
    pairs = [(f, g) for f in fns for g in fns]
    ws, x = normal(len(pairs), 3, seed=8), normal(N, 3, seed=9)

    def body(functions, ws, x):
        total = 0
        for (first, second), w in zip(pairs, ws, strict=True):
            y = federated_map(lambda w, x, f=first: f(w, x, x), federated_broadcast(w), x)
            total += jnp.sum(federated_min(functions.map(second, federated_broadcast(w), y, x)))
        return total

    def gradient(functions):
        program = fedpax.program(clients=N, clients_per_step=5)(functools.partial(body, functions))
        return jax.jit(jax.vmap(jax.grad(program), (0, None)))(jnp.stack([ws, ws + 1, -ws]), x)

    close(gradient(Rematerialized), gradient(Federated), 1e-3)


def test_what_the_user_keeps_and_what_has_effects_is_left_alone():
    """A map under `jax.checkpoint` beside them changes neither."""

    def beside(f, w, x, n):
        own = jax.checkpoint(lambda w: jnp.sum(jnp.sin(f.mean(f.map(local, f.broadcast(w), x)))))
        return own(w) + Rematerialized.mean(Rematerialized.map(jnp.sum, x))

    def make(size):
        body = functools.partial(beside, Federated)
        return jax.grad(fedpax.program(clients=size, clients_per_step=1)(body))

    assert "the program returns it" not in fedpax.explain(make(N), W, X, WEIGHTS)
    called = []

    @fedpax.program(clients=N, clients_per_step=1)
    def watched(w, x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        seen = jax.experimental.io_callback(lambda: called.append(0) or np.float32(0), shape)
        moved = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return jnp.sum(jnp.sin(federated_mean(moved))) + seen

    jax.block_until_ready(jax.grad(watched)(W, X))
    assert len(called) == 1


def test_a_nested_program_keeps_its_total():
    """Its clients run twice, once forward and once backward, and not to find the total again."""

    @fedpax.program(outer=3)
    def around(w, x):
        @fedpax.program(clients=N, clients_per_step=1)
        def inner(w):
            return federated_mean(federated_map(jax.checkpoint(local), federated_broadcast(w), x))

        return jnp.sum(jnp.sin(inner(w)))

    jaxpr = jax.make_jaxpr(jax.grad(around))(W, X).jaxpr
    programs = [p for p in fedpax.explain(jax.grad(around), W, X).splitlines() if "inner" in p]
    assert len(programs) == 2, jaxpr


def test_a_long_chain_is_no_deep_recursion():
    @fedpax.program(clients=N, clients_per_step=1)
    def program(x):
        value = federated_map(jnp.sum, x)
        for _ in range(2000):
            value = value + 1
        return federated_sum(value)

    close(program(X), X.sum() + 2000 * N, 1e-4)


def test_a_repeated_map_keeps_its_clients_per_step():
    @fedpax.program(clients=N)
    def program(w, x):
        fn = jax.checkpoint(local)
        delta = federated_map(fn, federated_broadcast(w), x, clients_per_step=3)
        mean = federated_mean(delta)
        twice = federated_map(lambda d: 2 * d, delta - mean)
        return federated_mean(twice), federated_mean((delta - mean) ** 2)

    assert "stage 1: 1 map, 1 map again, 2 reductions, 3 at once" in fedpax.explain(program, W, X)


def test_many_uses_of_a_value_are_planned_once():
    """The plan follows each value once, not once for every way to it: there are 2 ** 64 here."""

    @fedpax.program(clients=N, clients_per_step=1)
    def program(x):
        value = federated_map(jnp.sum, x)
        for _ in range(64):
            value = (value + value) / 2
        return federated_sum(value)

    close(program(X), X.sum(), 1e-4)


@pytest.mark.parametrize(
    "name", ["average", "metrics_beside_deltas", "gradient_inside", "server_arrays_between"]
)
def test_no_all_reduce_stands_in_the_loop(name):
    mesh = fedpax.make_mesh(clients=4, fsdp=2)
    with jax.set_mesh(mesh):
        compiled = jax.jit(federated(name)).lower(W, X, WEIGHTS).compile()
    found = [c for c in collectives(compiled.as_text(), mesh) if "clients" in c.axes]
    assert found and not any(c.in_loop for c in found)


def stateful(participants, at_once):
    """Two states of one type, and data of the same type, which must not be taken for a state."""

    def client(state, x, w):
        first = jnp.tanh(state["first"] * w + x)
        return {"first": first, "second": state["second"] + first * x}, jnp.sum(first)

    @fedpax.program(clients=participants, clients_per_step=at_once)
    def program(states, x, w):
        states, sums = federated_map(client, states, x, federated_broadcast(w))
        return states, federated_mean(sums)

    def plain(states, x, w):
        states, sums = jax.vmap(client, (0, 0, None))(states, x, w)
        return states, jnp.mean(sums)

    return program, plain


@pytest.mark.parametrize("at_once", [1, 5, N])
def test_donated_states_are_updated_in_place(at_once, current_mesh):
    program, plain = stateful(N, at_once)
    states = {"first": normal(N, 8), "second": normal(N, 8, seed=1)}
    x, w = normal(N, 8, seed=2), normal(8)
    close(jax.jit(program)(states, x, w), plain(states, x, w))
    layout = jax.sharding.NamedSharding(current_mesh, jax.P("clients")) if current_mesh else None
    donated = jax.device_put(states, layout)
    expected = plain(states, x, w)
    close(jax.jit(program, donate_argnums=0)(donated, x, w), expected)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))


@pytest.mark.parametrize("at_once", [1, 7])
def test_donated_states_have_no_second_buffer(at_once):
    def temporaries(size):
        states = {"first": normal(size, 256), "second": normal(size, 256)}
        step = jax.jit(stateful(size, at_once)[0], donate_argnums=0)
        compiled = step.lower(states, normal(size, 256), normal(256)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) == temporaries(64)


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
