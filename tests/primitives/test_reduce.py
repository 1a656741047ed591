"""`federated_sum`, `mean`, `max`, `min` against NumPy, for every kind of dtype and weight."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from federated_cases import assert_close, normal, positive
from hypothesis import given, settings
from reductions import REDUCTIONS, N, weighted_mean, weighted_reference

import fedpax


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([3e38, 3e38, 0, 0, 0], None),  # the sum is infinite
        ([1e-39, 2e-39, 0, 0, 0], None),  # processors read them as 0
        ([0, 0, 0, 0, 0], 0.0),
        ([3e37, 3e37, 3e37, 0, 0], 2.0),
        ([1e-37, 1e-37, 1e-37, 0, 0], 2.0),
        ([1e-39, 1, 0, 1e-45, 0], 2.0),
    ],
)
def test_weights_whose_sum_is_out_of_range_raise(weights, expected):
    x, w = np.arange(1, N + 1, dtype=np.float32), jnp.float32(weights)
    known = jax.jit(fedpax.program(clients=N)(lambda x: fedpax.federated_mean(x, w)))
    for mean in (lambda: weighted_mean(x, w), lambda: known(x)):
        if expected is None:
            with pytest.raises(ValueError, match="Divide the weights by their largest one"):
                mean()
        else:
            assert mean() == expected
    if weights[0] > 1:
        assert np.isnan(jax.jit(weighted_mean)(x, w)) == (expected is None)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.1, 9.0), min_size=N, max_size=N),
    st.integers(-37, 37),
    st.integers(-25, 25),
    st.booleans(),
)
def test_a_mean_is_right_or_its_products_are_told(weights, of_weights, of_values, mapped):
    w = np.float32(np.array(weights) * 10.0**of_weights)
    x = np.float32(normal(N, 3) * 10.0**of_values)

    @fedpax.program(clients=N, chunk_size=1)
    def mean(x, w):
        value = fedpax.federated_map(jnp.negative, x) if mapped else -x
        return fedpax.federated_mean({"value": value}, weights=w)["value"]

    expected = -weighted_reference(x, w)
    products = np.abs(w[:, None] * np.float64(x))
    in_range = products.min() > 1e-36 and max(products.sum(), w.sum(dtype=float)) < 1e38
    try:
        result = mean(x, w)
    except ValueError as error:
        words = r"mean of x\['value'\] is .* out of the range of float32|weights has (the|a) sum"
        assert re.search(words + ".*Divide the weights by their largest", str(error))
        assert not in_range
        return
    np.testing.assert_allclose(result, expected, atol=2e-6 * np.abs(expected).max())


def test_products_in_range_return_and_run_effects_once():
    printed = []

    @fedpax.program(clients=2)
    def mean(x, w):
        jax.debug.callback(lambda: printed.append(1))
        return fedpax.federated_mean(x, weights=w)

    weights = np.float32([1e30, 3e30])
    assert mean(np.float32([1.0, 5.0]), weights).item() == 4.0
    jax.effects_barrier()
    assert printed == [1]


def draw(dtype, *shape):
    values = normal(*shape) * 20
    if dtype == "complex64":
        return values + 1j * normal(*shape, seed=1)
    return (np.abs(values) if dtype.startswith("u") else values).astype(jnp.dtype(dtype))


def wide(x):
    """Convert to a NumPy dtype whose sums are exact enough for a reference."""
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


@pytest.mark.each_value
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "int8", "int32", "uint8", "uint32", "bool", "complex64"],
)
def test_values_equal_numpy_and_dtypes_equal_jax_numpy(name, dtype):
    federated, plain = REDUCTIONS[name]
    if dtype == "complex64" and name in ("max", "min"):
        pytest.skip("complex numbers have no order")
    tree = {"matrix": draw(dtype, N, 2, 3), "scalar": draw(dtype, N), "none": None}
    program = fedpax.program(clients=N)(federated)
    out = program(tree)
    types = jax.eval_shape(lambda tree: jax.tree.map(lambda x: plain(x, axis=0), tree), tree)
    described = jax.eval_shape(program, tree)
    for x, result, plainly, aval in zip(
        *map(jax.tree.leaves, (tree, out, types, described)), strict=True
    ):
        assert result.dtype == plainly.dtype == aval.dtype
        assert result.shape == plainly.shape == aval.shape
        assert result.weak_type == aval.weak_type
        exact = jnp.issubdtype(result.dtype, jnp.integer) or result.dtype == bool
        tolerance = 0 if exact else 2 * float(jnp.finfo(result.dtype).eps)
        expected = getattr(np, name)(wide(x), axis=0)
        np.testing.assert_allclose(wide(result), expected, rtol=tolerance, atol=20 * tolerance)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_cpu_combines_participants_one_by_one(name):
    """XLA's reduction of the leading axis is slow on CPUs alone, so others keep it."""
    program = fedpax.program(clients=N)(REDUCTIONS[name][0])
    traced = jax.jit(program).trace(jax.ShapeDtypeStruct((N, 64, 64), np.float32))

    def operations(platform):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return {op for op in ("while", "reduce") if f"stablehlo.{op}" in text}

    assert operations("cpu") == {"while"}
    assert operations("tpu") == operations("cuda") == {"reduce"}
    mesh = jax.make_mesh((N,), ("clients",), devices=jax.devices()[:N])
    with jax.set_mesh(mesh):  # a loop would gather the participants
        compiled = jax.jit(program).lower(jnp.ones((N, 64, 64))).compile().as_text()
    assert "all-reduce" in compiled and "all-gather" not in compiled


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("tree", [None, (), {"a": [None, {}]}])
def test_an_empty_tree_stays_as_it_is(name, tree):
    assert fedpax.program(clients=N)(REDUCTIONS[name][0])(tree) == tree


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_participant_is_its_own_total(name):
    x = normal(1, 3)
    assert_close(fedpax.program(clients=1)(REDUCTIONS[name][0])(x), x[0])


