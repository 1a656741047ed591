"""`federated_broadcast`: values, types and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, positive

import fedpax

N = 3


@fedpax.program(clients=N)
def broadcast(x):
    return fedpax.federated_broadcast(x)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "uint32", "bool", "complex64"]
)
def test_every_participant_has_the_value_and_its_dtype(dtype):
    x = jnp.asarray(normal(2, 3) * 5).astype(dtype)
    if dtype == "complex64":
        x = x + 1j * normal(2, 3, seed=1)
    out = broadcast(x)
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(out, np.broadcast_to(x, (N, 2, 3)))
    described = jax.eval_shape(broadcast, x)
    assert (described.shape, described.dtype, described.weak_type) == (
        out.shape,
        out.dtype,
        out.weak_type,
    )


def test_leaves_of_a_tree_keep_their_places():
    tree = {
        "w": [normal(2), None, jnp.float32(3.5)],
        "step": 7,
        "rate": 0.25,
        "flag": True,
        "none": None,
        "empty": (),
    }
    out = broadcast(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert_close(out["w"][0], np.stack([tree["w"][0]] * N))
    for value, like in ((out["w"][2], 3.5), (out["step"], 7), (out["rate"], 0.25)):
        np.testing.assert_array_equal(value, [like] * N)
    assert out["step"].dtype == jnp.int32
    assert out["rate"].dtype == jnp.float32
    assert out["flag"].dtype == jnp.bool_


@pytest.mark.parametrize("tree", [None, (), {}, {"a": [None, ()]}])
def test_an_empty_tree_stays_as_it_is(tree):
    assert broadcast(tree) == tree


def test_an_empty_array_gets_the_axis():
    assert broadcast(normal(0, 2)).shape == (N, 0, 2)


@pytest.mark.parametrize("value", [1.5, 2])
def test_python_numbers_promote_as_in_jax_numpy(value):
    half = jnp.asarray(normal(N)).astype(jnp.bfloat16)
    out = fedpax.program(clients=N)(lambda number, x: fedpax.federated_broadcast(number) * x)(
        value, half
    )
    expected = jax.jit(lambda number, x: jnp.broadcast_to(number, (N,)) * x)(value, half)
    assert out.dtype == expected.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_random_keys_are_broadcast(make_key):
    key = make_key(5)
    keys = broadcast(key)
    assert keys.dtype == key.dtype
    assert keys.shape == (N, *key.shape)
    expected = jax.random.normal(key, (4,))
    for i in range(N):
        np.testing.assert_array_equal(jax.random.normal(keys[i], (4,)), expected)


def test_derivatives_are_those_of_the_copy():
    w = normal(2)
    jacobian = np.broadcast_to(np.eye(2), (N, 2, 2))
    assert_close(jax.jacfwd(broadcast)(w), jacobian)
    assert_close(jax.jacrev(broadcast)(w), jacobian)
    cotangent = normal(N, 2, seed=1)
    _, pullback = jax.vjp(broadcast, w)
    assert_close(pullback(cotangent), (cotangent.sum(0),))
    assert_close(jax.jvp(broadcast, (w,), (w**2,))[1], np.stack([w**2] * N))


def test_a_complex_value_has_the_derivative_of_the_copy():
    w = normal(2) + 1j * normal(2, seed=1)
    cotangent = (normal(N, 2, seed=2) + 1j * normal(N, 2, seed=3)).astype(np.complex64)
    plain = jax.vjp(lambda w: jnp.broadcast_to(w, (N, 2)), w)[1](cotangent)
    assert_close(jax.vjp(broadcast, w)[1](cotangent), plain)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_vmap_moves_the_batch_behind_the_participants(axis):
    x = normal(2, 3, 4)
    assert_close(
        jax.vmap(broadcast, in_axes=axis)(x),
        jax.vmap(lambda v: jnp.broadcast_to(v, (N, *v.shape)), in_axes=axis)(x),
    )
    assert_close(jax.vmap(broadcast, in_axes=axis, out_axes=1)(x)[0], np.moveaxis(x, axis, 0))


def test_a_bfloat16_gradient_adds_up_in_float32():
    n = 1024
    weights = positive(n)
    program = fedpax.program(clients=n)(fedpax.federated_broadcast)
    _, pullback = jax.vjp(program, jnp.bfloat16(1.5))
    rounded = jnp.asarray(weights).astype(jnp.bfloat16)
    (result,) = pullback(rounded)
    assert result.dtype == jnp.bfloat16
    exact = np.asarray(rounded, np.float64).sum()
    np.testing.assert_allclose(float(result), exact, rtol=2**-8)
