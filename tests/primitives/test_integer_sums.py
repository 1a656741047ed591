"""Sums of integers: exact, or an error outside of jax.jit, where a sum can be checked."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import fedpax

N = 3
total = fedpax.program(clients=N)(fedpax.federated_sum)
LOW, HIGH = -(2**31), 2**31 - 1


@settings(max_examples=6)
@given(st.lists(st.integers(LOW, HIGH) | st.sampled_from([LOW, HIGH]), min_size=N, max_size=N))
def test_a_sum_is_exact_or_raises(values):
    x = np.array(values, np.int32)
    if LOW <= sum(values) <= HIGH:
        assert total(x).item() == sum(values)
        return
    with pytest.raises(ValueError, match=r"the sum of x is .*, expected at most 2147483647"):
        total(x)
    wrapped = (sum(values) - LOW) % 2**32 + LOW
    assert jax.jit(total)(x).item() == jnp.sum(x).item() == wrapped


def test_sums_of_mapped_values_and_of_a_pytree_are_checked():
    @fedpax.program(clients=N, chunk_size=1)
    def double(x):
        return fedpax.federated_sum({"n": fedpax.federated_map(lambda v: 2 * v, x), "x": x * 0.5})

    assert double(jnp.full((N, 2), 10**8))["n"].tolist() == [6 * 10**8] * 2
    with pytest.raises(ValueError, match=r"the sum of x\['n'\] is -3e\+09.*astype\(jnp\.float32\)"):
        double(jnp.full((N, 2), -5 * 10**8))


def test_small_integers_are_summed_in_int32_and_unsigned_ones_modulo_2_to_the_32():
    assert total(np.full((N, 2), 127, np.int8)).tolist() == [381, 381]
    assert total(np.full(N, 2**31, np.uint32)).item() == 3 * 2**31 % 2**32
    with jax.enable_x64(True):
        assert total(np.full(N, 2**40)).item() == 3 * 2**40
        with pytest.raises(ValueError, match=r"expected at most 9223372036854775807"):
            total(np.full(N, 2**62))


@pytest.mark.each_value
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("sign", ["int", "uint"])
def test_integers_of_2_and_4_bits_are_reduced_as_int8(sign, bits):
    """`jnp.sum` raises for them, and `jnp.mean` of int2 is an int2."""
    dtype = getattr(jnp, f"{sign}{bits}")
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    x = np.random.default_rng(bits).integers(low, high + 1, (N, 50))
    weights = jnp.array([1.0, 2.0, 5.0])

    @fedpax.program(clients=N)
    def reduce(x):
        mean = fedpax.federated_mean
        return fedpax.federated_sum(x), mean(x), mean(x, weights=weights)

    for run in (reduce, jax.jit(reduce)):
        added, mean, weighted = run(jnp.asarray(x, dtype))
        assert added.dtype == f"{sign}32" and np.array_equal(added, x.sum(axis=0))
        np.testing.assert_allclose(mean, x.mean(axis=0), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(weighted, weights @ x / 8, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int2", "uint4", "float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_weights_of_any_dtype_are_added_in_float32(dtype):
    weights = jnp.asarray([1, 0, 1], dtype)
    x = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
    average = fedpax.program(clients=N)(lambda x, w: fedpax.federated_mean(x, weights=w))
    for run in (average, jax.jit(average)):
        np.testing.assert_allclose(run(x, weights), (x[0] + x[2]) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: jax.jit(fedpax.federated_sum)(x),
        lambda x: jax.lax.scan(lambda c, _: (fedpax.federated_sum(x), c), 0, length=1)[0],
        lambda x: jax.lax.cond(x[0] > 0, fedpax.federated_sum, lambda x: x[0], x),
    ],
)
def test_a_function_that_a_program_traces_wraps_around_as_under_jit(run):
    assert fedpax.program(clients=N)(run)(jnp.full(N, 2 * 10**9)).item() == 1705032704


def test_a_jitted_program_has_no_further_sum():
    text = str(jax.make_jaxpr(total)(jnp.arange(N)))
    assert text.count("federated_sum[") == 1
