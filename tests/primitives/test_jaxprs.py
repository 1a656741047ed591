"""The jaxpr of a program and of its derivatives contains only federated primitives."""

from collections import Counter

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from federated_cases import (
    assert_close,
    equations,
    federated_names,
    inner_jaxprs,
    normal,
    place,
    positive,
    primitive_names,
)

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum, primitives
from fedpax.primitives.jaxpr_analysis import zero_results

N = 7  # no other size below is 7: an axis of that size belongs to the participants
PRIMITIVES = {
    name: getattr(primitives, f"federated_{name}_p")
    for name in ("broadcast", "map", "sum", "mean", "max", "min", "program")
}


def declared(fn):
    return fedpax.program(clients=N)(fn)


FUNCTIONS = {
    "broadcast": (declared(fedpax.federated_broadcast), normal(2)),
    "sum": (declared(fedpax.federated_sum), normal(N, 2)),
    "mean": (declared(fedpax.federated_mean), normal(N, 2)),
    "max": (declared(fedpax.federated_max), normal(N, 2)),
    "min": (declared(fedpax.federated_min), normal(N, 2)),
    "map": (declared(lambda x: federated_map(lambda x: x * 3, x)), normal(N, 2)),
}


@declared
def fedavg_round(w, x, n):
    def local(x):
        step = lambda w, _: (w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(w * x)))(w), None)
        return w - jax.lax.scan(step, w, length=2)[0]

    change = federated_mean(federated_map(local, x), n)
    return w - change + federated_sum(federated_broadcast(w) * x) * 0.1


def arguments():
    return normal(2), normal(N, 2), positive(N)


# ---- the primitives themselves


@pytest.mark.parametrize("name", PRIMITIVES)
def test_each_primitive_has_its_name(name):
    assert isinstance(PRIMITIVES[name], jax.extend.core.Primitive)
    assert PRIMITIVES[name].name == f"federated_{name}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_sizes_bind_the_same_primitive_with_the_placement_as_parameter(name):
    function = getattr(fedpax, f"federated_{name}")
    call = (lambda x: function(jnp.sin, x)) if name == "map" else function
    for n, placement in ((3, "clients"), (5, "islands"), (3, "clients")):
        x = normal(2) if name == "broadcast" else normal(n, 2)
        program = fedpax.program(placements={placement: n})(call)
        (outer,) = jax.make_jaxpr(program)(x).eqns
        assert outer.primitive is PRIMITIVES["program"]
        assert outer.params["placements"] == ((placement, n),)
        (eqn,) = outer.params["jaxpr"].eqns
        assert eqn.primitive is PRIMITIVES[name]
        assert eqn.params["placement"] == (placement, n)
        hash(eqn.params["placement"])  # static: `jax.jit` caches by it


def test_the_mapped_function_is_a_jaxpr_of_one_participant():
    program = declared(lambda w, x: federated_map(lambda x: jnp.sin(w * x), x))
    (outer,) = jax.make_jaxpr(program)(*arguments()[:2]).eqns
    names = [eqn.primitive.name for eqn in outer.params["jaxpr"].eqns]
    assert names == ["federated_broadcast", "federated_map"]  # of w, closed over
    inner = outer.params["jaxpr"].eqns[-1].params["jaxpr"]
    assert [a.shape for a in inner.in_avals] == [(2,), (2,)]
    assert [a.shape for a in inner.out_avals] == [(2,)]
    assert not inner.consts
    assert {eqn.primitive.name for eqn in inner.eqns} == {"mul", "sin"}


# ---- derivatives

