"""`federated_map`: values, closed-over values, chunk sizes and effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, place, positive

import fedpax
from fedpax import federated_map, federated_mean, federated_sum
from fedpax.transforms import PlacedClosureWarning

N = 6


def mapped(fn, *args, n=N, **options):
    return fedpax.program(clients=n)(lambda *args: federated_map(fn, *args, **options))(*args)


def test_each_participant_sees_its_own_slices():
    x, tree = normal(N, 2), {"a": normal(N, 3), "b": [normal(N), None]}

    def fn(x, tree):
        assert x.shape == (2,)
        assert tree["a"].shape == (3,)
        assert tree["b"][0].shape == ()
        return {"outer": jnp.outer(x, tree["a"]), "scaled": (tree["b"][0] * x, None)}

    out = mapped(fn, x, tree)
    assert_close(
        out,
        {
            "outer": np.einsum("ni,nj->nij", x, tree["a"]),
            "scaled": (tree["b"][0][:, None] * x, None),
        },
    )


@pytest.mark.parametrize(
    "result", [None, (), {}, {"a": None, "b": [()]}, 2.5, 7, True, (1, 2.0, None)]
)
def test_a_function_may_return_numbers_or_nothing(result):
    out = mapped(lambda x: result, normal(N))
    assert jax.tree.structure(out) == jax.tree.structure(result)
    for actual, value in zip(jax.tree.leaves(out), jax.tree.leaves(result), strict=True):
        assert actual.shape == (N,)
        assert actual.dtype == jnp.asarray(value).dtype
        np.testing.assert_array_equal(actual, [value] * N)


def test_a_map_without_arguments_runs_once_per_participant():
    scale = jnp.asarray(normal(2))
    np.testing.assert_array_equal(mapped(lambda: scale * 2), np.stack([scale * 2] * N))
    assert mapped(lambda: None) is None


def test_numpy_results_are_arrays():
    constant = normal(3)
    np.testing.assert_array_equal(mapped(lambda x: constant, normal(N)), np.stack([constant] * N))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint32", "bool", "complex64"])
def test_dtypes_are_kept_and_agree_with_eval_shape(dtype):
    x = (normal(N, 2) * 3).astype(jnp.dtype(dtype))
    fn = lambda x: (x, x[0], x == x, jnp.sum(x), x.astype(jnp.complex64))
    program = fedpax.program(clients=N)(lambda x: federated_map(fn, x))
    out, described = program(x), jax.eval_shape(program, x)
    expected = jax.eval_shape(jax.vmap(fn), x)
    for result, aval, plain in zip(*map(jax.tree.leaves, (out, described, expected)), strict=True):
        assert result.dtype == aval.dtype == plain.dtype
        assert result.shape == aval.shape == plain.shape
        assert result.weak_type == aval.weak_type == plain.weak_type
    np.testing.assert_array_equal(out[0], x)


def test_each_participant_has_a_random_key_of_its_own():
    keys = jax.random.split(jax.random.key(7), N)
    draws, after = mapped(
        lambda key: (jax.random.normal(key, (3,)), jax.random.fold_in(key, 1)), keys
    )
    assert_close(draws, jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys))
    assert jnp.issubdtype(after.dtype, jax.dtypes.prng_key)
    assert len(np.unique(np.asarray(draws))) == 3 * N


def test_arrays_without_elements_are_mapped():
    out = mapped(lambda x: (x * 2, x.sum()), normal(N, 0, 2))
    assert out[0].shape == (N, 0, 2)
    np.testing.assert_array_equal(out[1], np.zeros(N))


def test_weak_types_promote_inside_as_outside():
    half = normal(N, 2).astype(jnp.bfloat16)
    program = fedpax.program(clients=N)(lambda rate, x: federated_map(lambda x: rate * x + 1.0, x))
    assert program(0.5, half).dtype == jnp.bfloat16
    placed = fedpax.program(clients=N)(
        lambda rate, x: federated_map(lambda r, x: r * x, fedpax.federated_broadcast(rate), x)
    )
    assert placed(0.5, half).dtype == jnp.bfloat16


# ---- values that fn closes over


def test_closing_over_server_values_of_every_kind():
    x, outside, constant = normal(N, 2), jnp.asarray(normal(2, seed=1)), normal(2, seed=2)

    @fedpax.program(clients=N)
    def program(w, key, x):
        inside = w * 2

        def fn(x):
            return x * w + inside * outside - constant + jax.random.normal(key, (2,)) * 3

        return federated_map(fn, x)

    w, key = normal(2, seed=3), jax.random.key(1)
    noise = jax.random.normal(key, (2,)) * 3
    expected = x * w + w * 2 * np.asarray(outside) - constant + noise
    assert_close(program(w, key, x), expected)
    assert_close(jax.jit(program)(w, key, x), expected)


def test_closing_over_tracers_of_transformations_outside_of_the_program():
    w, x = normal(2), normal(N, 2)

    def loss(w):
        @fedpax.program(clients=N)
        def program(x):  # w is not an argument
            return federated_sum(federated_map(lambda x: jnp.sum(jnp.sin(w * x)), x))

        return program(x)

    plain = lambda w: jnp.sum(jnp.sin(w * x))
    gradient, rows = jax.jit(jax.grad(plain))(w), np.stack([w, 2 * w])
    assert_close(jax.grad(loss)(w), gradient)
    assert_close(jax.jit(jax.grad(loss))(w), gradient)
    assert_close(jax.vmap(loss)(rows), jax.jit(jax.vmap(plain))(rows))
    assert_close(jax.jvp(loss, (w,), (w,)), jax.jit(lambda w: jax.jvp(plain, (w,), (w,)))(w))
    assert_close(jax.jit(jax.hessian(loss))(w), jax.jit(jax.hessian(plain))(w), 1e-4)


def test_a_closed_over_placed_value_is_broadcast_whole():
    x = normal(N, 2)
    program = fedpax.program(clients=N)(lambda x: federated_map(lambda mine: mine - x.mean(0), x))
    with pytest.warns(PlacedClosureWarning):
        assert_close(program(x), x - x.mean(0))


def test_a_closed_over_array_is_an_argument_of_the_jaxpr():
    table = jnp.asarray(normal(512, 256))
    program = fedpax.program(clients=2)(
        lambda i: federated_mean(federated_map(lambda i: table[i] * 2, i))
    )
    rows = np.array([3, 500])
    (outer,) = jax.make_jaxpr(program)(rows).eqns
    inner = outer.params["jaxpr"].eqns[-2].params["jaxpr"]
    assert inner.in_avals[0].shape == table.shape
    assert not inner.consts
    assert_close(program(rows), np.asarray(table)[rows].mean(0) * 2)
    assert_close(jax.jit(program)(rows), np.asarray(table)[rows].mean(0) * 2)


# ---- custom derivatives inside fn


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["vjp", "jvp"])
def test_custom_derivatives_are_used(kind, current_mesh):
    factor = jnp.asarray(normal(2, seed=5))  # the derivative rule closes over it

    if kind == "vjp":
        fn = jax.custom_vjp(lambda x: jnp.sum(jnp.sin(x)))
        fn.defvjp(lambda x: (fn(x), x), lambda x, c: (c * jnp.cos(x) * factor,))
    else:
        fn = jax.custom_jvp(lambda x: jnp.sum(jnp.sin(x)))
        fn.defjvp(lambda x, t: (fn(*x), jnp.sum(jnp.cos(x[0]) * factor * t[0])))
    x = normal(8, 2)
    program = fedpax.program(clients=8)(lambda x: federated_mean(federated_map(fn, x)))
    assert_close(program(x), np.sin(x).sum(1).mean())
    assert_close(jax.jit(jax.grad(program))(x), np.cos(x) * factor / 8)


# ---- chunk sizes


def work(key, x, w):
    """Compute with a loop, a conditional, random numbers, a matmul and integers."""
    noise = jax.random.uniform(key, (2,))
    h = jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(w @ h + noise), x)
    h = jax.lax.cond(x[0] > 0, lambda h: h * 2, jnp.sin, h)
    return {"h": h, "large": jnp.argmax(h), "score": jnp.sum(h**2)}


@functools.cache
def work_and_gradient(chunk_size):
    """Run `work` with a chunk size; return its results and the gradient of a score."""
    n = 8
    keys, x, w = jax.random.split(jax.random.key(2), n), normal(n, 2), normal(2, 2, seed=1)

    @fedpax.program(clients=n, chunk_size=chunk_size)
    def program(x, w):
        return federated_map(lambda key, x: work(key, x, w), keys, x)

    def score(x, w):
        out = program(x, w)
        return jnp.sum(out["score"] ** 2), out

    return jax.jit(jax.grad(score, argnums=(0, 1), has_aux=True))(x, w)


@pytest.mark.parametrize(
    "chunk_size", [1, 3, *(pytest.param(c, marks=pytest.mark.slow) for c in (4, 8, 9)), "auto"]
)
def test_results_do_not_depend_on_the_chunk_size(chunk_size):
    assert_close(work_and_gradient(chunk_size), work_and_gradient(None))


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 2, "auto"])
def test_the_chunk_size_counts_participants_per_device(chunk_size, current_mesh):
    n = 12  # three a device
    x, w = place(normal(n, 2), "clients", "fsdp"), normal(2, 2, seed=1)
    program = fedpax.program(clients=n)(
        lambda x, w: federated_mean(
            federated_map(lambda x: jnp.tanh(w @ x), x, chunk_size=chunk_size)
        )
    )
    assert_close(program(x, w), np.tanh(np.asarray(x) @ w.T).mean(0))


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_stacked_results_take_no_temporary_memory(chunk_size):
    def temporary_bytes(n):
        program = fedpax.program(clients=n, chunk_size=chunk_size)(
            lambda w, x: federated_map(lambda x: jnp.tanh(w @ x), x)
        )
        compiled = jax.jit(program).lower(normal(8, 8), normal(n, 8, 8)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(1024) <= 1.05 * temporary_bytes(64)


@pytest.mark.parametrize("chunk_size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_a_result_that_the_caller_reshapes(chunk_size):
    """XLA must not write the last rows into the argument's buffer before it has read them."""
    x = normal(5, 4)
    program = fedpax.program(clients=5, chunk_size=chunk_size)(
        lambda x: federated_map(lambda row: jnp.roll(row, 1) * row, x)
    )
    np.testing.assert_array_equal(jax.jit(lambda x: program(x)[None])(x)[0], np.roll(x, 1, 1) * x)