def test_integers_wrap_around_under_jit_as_in_jax_numpy():
    x = jnp.array([2**31 - 1, 5, 7, 2, 1], jnp.int32)
    total = fedpax.program(clients=N)(fedpax.federated_sum)
    assert jax.jit(total)(x).item() == jnp.sum(x).item() < 0
    with pytest.raises(ValueError, match="the sum of x is"):
        total(x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_adds_up_in_float32(dtype):
    n = 4096
    x = positive(n).astype(dtype)
    exact = np.asarray(x, np.float64).sum()
    # A running sum in half precision stops growing. Check that the data show it.
    running = x.dtype.type(0)
    for value in x:
        running = x.dtype.type(running + value)
    assert abs(float(running) - exact) > 0.005 * exact
    rounding = float(ml_dtypes.finfo(dtype).eps)
    program = fedpax.program(clients=n)
    weights = positive(n, seed=1)
    total = program(fedpax.federated_sum)(x)
    np.testing.assert_allclose(float(total), exact, rtol=rounding)
    np.testing.assert_allclose(float(program(fedpax.federated_mean)(x)), exact / n, rtol=rounding)
    np.testing.assert_allclose(
        float(program(fedpax.federated_mean)(x, weights)),
        weighted_reference(x, weights),
        rtol=rounding,
    )


def test_a_float16_mean_does_not_overflow_on_the_way():
    x = np.full(N, 60000, np.float16) - np.arange(N, dtype=np.float16) * 64
    out = weighted_mean(x)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(float(out), x.astype(np.float64).mean(), rtol=1e-3)
    np.testing.assert_allclose(
        float(weighted_mean(x, np.full(N, 1000.0, np.float32))),
        x.astype(np.float64).mean(),
        rtol=1e-3,
    )


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bfloat16", "float16"])
def test_weights_of_any_real_dtype(dtype):
    x, w = normal(N, 2, 2), (positive(N) * 5 + 1).astype(jnp.dtype(dtype))
    out = weighted_mean(x, w)
    assert out.dtype == jnp.float32
    assert_close(out, weighted_reference(x, w))


def test_boolean_weights_select_participants():
    x, w = normal(N, 3), np.array([True, False, True, True, False])
    assert_close(weighted_mean(x, w), x[w].mean(0))


@pytest.mark.parametrize("dtype", ["int32", "bool", "bfloat16", "float16", "complex64"])
def test_weighted_means_have_the_dtype_of_the_plain_mean(dtype):
    x, w = draw(dtype, N, 3), positive(N)
    out = weighted_mean(x, w)
    assert out.dtype == jnp.mean(x, axis=0).dtype
    expected = np.tensordot(w.astype(np.float64), np.asarray(x, np.complex128), 1) / w.sum()
    tolerance = 4 * float(jnp.finfo(out.dtype).eps)
    np.testing.assert_allclose(
        np.asarray(out, np.complex128), expected, rtol=tolerance, atol=tolerance
    )


def test_negative_weights_are_used_as_given():
    x, w = normal(N, 2), np.array([1.0, -0.5, 2.0, -0.25, 0.75], np.float32)
    assert_close(weighted_mean(x, w), weighted_reference(x, w))


@pytest.mark.parametrize(
    "w", [np.zeros(N, np.int32), np.array([1.5, -1.5, 2.0, -2.0, 0.0], np.float32)]
)
def test_weights_that_sum_to_zero_give_zero_and_zero_derivatives(w):
    x = normal(N, 2)
    np.testing.assert_array_equal(weighted_mean(x, w), np.zeros(2))
    loss = lambda x, w: jnp.sum(weighted_mean(x, w.astype(jnp.float32)) ** 2 + weighted_mean(x, w))
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w.astype(np.float32))
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0], np.zeros_like(x))