FORWARD = {name: {name} for name in ("broadcast", "sum", "mean", "map")}
FORWARD |= {
    name: {f"{name}_with_set", "index", "broadcast", "mask", "sum"} for name in ("max", "min")
}
REVERSE = {
    "broadcast": {"broadcast", "sum"},
    "sum": {"sum", "broadcast"},
    "mean": {"mean", "broadcast"},
    "map": {"map"},
    "max": {"max", "max_with_set", "index", "broadcast", "mask"},
    "min": {"min", "min_with_set", "index", "broadcast", "mask"},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_derivatives_contain_the_primitive(name):
    program, x = FUNCTIONS[name]
    assert set(federated_names(lambda x, t: jax.jvp(program, (x,), (t,)), x, x)) == FORWARD[name]
    if name not in ("max", "min"):
        assert name in federated_names(jax.jacfwd(program), x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_reverse_derivatives_contain_the_transpose(name):
    program, x = FUNCTIONS[name]
    names = set(federated_names(lambda x: jax.vjp(program, x)[1](program(x)), x))
    assert names == REVERSE[name]
    transposes = {"sum": "broadcast", "mean": "broadcast", "max": "broadcast", "min": "broadcast"}
    transpose = (transposes | {"broadcast": "sum"}).get(name, name)
    assert transpose in federated_names(jax.jacrev(program), x)


@pytest.mark.parametrize(
    ("name", "transpose"),
    [("broadcast", "sum"), ("sum", "broadcast"), ("mean", "broadcast"), ("map", "map")],
)
def test_a_linear_transpose_is_one_primitive(name, transpose):
    program, x = FUNCTIONS[name]
    cotangent = program(x)
    transposed = lambda c: jax.linear_transpose(program, x)(c)
    assert federated_names(transposed, cotangent) == Counter({transpose: 1})


def test_the_transpose_of_a_weighted_mean():
    program = declared(lambda x, n: federated_mean(x, n))
    x, n = normal(N, 2), positive(N)
    transposed = lambda c, n: jax.linear_transpose(lambda x: program(x, n), x)(c)
    assert set(federated_names(transposed, normal(2), n)) == {"broadcast", "sum"}


def test_a_derivative_by_the_weights_contains_federated_primitives():
    program = declared(lambda x, n: federated_mean(x, n))
    x, n = normal(N, 2), positive(N)
    forward = lambda n, t: jax.jvp(lambda n: program(x, n), (n,), (t,))
    assert set(federated_names(forward, n, n)) == {"mean", "broadcast", "mask", "sum"}
    gradient = jax.grad(lambda n: jnp.sum(program(x, n) ** 2))
    assert set(federated_names(gradient, n)) == {"mean", "broadcast", "mask", "sum"}


@pytest.mark.parametrize("name", ["broadcast", "sum", "mean", "map"])
def test_symbolic_zeros_under_jit(name):
    program, x = FUNCTIONS[name]
    both = jax.jit(lambda x: (program(x), program(x * 2)))
    first = jax.jit(lambda x: both(x)[0])
    expected = jax.jit(jax.jacfwd(program))(x)
    assert_close(jax.jit(jax.jacrev(first))(x), expected)
    # An ignored result has no tangent and no cotangent, so nothing is computed for it.
    ones = federated_names(lambda x: jax.vjp(program, x)[1](program(x)), x)
    twice = federated_names(lambda x: jax.vjp(first, x)[1](program(x)), x)
    backward = REVERSE[name] - {name}
    assert all(twice[k] <= ones[k] for k in backward)


# ---- nothing else communicates

COMMUNICATING = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather"),
    *("all_gather_invariant", "all_to_all", "psum_scatter", "reduce_scatter", "shard_map"),
    *("axis_index", "pbroadcast", "sharding_constraint", "reshard", "xla_pmap"),
}


def communicating(fn, *args):
    """Return the primitives that can move values between devices; constants do not move."""
    return {
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(fn)(*args))
        if eqn.primitive.name in COMMUNICATING
        and not all(isinstance(v, jax.extend.core.Literal) for v in eqn.invars)
    }