def test_random_keys_in_chunks_with_a_remainder():
    keys = jax.random.split(jax.random.key(0), 5)
    program = fedpax.program(clients=5, chunk_size=2)(
        lambda keys: federated_map(lambda key: jax.random.split(key, 3), keys)
    )
    expected = jax.vmap(lambda key: jax.random.split(key, 3))(keys)
    assert (program(keys) == expected).all()


@pytest.mark.each_value
@pytest.mark.parametrize("chunk_size", [1, 2])
def test_chunks_keep_the_sharding_of_a_model(chunk_size, current_mesh):
    n = 12  # three a device
    x, w = place(normal(n, 4), "clients"), place(normal(4, 2, seed=1), None, "fsdp")
    program = fedpax.program(clients=n, chunk_size=chunk_size)(
        lambda w, x: federated_map(lambda x: x[:, None] * w, x)
    )
    result = jax.jit(program)(w, x)
    if current_mesh:
        assert result.sharding.spec == jax.sharding.PartitionSpec("clients", None, "fsdp")
    assert_close(result, np.asarray(x)[:, :, None] * np.asarray(w))


def test_a_map_overrides_the_chunk_size_of_its_program():
    @fedpax.program(clients=N, chunk_size=2)
    def program(x):
        return federated_map(jnp.sin, x), federated_map(jnp.sin, x, chunk_size=3)

    numbers = [
        eqn.params["chunk_size"]
        for eqn in jax.make_jaxpr(program)(normal(N)).eqns[0].params["jaxpr"].eqns
    ]
    assert numbers == [2, 3]


