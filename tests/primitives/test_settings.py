"""JAX's settings: checkers of mistakes find none, and double precision stays double."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from federated_cases import assert_close, normal, positive

import fedpax
from fedpax import federated_map, federated_max, federated_mean, federated_min, federated_sum

N = 4
weighted_mean = fedpax.program(clients=N)(federated_mean)


@fedpax.program(clients=N)
def fit(w, x):
    """One step of gradient descent for each participant, averaged."""
    gradient = lambda w, x: jax.grad(lambda w: jnp.sum(jnp.sin(w * x)))(w)
    return federated_mean(federated_map(lambda x: w - gradient(w, x) / 2, x))


def fit_plainly(w, x):
    return w - jnp.mean(x * jnp.cos(w * x), axis=0) / 2


def loss(w, x, n):
    return jnp.sum(fit(w, x) ** 2) + jnp.sum(weighted_mean(x, n))


def loss_plainly(w, x, n):
    return jnp.sum(fit_plainly(w, x) ** 2) + jnp.sum(n @ x) / jnp.sum(n)


SETTINGS = {
    "checking_leaks": lambda: jax.checking_leaks(),
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": lambda: jax.disable_jit(),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", [pytest.param("checking_leaks", marks=pytest.mark.slow), *list(SETTINGS)[1:]]
)
def test_jax_checkers_report_no_mistake(setting):
    w, x, n = jnp.asarray(normal(N, 2)), normal(N, 2), positive(N)
    expected = jax.jit(jax.value_and_grad(loss_plainly))(w[0], x, n)
    with SETTINGS[setting]():
        result = jax.value_and_grad(loss)(w[0], x, n)
        value = fit(w[0], x)
        batched = jax.vmap(fit, (0, None))(w, x)
    assert_close(result, expected)
    assert_close(value, fit_plainly(w[0], x))
    assert_close(batched, jax.vmap(fit_plainly, (0, None))(w, x))


def test_no_implicit_transfers_between_host_and_device():
    w, x = jnp.asarray(normal(2)), jnp.asarray(normal(N, 2))
    chunked = fedpax.program(clients=N, chunk_size=3)(
        lambda w, x: federated_mean(federated_map(lambda x: w - x, x))
    )
    with jax.transfer_guard("disallow"):
        result = jax.jit(chunked)(w, x)
    assert_close(result, np.asarray(w) - np.asarray(x).mean(0))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.complex64])
def test_strict_dtypes_in_weighted_means(dtype):
    x, n = (normal(N, 2) * 5).astype(dtype), np.arange(1, N + 1, dtype=np.int32)
    expected = np.average(np.asarray(x, np.complex128), axis=0, weights=n)
    with jax.numpy_dtype_promotion("strict"):
        result = jax.jit(fedpax.program(clients=N)(federated_mean))(x, n)
    np.testing.assert_allclose(np.asarray(result, np.complex128), expected, rtol=0.02)


def test_debug_nans_reports_a_nan_of_a_participant():
    program = fedpax.program(clients=N)(lambda x: federated_sum(federated_map(jnp.log, x)))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        program(-positive(N))


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        w, x = np.float64(normal(2)), np.float64(normal(N, 2))
        out = fit(w, x)
        assert out.dtype == jnp.float64
        assert_close(out, fit_plainly(w, x), 1e-12)
        n = np.float64(positive(N)) + 1e-9  # between the numbers of float32
        assert_close(weighted_mean(x, n), np.average(x, axis=0, weights=n), 1e-12)
        gradient = jax.grad(lambda w, x: jnp.sum(fit(w, x) ** 2))
        plain = jax.grad(lambda w, x: jnp.sum(fit_plainly(w, x) ** 2))
        assert_close(gradient(w, x), plain(w, x), 1e-12)


@pytest.mark.parametrize(
    "dtype",
    [
        *("int8", "int64", "bool", "float64"),
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int32", "float32")),
    ],
)
def test_double_precision_means_have_the_dtype_of_jax_numpy(dtype):
    with jax.enable_x64(True):
        x = (normal(N, 2) * 50).astype(dtype)
        program = fedpax.program(clients=N)
        for arguments in ((x,), (x, np.arange(1, N + 1))):
            result = program(federated_mean)(*arguments)
            assert result.dtype == jnp.mean(x, axis=0).dtype
            weights = arguments[1] if arguments[1:] else None
            np.testing.assert_allclose(result, np.average(x, 0, weights), rtol=1e-5)
        assert program(federated_sum)(x).dtype == jnp.sum(x, axis=0).dtype


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [None, 3, 1])
@pytest.mark.parametrize("name", ["max", "min"])
def test_double_precision_derivatives_of_extrema(name, chunk_size):
    federated, plain = {"max": (federated_max, jnp.max), "min": (federated_min, jnp.min)}[name]
    with jax.enable_x64(True):
        w, x = np.float64(normal(2)), np.float64(normal(N, 2))
        x[2] = x[1]  # a tie
        program = fedpax.program(clients=N, chunk_size=chunk_size)(
            lambda w, x: federated(federated_map(lambda x: jnp.sin(w * x), x))
        )
        plainly = lambda w, x: plain(jnp.sin(w * x), axis=0)
        gradient = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(f(*a) ** 2), argnums=(0, 1)))(w, x)
        assert_close(gradient(program), gradient(plainly), 1e-12)