VARIANTS = {
    "program": lambda f: f,
    "jit": jax.jit,
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a),
    "grad": lambda f: jax.grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=(0, 1, 2)),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=(0, 2))),
    "remat": lambda f: jax.grad(lambda *a: jnp.sum(jax.checkpoint(f)(*a) ** 2)),
    "vmap": lambda f: lambda w, x, n: jax.vmap(f, (0, None, None))(jnp.stack([w, w]), x, n),
    "hessian": lambda f: jax.hessian(lambda *a: jnp.sum(f(*a) ** 2)),
    "scan": lambda f: lambda w, x, n: jax.lax.scan(lambda w, _: (f(w, x, n), None), w, length=3),
    "grad of scan": lambda f: jax.grad(
        lambda w, x, n: jnp.sum(jax.lax.scan(lambda w, _: (f(w, x, n), None), w, length=3)[0])
    ),
    "cond": lambda f: lambda w, x, n: jax.lax.cond(w[0] > 0, f, lambda w, x, n: w, w, x, n),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_federated_primitives_communicate_between_participants(variant):
    fn = VARIANTS[variant](fedavg_round)
    closed = jax.make_jaxpr(fn)(*arguments())
    names = primitive_names(fn, *arguments())
    assert not communicating(fn, *arguments())
    assert names["federated_program"] >= 1
    assert {"federated_map", "federated_broadcast"} <= set(names)
    outside = lambda eqn: eqn.primitive.name != "federated_map"
    for eqn in equations(closed, into=outside):
        if eqn.primitive.name.startswith("federated_") or any(True for _ in inner_jaxprs(eqn)):
            continue
        # An equation that indexes, sums or contracts the participants' axis would communicate.
        if any(N in v.aval.shape for v in eqn.invars):
            assert all(N in v.aval.shape for v in eqn.outvars), eqn


@fedpax.program(clients=4)
def round_of_four(w, x, n):
    return federated_mean(federated_map(lambda x: jnp.sin(w * x), x), n)


@pytest.mark.each_value
@pytest.mark.parametrize("variant", ["program", "grad", "hessian", "grad of scan"])
def test_the_jaxpr_on_a_mesh_contains_the_same_primitives(variant, mesh_only):
    fn, args = VARIANTS[variant](round_of_four), (normal(2), normal(4, 2), positive(4))
    laid_out = args[0], place(args[1], "clients"), place(args[2], "clients")
    result = federated_names(fn, *laid_out)
    assert not communicating(fn, *laid_out)
    with jax.set_mesh(jax.make_mesh((1,), ("elsewhere",), devices=jax.devices()[:1])):
        assert result == federated_names(fn, *args)


def test_a_gradient_has_one_sum_per_broadcast():
    @declared
    def program(w, x):
        return federated_sum(federated_map(lambda w, x: jnp.sum(w * x), federated_broadcast(w), x))

    w, x, _ = arguments()
    # Forward: broadcast, map, sum. Backward: broadcast of the cotangent, a map, a sum.
    expected = Counter(broadcast=2, map=2, sum=2)
    assert federated_names(jax.grad(program), w, x) == expected
    assert federated_names(jax.jit(jax.grad(program)), w, x) == expected


def test_unused_results_of_maps_are_pruned():
    program = declared(
        lambda x: federated_sum(federated_map(lambda x: (jnp.sin(x), jnp.exp(x)), x)[0])
    )
    # A loop prunes its body to the equations that its result needs.
    looped = lambda x: jax.lax.scan(lambda x, _: (program(x) + 0 * x, None), x, length=2)[0]
    names = primitive_names(jax.grad(lambda x: jnp.sum(looped(x))), normal(N, 2))
    assert "cos" in names
    assert "exp" not in names


def test_results_of_zeros_are_zero_by_equations_that_keep_them():
    jaxpr = jax.make_jaxpr(lambda x, y: (2 * x + 0, x * y, y))(1.0, 1.0)
    assert zero_results(jaxpr, [True, False]) == [True, True, False]