def test_a_chunk_size_of_one_keeps_conditionals():
    fn = lambda x: jax.lax.cond(x > 0, lambda x: jnp.sin(x), lambda x: x * 2, x)
    program = lambda chunk_size: fedpax.program(clients=N, chunk_size=chunk_size)(
        lambda x: federated_map(fn, x)
    )
    text = lambda chunk_size: jax.jit(program(chunk_size)).lower(normal(N)).as_text()
    assert "stablehlo.case" in text(1)
    assert "stablehlo.case" not in text(None)


# ---- effects


@pytest.mark.each_value
@pytest.mark.parametrize("factor", [2, None], ids=["doubled", "returned"])
@pytest.mark.parametrize("chunk_size", [None, 1])
def test_debug_print_runs_once_per_participant(chunk_size, factor, capfd, current_mesh):
    types = current_mesh and dict(
        zip(current_mesh.axis_names, current_mesh.axis_types, strict=True)
    )
    if types and types.get("fsdp") == jax.sharding.AxisType.Explicit:
        pytest.skip("JAX lowers no print where one axis is manual and another explicit")
    n = 8
    x = normal(n)

    def fn(x):
        jax.debug.print("participant {x:.6f}", x=x)
        return x if factor is None else x * factor

    program = fedpax.program(clients=n, chunk_size=chunk_size)(
        lambda x: federated_sum(federated_map(fn, x))
    )
    assert_close(program(x), x.sum() * (factor or 1))
    jax.effects_barrier()
    lines = [line for line in capfd.readouterr().out.splitlines() if "participant" in line]
    assert sorted(lines) == sorted(f"participant {value:.6f}" for value in x)


