"""JAX functions work inside the mapped function, on every mesh, as under `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, place
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fedpax
from fedpax import federated_map, federated_mean

N = 4

pytestmark = pytest.mark.slow


def smooth(x):
    """Call differentiable functions whose parameters contain jaxprs, shapes and axes."""
    h = jnp.sort(x) * x[jnp.argsort(x)]
    filtered = jax.lax.conv_general_dilated(h[None, None], x[None, None, :3], (1,), "SAME")
    total, sums = jax.lax.scan(lambda c, v: (c * 0.5 + jnp.sin(v), c), 0.0, filtered.ravel())
    branch = jax.lax.cond(x[0] > 0, lambda x: x.sum(), lambda x: (x**2).sum(), x)
    switched = jax.lax.switch(jnp.int32(1), [lambda x: x[0], lambda x: jnp.tanh(x[1])], x)
    saved = jax.checkpoint(lambda x: jnp.tanh(jnp.sin(x)).sum())(x)
    called = jax.jit(lambda x: jax.nn.gelu(x) + jax.nn.relu(x))(x).sum()
    solved = jnp.linalg.cholesky(jnp.eye(3) + jnp.outer(x[:3], x[:3]))[2]
    chosen = jnp.where(x > 0, jnp.cumsum(x), 0.0).sum() + jax.lax.top_k(x, 2)[0].sum()
    spectrum = jax.lax.associative_scan(jnp.add, x)[2]
    looped = jax.lax.fori_loop(0, 3, lambda i, v: v + x[i], 0.0) + jax.lax.map(jnp.cos, x).sum()
    local = jax.grad(lambda y: jax.nn.logsumexp(y * x))(x).sum()
    scalars = branch * switched + saved * called + chosen * spectrum + looped * local
    return scalars + total + jnp.dot(sums[:3], solved)


def rough(key, x):
    """Call functions without a derivative, or whose results are not floats."""
    waited = jax.lax.while_loop(lambda v: jnp.sum(v) < 50, lambda v: v * 1.5 + 1, jnp.abs(x))
    drawn = jax.random.normal(key, (2,)), jax.random.permutation(key, x)
    counted = jnp.argmax(x), jax.random.categorical(key, x), jnp.sum(x > 0), jnp.unique(x, size=3)
    return waited, drawn, counted, jax.lax.stop_gradient(x), jnp.take(x, jnp.array([1, 0]))


def test_differentiable_functions_and_their_gradients(main_mesh):
    x = normal(N, 6)
    plain = lambda x: jnp.mean(jax.vmap(smooth)(x))
    program = fedpax.program(clients=N)(lambda x: federated_mean(federated_map(smooth, x)))
    value, gradient = jax.jit(jax.value_and_grad(program))(x)
    assert_close((value, gradient), jax.jit(jax.value_and_grad(plain))(x), 1e-4)


@pytest.mark.parametrize("chunk_size", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_functions_without_derivatives(chunk_size, main_mesh):
    keys, x = jax.random.split(jax.random.key(3), N), normal(N, 6)
    program = fedpax.program(clients=N, chunk_size=chunk_size)(
        lambda keys, x: federated_map(rough, keys, x)
    )
    assert_close(program(keys, x), jax.jit(jax.vmap(rough))(keys, x))


def test_a_while_loop_has_forward_derivatives(main_mesh):
    fn = lambda x: jax.lax.while_loop(lambda v: v < 10, lambda v: v * 1.5 + jnp.sin(x), x**2 + 1)
    program = fedpax.program(clients=N)(lambda x: federated_mean(federated_map(fn, x)))
    plain = lambda x: jnp.mean(jax.vmap(fn)(x))
    x = normal(N)
    both = lambda f: jax.jit(lambda x: (jax.jvp(f, (x,), (jnp.cos(x),)), jax.jacfwd(f)(x)))
    assert_close(both(program)(x), both(plain)(x))


def linear_solve(x):
    matrix = jnp.eye(3) + jnp.outer(x, x)
    return jax.lax.custom_linear_solve(
        lambda v: matrix @ v, x, lambda _, b: jnp.linalg.inv(matrix) @ b, symmetric=True
    )


def conjugate_gradients(x):
    return jax.scipy.sparse.linalg.cg(lambda v: v + x * jnp.dot(x, v), x, maxiter=5)[0]


def root(x):
    newton = lambda f, y: jax.lax.fori_loop(0, 20, lambda _, y: y - f(y) / (3 * y**2 + 1), y)
    solve = lambda g, y: y / g(1.0)
    return jax.lax.custom_root(lambda y: y**3 + y - x[0], 0.5, newton, solve)


@jax.custom_batching.custom_vmap
def with_a_batch_rule(x):
    return x * 2


@with_a_batch_rule.def_vmap
def _(axis_size, in_batched, x):
    return jnp.sin(x), True


@pytest.mark.parametrize("fn", [linear_solve, jnp.linalg.norm, conjugate_gradients, root])
def test_solvers_and_their_gradients(fn, main_mesh):
    x = normal(N, 3)
    program = fedpax.program(clients=N)(lambda x: federated_map(fn, x))
    assert_close(program(x), jax.vmap(fn)(x), 1e-4)
    loss = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))
    assert_close(loss(program)(x), loss(jax.vmap(fn))(x), 1e-3)


def test_a_custom_batching_rule_is_used_for_chunks_only(current_mesh):
    x = normal(8, 3)
    program = lambda chunk_size: fedpax.program(clients=8, chunk_size=chunk_size)(
        lambda x: federated_map(with_a_batch_rule, x)
    )
    assert_close(program(None)(x), np.sin(x))
    assert_close(program(1)(x), x * 2)


# ---- model axes inside fn


def test_shard_map_over_a_model_axis(current_mesh, request):
    if current_mesh is None:
        pytest.skip("needs a mesh")
    if set(current_mesh.axis_types) == {jax.sharding.AxisType.Explicit}:
        reason = "the cotangent's type keeps the axis that shard_map's input spec names"
        request.applymarker(pytest.mark.xfail(strict=True, raises=ValueError, reason=reason))

    def total(x):  # half of the features on each device of a participant
        local = lambda x: jax.lax.psum(jnp.sin(x) ** 2, "fsdp")
        return jax.shard_map(
            local, in_specs=P("fsdp"), out_specs=P(), axis_names={"fsdp"}, check_vma=False
        )(x)

    x = normal(8, 2)
    program = fedpax.program(clients=8)(lambda x: federated_map(total, x))
    assert_close(program(x), np.sum(np.sin(x) ** 2, 1, keepdims=True))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(program(x))))(x)
    assert_close(gradient, 2 * np.sin(x) * np.cos(x))


@pytest.mark.parametrize("concrete", [False, True])
def test_sharding_constraints_over_a_model_axis(concrete, current_mesh):
    if current_mesh is None or current_mesh.axis_types[1] != jax.sharding.AxisType.Auto:
        pytest.skip("constraints are for automatic axes")
    spec = NamedSharding(current_mesh, P("fsdp")) if concrete else P("fsdp")
    fn = lambda w, x: jnp.sum(jnp.sin(jax.lax.with_sharding_constraint(w * x, spec)))
    w, x = normal(2), normal(8, 2, seed=1)
    program = fedpax.program(clients=8)(
        lambda w, x: federated_mean(federated_map(lambda x: fn(w, x), x))
    )
    assert_close(program(w, x), np.sin(w * x).sum(1).mean())
    assert_close(jax.jit(jax.grad(program))(w, x), (np.cos(w * x) * x).mean(0))


def test_reshard_over_an_explicit_model_axis(current_mesh):
    if current_mesh is None or current_mesh.axis_types[1] != jax.sharding.AxisType.Explicit:
        pytest.skip("needs an explicit model axis")
    fn = lambda w, x: jnp.sin(jax.sharding.reshard(w * x, P("fsdp")))
    w, x = normal(2), normal(8, 2, seed=1)
    program = fedpax.program(clients=8)(lambda w, x: federated_map(lambda x: fn(w, x), x))
    (described,) = jax.make_jaxpr(program)(w, x).out_avals
    assert described.sharding.spec[1] == "fsdp"
    assert_close(program(w, x), np.sin(w * x))
    loss = lambda w, x: jnp.sum(program(w, x))
    assert_close(jax.jit(jax.grad(loss))(w, x), (np.cos(w * x) * x).sum(0))


def test_a_matmul_sharded_over_the_model_axis(current_mesh):
    w, x = place(normal(2, 4), "fsdp", None), place(normal(8, 3, 2), "clients", None, "fsdp")

    @fedpax.program(clients=8)
    def program(w, x):
        def fn(x):
            if current_mesh is None:
                return jnp.tanh(x @ w)
            return jnp.tanh(jnp.dot(x, w, out_sharding=P(None, None)))

        return federated_mean(federated_map(fn, x))

    plain = lambda w, x: jnp.mean(jnp.tanh(x @ w), 0)
    whole = np.asarray(w), np.asarray(x)
    assert_close(program(w, x), plain(*whole))
    gradient = lambda f: jax.jit(jax.grad(lambda w, x: jnp.sum(f(w, x) ** 2)))
    assert_close(gradient(program)(w, x), gradient(plain)(*whole), 1e-4)
