"""Shardings of results, on meshes with and without the placement's axis, of each kind of axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, place, positive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import federated_broadcast, federated_map, federated_mean, federated_sum

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {"automatic": AUTO, "explicit": EXPLICIT}


def mesh_of(kind, **sizes):
    count = int(np.prod(list(sizes.values())))
    types = (KINDS[kind],) * len(sizes)
    names = tuple(sizes)
    return jax.make_mesh(
        tuple(sizes.values()), names, axis_types=types, devices=jax.devices()[:count]
    )


def spec_of(x):
    """Return the mesh axes of each dimension, with None for dimensions that are not sharded."""
    return tuple(itertools.islice(itertools.chain(x.sharding.spec, itertools.repeat(None)), x.ndim))


either = pytest.mark.parametrize("kind", KINDS)
eager_or_jit = pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])


# ---- broadcast


@pytest.mark.each_value
@either
@eager_or_jit
@pytest.mark.parametrize("name", ["clients", "XY"])
@pytest.mark.parametrize("n", [8, 100])
def test_a_broadcast_is_sharded_over_the_placement_and_keeps_the_model_axes(kind, run, name, n):
    tell = run(fedpax.program(placements={name: n})(federated_broadcast))
    x = normal(8, 6)
    mesh = mesh_of(kind, **{name: 4, "model": 2})
    with jax.set_mesh(mesh):
        out = tell(jax.device_put(x, P("model")))
    assert out.sharding.mesh == mesh
    assert spec_of(out) == (name, "model", None)
    np.testing.assert_array_equal(out, np.broadcast_to(x, (n, 8, 6)))


@either
@eager_or_jit
def test_a_broadcast_on_a_mesh_without_the_placement(kind, run):
    tell = run(fedpax.program(clients=100)(federated_broadcast))
    x = normal(8, 6)
    with jax.set_mesh(mesh_of(kind, model=8)):
        out = tell(jax.device_put(x, P("model")))
    assert spec_of(out) == (None, "model", None)
    np.testing.assert_array_equal(out, np.broadcast_to(x, (100, 8, 6)))


@pytest.mark.parametrize("name", ["clients", "XY"])
def test_eval_shape_returns_explicit_shardings(name):
    tell = fedpax.program(placements={name: 100})(federated_broadcast)
    with jax.set_mesh(mesh_of("explicit", **{name: 4, "model": 2})):
        described = jax.eval_shape(tell, jnp.asarray(normal(10)))
        typed = jax.ShapeDtypeStruct((10, 4), jnp.float32, sharding=P("model"))
        kept = jax.eval_shape(tell, typed)
    assert described.shape == (100, 10)
    assert described.sharding.spec == P(name, None)
    assert kept.sharding.spec == P(name, "model", None)


def test_eval_shape_returns_no_automatic_shardings():
    tell = fedpax.program(clients=100)(federated_broadcast)
    for sizes in ({"clients": 4, "model": 2}, {"model": 8}):
        with jax.set_mesh(mesh_of("automatic", **sizes)):
            described = jax.eval_shape(tell, jnp.asarray(normal(10)))
        assert described.shape == (100, 10)
        assert described.sharding is None


@either
def test_a_server_value_that_is_sharded_over_the_placements_axis(kind):
    # For example parameters that are sharded over all devices. A participant needs them whole.
    x = normal(8, 2)
    tell = fedpax.program(clients=8)(federated_broadcast)
    with jax.set_mesh(mesh_of(kind, clients=4, model=2)):
        for spec in (P("clients"), P(("clients", "model")), P(None, ("model",))):
            out = tell(jax.device_put(x, spec))
            assert spec_of(out)[0] == "clients"
            np.testing.assert_array_equal(out, np.broadcast_to(x, (8, 8, 2)))


# ---- reductions and maps

REDUCTIONS = [federated_sum, federated_mean, fedpax.federated_max]


@pytest.mark.each_value
@either
@eager_or_jit
def test_reduced_values_keep_the_model_axes(kind, run):
    x, n = normal(8, 4, 6), positive(8)
    with jax.set_mesh(mesh_of(kind, clients=4, model=2)):
        placed = jax.device_put(x, P("clients", None, "model"))
        for reduce in REDUCTIONS:
            out = run(fedpax.program(clients=8)(reduce))(placed)
            assert spec_of(out) == (None, "model")
        out = run(fedpax.program(clients=8)(federated_mean))(placed, n)
        assert spec_of(out) == (None, "model")
        assert_close(out, np.average(x, axis=0, weights=n))


@pytest.mark.each_value
@either
@pytest.mark.parametrize("sharded", [P("clients"), P("clients", "model"), P(None, "model"), P()])
def test_a_map_takes_arguments_of_any_sharding(kind, sharded):
    x, w = normal(8, 4), normal(4, seed=1)
    train = fedpax.program(clients=8)(
        lambda w, x: federated_map(lambda w, x: jnp.sin(w * x), federated_broadcast(w), x)
    )
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(train(w, x))))
    with jax.set_mesh(mesh_of(kind, clients=4, model=2)):
        args = w, jax.device_put(x, sharded)
        out = jax.jit(train)(*args)
        assert spec_of(out)[0] == "clients"
        gradients = gradient(*args)
    assert_close(out, np.sin(w * x))
    assert_close(gradients, (np.cos(w * x) * x).sum(0))


@pytest.mark.parametrize("spec", [P(None, "clients"), P("model", "clients"), P(None, ("clients",))])
def test_a_placed_value_sharded_over_the_placements_axis_in_another_dimension(spec):
    x = normal(8, 8)
    total = fedpax.program(clients=8)(lambda x: jnp.sum(federated_sum(x) ** 2))
    with jax.set_mesh(mesh_of("explicit", clients=4, model=2)):
        placed = jax.device_put(x, spec)
        value, gradient = jax.jit(jax.value_and_grad(total))(placed)
    assert_close(value, np.sum(x.sum(0) ** 2), 1e-4)
    assert_close(gradient, np.broadcast_to(2 * x.sum(0), (8, 8)), 1e-4)


@pytest.mark.each_value
@either
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_participants_sharded_over_an_axis_of_another_name(kind, chunk_size):
    # The mesh lacks the placement's axis, and another of its axes shards the participants.
    x = normal(8, 4)
    program = fedpax.program(clients=8, chunk_size=chunk_size)(
        lambda x: federated_mean(federated_map(lambda x: x**2, x))
    )
    with jax.set_mesh(mesh_of(kind, data=8)):
        placed = jax.device_put(x, P("data"))
        value = program(placed)
        gradient = jax.grad(lambda x: jnp.sum(program(x)))(placed)
    assert_close(value, (x**2).mean(0))
    assert_close(gradient, 2 * x / 8)


# ---- meshes that are not in context, several sizes, several devices


def test_sharded_arguments_without_a_mesh_in_context():
    x, w = normal(8, 4), normal(4)
    mesh = mesh_of("automatic", clients=4, model=2)
    train = fedpax.program(clients=8)(
        lambda w, x: federated_mean(federated_map(lambda x: jnp.sin(w * x), x))
    )
    args = (
        jax.device_put(w, NamedSharding(mesh, P("model"))),
        jax.device_put(x, NamedSharding(mesh, P("clients", "model"))),
    )
    assert_close(train(*args), np.sin(w * x).mean(0))
    loss = lambda w, x: jnp.sum(train(w, x))
    assert_close(jax.jit(jax.grad(loss))(*args), (np.cos(w * x) * x).mean(0))


def test_arguments_without_a_mesh_in_their_types_in_chunks():
    """NumPy arrays, and arrays made before the mesh was set, on explicit axes of other names."""
    x = normal(5, 4)
    program = fedpax.program(clients=5, chunk_size=2)(
        lambda x: federated_map(lambda x: jnp.sin(jnp.sin(x)), x)
    )
    derivative = jax.value_and_grad(lambda x: jnp.sum(program(x) ** 2))
    with jax.set_mesh(mesh_of("explicit", model=2)):
        result = jax.jit(derivative)(x)
    inner = np.sin(x)
    gradient = 2 * np.sin(inner) * np.cos(inner) * np.cos(x)
    assert_close(result, (np.sum(np.sin(inner) ** 2), gradient))


def test_explicit_arguments_without_a_mesh_in_context():
    x = normal(8, 4)
    placed = jax.device_put(
        x, NamedSharding(mesh_of("explicit", clients=4, model=2), P("clients", "model"))
    )
    program = fedpax.program(clients=8)(lambda x: federated_mean(federated_map(jnp.sin, x)))
    assert_close(program(placed), np.sin(x).mean(0))
    assert_close(jax.jit(program)(placed), np.sin(x).mean(0))


@pytest.mark.each_value
@either
@eager_or_jit
def test_cohorts_of_several_sizes_on_one_mesh(kind, run):
    above = lambda limit, x: jax.lax.cond(x > limit, lambda: 1.0, lambda: 0.0)

    def share(limit, x):
        return federated_mean(federated_map(above, federated_broadcast(limit), x))

    with jax.set_mesh(mesh_of(kind, clients=4, model=2)):
        hundred, twenty = (run(fedpax.program(clients=n)(share)) for n in (100, 20))
        many, few = (
            jax.device_put(np.arange(n, dtype=np.float32), P("clients")) for n in (100, 20)
        )
        assert hundred(24, many) == 0.75
        np.testing.assert_allclose(twenty(3, few), 0.8, rtol=1e-6)
        assert hundred(24, many) == 0.75


def test_the_same_program_on_one_mesh_after_another():
    x = normal(8, 4)
    program = fedpax.program(clients=8)(lambda x: federated_mean(federated_map(jnp.sin, x)))
    for sizes in ({"clients": 4, "model": 2}, {"clients": 8}, {"clients": 1}, {"model": 4}):
        for kind in KINDS:
            with jax.set_mesh(mesh_of(kind, **sizes)):
                assert_close(program(x), np.sin(x).mean(0))
    assert_close(program(x), np.sin(x).mean(0))


def test_three_axes_and_a_participant_over_several_devices():
    w, x = normal(4, 6), normal(4, 3, 4)
    train = fedpax.program(clients=4)(
        lambda w, x: federated_mean(federated_map(lambda x: jnp.tanh(x @ w), x))
    )
    types = (AUTO, AUTO, AUTO)
    mesh = jax.make_mesh((2, 2, 2), ("clients", "fsdp", "tensor"), axis_types=types)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, P("fsdp", "tensor"))
        placed = jax.device_put(x, P("clients"))
        step = jax.jit(
            jax.grad(lambda w, x: jnp.sum(train(w, x) ** 2)), out_shardings=sharded.sharding
        )
        gradient = step(sharded, placed)
        assert gradient.sharding == sharded.sharding
    plain = lambda w: jnp.sum(jnp.mean(jnp.tanh(x @ w), 0) ** 2)
    assert_close(gradient, jax.jit(jax.grad(plain))(w))


def test_a_program_inside_a_shard_map_over_a_model_axis():
    w, x = normal(2), normal(8, 2)
    program = fedpax.program(clients=8)(
        lambda w, x: federated_mean(federated_map(lambda x: jnp.sin(w * x), x))
    )
    with jax.set_mesh(mesh_of("automatic", clients=4, model=2)):
        sharded = jax.shard_map(
            program,
            in_specs=(P("model"), P(None, "model")),
            out_specs=P("model"),
            axis_names={"model"},
        )
        value = jax.jit(sharded)(w, x)
        gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(sharded(w, x))))(w, x)
    assert_close(value, np.sin(w * x).mean(0))
    assert_close(gradient, (np.cos(w * x) * x).mean(0))


def test_a_value_with_both_placement_axes():
    # A value placed at islands whose slices are placed at clients.
    @fedpax.program(islands=2, clients=4)
    def program(w, x):
        at_islands = federated_broadcast(w, placement="islands")
        inside = lambda w, x: federated_map(lambda x: w * x, x)
        return federated_map(inside, at_islands, x, placement="islands")

    w, x = normal(2), normal(2, 4, 2)
    with jax.set_mesh(mesh_of("explicit", islands=2, clients=4)):
        out = program(w, jax.device_put(x, P("islands", "clients")))
        assert spec_of(out) == ("islands", "clients", None)
    assert_close(out, w * x)


# ---- meshes of one device along the placement, and of mixed axes


@pytest.mark.each_value
@either
@eager_or_jit
def test_a_round_on_a_mesh_with_one_device_along_the_placement(kind, run):
    # XLA's partitioner fails with an internal error at a sum over an axis of size 1.
    def round(w, x):
        change = federated_map(lambda x: jnp.tanh(x * w), x)
        return federated_mean(change), federated_sum(change), fedpax.federated_max(change), change

    total = lambda w, x: sum(jnp.sum(y) for y in tree(w, x))
    tree = fedpax.program(clients=6)(round)
    w, x = normal(4), normal(6, 4, seed=1)
    expected, gradient = round_in_numpy(w, x)
    with jax.set_mesh(mesh_of(kind, clients=1, model=2)):
        args = jax.device_put(w, P("model")), jax.device_put(x, P("clients", "model"))
        assert_close(run(tree)(*args), expected)
        assert_close(run(jax.grad(total))(*args), gradient, 1e-4)


def round_in_numpy(w, x):
    """Compute the results of the round above, and the derivative of their sum by `w`."""
    y = np.tanh(x * w)
    slope = (1 - y**2) * x
    largest = slope[y.argmax(0), np.arange(len(w))]
    return (y.mean(0), y.sum(0), y.max(0), y), slope.mean(0) + 2 * slope.sum(0) + largest


@eager_or_jit
@pytest.mark.parametrize(
    "types", [(AUTO, EXPLICIT), (EXPLICIT, AUTO), (EXPLICIT, EXPLICIT)], ids=str
)
def test_results_have_the_traced_types(types, run):
    # JAX 0.10.2 drops the explicit model axes of a result that is sharded over the placement.
    double = run(fedpax.program(clients=8)(lambda x: federated_map(lambda x: 2 * x, x)))
    mesh = jax.make_mesh((4, 2), ("clients", "model"), axis_types=types)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(8, 6), P("clients", "model"))
        out = double(x)
        assert jax.typeof(out) == jax.make_jaxpr(double)(x).out_avals[0] == jax.typeof(x)
        assert spec_of(out) == ("clients", "model")


# ---- axes whose type changes inside a participant


@pytest.mark.slow
@pytest.mark.parametrize("sample", [jax.random.gamma, jax.random.dirichlet])
def test_the_gradient_of_a_random_sample_by_its_shape_parameter(sample, current_mesh):
    # On explicit axes, JAX samples with automatic axes, so residuals have another mesh.
    keys, shape = jax.random.split(jax.random.key(0), 8), positive(8, 2) + 0.5
    program = fedpax.program(clients=8)(lambda keys, a: federated_map(sample, keys, a))
    gradient = lambda f, a: jax.jit(jax.grad(lambda a: jnp.sum(f(keys, a) ** 2)))(a)
    expected = gradient(jax.vmap(sample), shape)
    assert_close(gradient(program, place(shape, "clients")), expected, 1e-4)


def test_derivatives_of_a_function_with_automatic_axes(explicit_mesh):
    def cube(x):
        return jnp.sum(jnp.sin(x) ** 3) * x

    program = fedpax.program(clients=8, chunk_size=1)(
        lambda x: federated_map(jax.sharding.auto_axes(cube, out_sharding=P("fsdp")), x)
    )
    x = normal(8, 2)
    gradient = lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(x)
    assert_close(gradient(program, place(x, "clients", "fsdp")), gradient(jax.vmap(cube), x), 1e-4)