def test_a_function_with_debug_print_can_be_differentiated(capfd):
    def fn(x):
        jax.debug.print("x {x:.6f}", x=x)
        return jnp.sin(x)

    x = normal(N)
    program = fedpax.program(clients=N)(lambda x: federated_sum(federated_map(fn, x)))
    assert_close(jax.jit(jax.grad(program))(x), np.cos(x))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("x ") == N


def test_a_host_callback_in_the_mapped_function():
    fn = lambda x: jax.pure_callback(
        lambda x: np.cumsum(x, -1),
        jax.ShapeDtypeStruct((3,), "float32"),
        x,
        vmap_method="expand_dims",
    )
    x = normal(N, 3)
    for chunk_size in (None, 1):
        assert_close(mapped(fn, x, chunk_size=chunk_size), np.cumsum(x, 1))


def test_participants_compute_the_weights():
    x, n = normal(N, 4), positive(N)
    program = fedpax.program(clients=N)(
        lambda x, n: federated_mean(*federated_map(lambda x, n: (x.sum(), n**2), x, n))
    )
    assert_close(program(x, n), np.average(x.sum(1), weights=n**2))


@pytest.mark.parametrize("axis", ["clients", "batch"])
def test_a_collective_between_participants_names_its_remedy(axis: str) -> None:
    @fedpax.program(clients=2)
    def centered(x):
        return fedpax.federated_map(lambda x: x - jax.lax.pmean(x, axis), x)

    with pytest.raises(ValueError, match=rf"axis name: {axis}\..*federated_mean behind the map"):
        centered(jnp.ones(2))
