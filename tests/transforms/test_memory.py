"""Memory of streamed programs: which values are stored, and how large temporaries are."""

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
    cases,
    close,
    federated,
    gradient_of,
    local,
    normal,
)

import fedpax
from fedpax import (
    federated_broadcast,
    federated_map,
    federated_mean,
)
from fedpax.primitives.jaxpr_analysis import inner_jaxprs
from fedpax.transforms.streaming import stream


def shapes_inside(jaxpr):
    """Yield the shapes of the results of all equations, at any depth."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for inner in inner_jaxprs(eqn):
            yield from shapes_inside(inner)


def streamed(fn, *args):
    """Return the streamed jaxprs of the programs that a function calls."""
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
def test_no_intermediate_has_a_row_per_participant(name):
    (closed,) = streamed(federated(name), W, X, WEIGHTS)
    held = [s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)]
    assert not held, held


def test_without_the_pass_intermediates_have_a_row_per_participant():
    jaxpr = jax.make_jaxpr(federated("average"))(W, X, WEIGHTS).jaxpr
    (closed,) = [e.params["jaxpr"] for e in jaxpr.eqns if "placements" in e.params]
    assert (N, 3, 2) in shapes_inside(closed.jaxpr)


def test_only_values_needed_per_participant_are_stored():
    (closed,) = streamed(federated("values_per_participant"), W, X, WEIGHTS)
    held = {s for s in shapes_inside(closed.jaxpr) if s[:1] == (N,)}
    assert held == {(N,), (N, 3, 2)}  # norms, and the broadcast that is returned
    deltas = [s for s in shapes_inside(closed.jaxpr) if s == (N, 3, 2)]
    assert len(deltas) == 1


def test_values_read_by_a_later_phase_are_stored():
    text = fedpax.explain(federated("two_phases"), W, X, WEIGHTS)
    assert re.search(
        r"phase 0: .* stored for all participants:\n +float32\[12,3,2\]: a later", text
    )
    assert re.search(r"phase 1: .* nothing is stored", text)


def temporary_bytes(fn, participants):
    x, n = normal(participants, 5, 32), np.ones(participants, np.float32)
    return jax.jit(fn).lower(normal(32, 16), x, n).compile().memory_analysis().temp_size_in_bytes


def is_flat(make):
    # From 129 participants on, sums of arguments are combined in blocks, with one more total.
    few, many = (temporary_bytes(make(size), size) for size in (256, 4096))
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


@pytest.mark.parametrize("name", ["two_phases", "variance", "server_arrays_between"])
def test_memory_is_flat_where_participants_are_rematerialized(name):
    assert is_flat(lambda size: federated(name, 1, size, Rematerialized))


REMATERIALIZED = [
    "average",
    "weights_from_the_map",
    "two_phases",
    "extremes",
    "clipped_twice",
    "variance",
    "rematerialized_rounds",
]


@pytest.mark.parametrize(
    ("name", "where"),
    cases(
        REMATERIALIZED,
        ["inside", "outside"],
        fast={("rematerialized_rounds", "outside")},
    ),
)
def test_memory_of_a_gradient_is_flat_where_participants_are_rematerialized(name, where):
    def make(size):
        if where == "outside":
            return gradient_of(federated(name, 1, size, Rematerialized), 0)
        inside = gradient_of(functools.partial(PROGRAMS[name], Rematerialized), 0)
        return fedpax.program(clients=size, chunk_size=1)(inside)

    assert is_flat(make)


def test_a_forward_derivative_of_an_extremum_is_streamed():
    def make(size):
        @fedpax.program(clients=size, chunk_size=1)
        def program(w, x, n):
            moved = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
            return fedpax.federated_max(moved)

        return jax.jacfwd(lambda *args: jnp.sum(program(*args)))

    assert is_flat(make)


@pytest.mark.slow
def test_a_program_under_checkpoint_stores_nothing_for_its_gradient():
    def make(size):
        body = jax.checkpoint(functools.partial(PROGRAMS["clipped_twice"], Federated))
        return gradient_of(fedpax.program(clients=size, chunk_size=1)(body), 0)

    plain = gradient_of(functools.partial(PROGRAMS["clipped_twice"], Plain), 0)
    close(*(jax.jit(fn)(W, X, WEIGHTS) for fn in (make(N), plain)), 1e-4)
    assert is_flat(make)


def test_which_values_are_rematerialized():
    """Values under `jax.checkpoint`, unless they are stored for another reason."""

    def words(name, functions):
        return fedpax.explain(federated(name, functions=functions), W, X, WEIGHTS)

    assert "rematerialized" not in words("variance", Federated)
    assert re.search(
        r"phase 0: 1 map, 1 red.*nothing.*\n.*phase 1: 1 rematerialized map, 1 red.*nothing",
        words("variance", Rematerialized),
    )
    assert "rematerialized" not in words("values_per_participant", Rematerialized)
    # Norms whose maximum is sought are kept as they were; the deltas are computed again.
    text = words("weights_of_a_later_phase", Rematerialized)
    assert re.findall(r"(float32\S+): ", text) == ["float32[12]"] and "1 rematerialized map" in text

    @fedpax.program(clients=N, chunk_size=1)
    def returned(w, x):
        delta = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return delta, federated_mean((delta - federated_mean(delta)) ** 2)

    assert "rematerialized" not in fedpax.explain(returned, W, X)


@pytest.mark.parametrize(
    ("fn", "repeated"),
    [
        (jax.jit(jax.checkpoint(local)), True),
        (jax.checkpoint(local, policy=jax.checkpoint_policies.everything_saveable), False),
        (lambda w, x: 2 * jax.checkpoint(local)(w, x), False),
    ],
    ids=["jitted", "with a policy", "in part"],
)
def test_a_map_is_rematerialized_if_all_of_it_is_under_checkpoint(fn, repeated):
    @fedpax.program(clients=N, chunk_size=1)
    def program(w, x):
        delta = federated_map(fn, federated_broadcast(w), x)
        return federated_mean((delta - federated_mean(delta)) ** 2)

    assert ("rematerialized" in fedpax.explain(program, W, X)) == repeated


def repeatedly_updated(w, x, rounds):
    @fedpax.program(clients=N, chunk_size=1)
    def program(w, x):
        for _ in range(rounds):
            x = federated_map(
                jax.checkpoint(lambda w, x: jnp.tanh(w + x)), federated_broadcast(w), x
            )
            w = w + federated_mean(x)
        return w

    return program(w, x)


def test_a_state_that_every_phase_updates_is_stored():
    """Rematerialized, each phase would run all earlier phases: 36 maps in place of 11."""
    text = fedpax.explain(functools.partial(repeatedly_updated, rounds=8), X[0], X)
    assert re.findall(r"(\d) (?:rematerialized )?maps?", text) == list("1111211111"), text
    assert text.count("stored for all") == 5
    plain = X[0], X
    for _ in range(8):
        moved = jnp.tanh(plain[0] + plain[1])
        plain = plain[0] + moved.mean(0), moved
    close(repeatedly_updated(X[0], X, 8), plain[0])


def test_programs_with_effects_or_own_checkpoints_are_not_rematerialized():
    """A map under `jax.checkpoint` in the same program does not change this."""

    def beside(f, w, x, n):
        own = jax.checkpoint(lambda w: jnp.sum(jnp.sin(f.mean(f.map(local, f.broadcast(w), x)))))
        return own(w) + Rematerialized.mean(Rematerialized.map(jnp.sum, x))

    def make(size):
        body = functools.partial(beside, Federated)
        return jax.grad(fedpax.program(clients=size, chunk_size=1)(body))

    assert "the program returns it" not in fedpax.explain(make(N), W, X, WEIGHTS)
    called = []

    @fedpax.program(clients=N, chunk_size=1)
    def watched(w, x):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        seen = jax.experimental.io_callback(lambda: called.append(0) or np.float32(0), shape)
        moved = federated_map(jax.checkpoint(local), federated_broadcast(w), x)
        return jnp.sum(jnp.sin(federated_mean(moved))) + seen

    jax.block_until_ready(jax.grad(watched)(W, X))
    assert len(called) == 1


def test_a_nested_program_saves_its_mean_for_the_gradient():
    """Its clients run once forward and once backward, and not a third time for the mean."""

    @fedpax.program(outer=3)
    def around(w, x):
        @fedpax.program(clients=N, chunk_size=1)
        def inner(w):
            return federated_mean(federated_map(jax.checkpoint(local), federated_broadcast(w), x))

        return jnp.sum(jnp.sin(inner(w)))

    text = fedpax.explain(jax.grad(around), W, X)
    assert re.findall(r"(\d+) map.*", text) == ["1", "1"], text


def test_a_rematerialized_map_keeps_its_chunk_size():
    @fedpax.program(clients=N)
    def program(w, x):
        fn = jax.checkpoint(local)
        delta = federated_map(fn, federated_broadcast(w), x, chunk_size=3)
        mean = federated_mean(delta)
        twice = federated_map(lambda d: 2 * d, delta - mean)
        return federated_mean(twice), federated_mean((delta - mean) ** 2)

    assert "phase 1: 1 map, 1 rematerialized map, 2 reductions, chunk_size=3" in fedpax.explain(
        program, W, X
    )