def test_a_weight_of_zero_excludes_a_participant():
    x, w = normal(N, 2), positive(N)
    w[2] = 0
    rest = np.arange(N) != 2
    assert_close(weighted_mean(x, w), weighted_reference(x[rest], w[rest]))


def test_the_value_of_a_participant_of_weight_zero_is_not_read():
    x, w = normal(N, 2), positive(N)
    x[2], w[2] = (np.nan, np.inf), 0
    rest = np.arange(N) != 2
    assert_close(weighted_mean(x, w), weighted_reference(x[rest], w[rest]))
    plain = lambda x, w: jnp.tensordot(w, x, 1) / jnp.sum(w)
    expected = jax.jit(jax.jacrev(plain, argnums=(0, 1)))(x[rest], w[rest])
    for derivative in (jax.jacfwd, jax.jacrev):
        by_value, by_weight = jax.device_get(derivative(weighted_mean, argnums=(0, 1))(x, w))
        assert_close((by_value[:, rest], by_weight[:, rest]), expected)
        assert np.all(by_value[:, 2] == 0) and np.all(by_weight[:, 2] == 0)


@pytest.mark.parametrize(
    ("reduction", "participants"),
    [
        pytest.param("mean", 130, marks=pytest.mark.slow),
        ("mean", 16_384),
        ("weighted mean", 130),
        ("weighted mean", 16_384),
        pytest.param("sum", 130, marks=pytest.mark.slow),
        ("sum", 16_384),
    ],
)
def test_rounding_does_not_grow_with_the_participants(participants, reduction):
    x = np.full((participants, 3), 0.1, np.float32)
    x += np.float32(0.01) * normal(participants, 3)
    if reduction == "sum":
        result = fedpax.program(clients=participants)(fedpax.federated_sum)(x) / participants
    else:
        weights = positive(participants) if reduction == "weighted mean" else None
        result = fedpax.program(clients=participants)(fedpax.federated_mean)(x, weights)
        x = x * participants * weights[:, None] / weights.sum() if weights is not None else x
    np.testing.assert_allclose(result, np.float64(x).mean(0), rtol=4e-6)


def test_a_nan_weight_gives_nan():
    w = positive(N)
    w[3] = np.nan
    assert np.isnan(weighted_mean(normal(N, 2), w)).all()


def test_one_set_of_weights_for_leaves_of_every_rank():
    tree = {"scalar": normal(N), "cube": normal(N, 2, 1, 3), "empty": normal(N, 0)}
    w = positive(N)
    assert_close(weighted_mean(tree, w), jax.tree.map(lambda x: weighted_reference(x, w), tree))


def test_infinities_and_nan_are_reduced_as_in_jax_numpy():
    x = np.array([[1.0, np.inf], [np.nan, 2.0], [3.0, -1.0], [0.0, 4.0], [5.0, 6.0]], np.float32)
    for federated, plain in REDUCTIONS.values():
        np.testing.assert_array_equal(fedpax.program(clients=N)(federated)(x), plain(x, axis=0))


def test_a_traced_sum_of_weights_above_the_range_gives_nan() -> None:
    @jax.jit
    @fedpax.program(clients=2)
    def mean(x, weights):
        return fedpax.federated_mean(x, weights=weights)

    x = normal(2, 3)
    assert np.isnan(mean(x, np.float32([3e38, 3e38]))).all()  # and not x / infinity, 0
    assert_close(mean(x, np.float32([1e30, 2e30])), (x[0] + 2 * x[1]) / 3)
