"""The grouped matmul of all platforms equals a loop over rows in NumPy."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpax.ops.grouped_matmul import grouped_matmul

ROWS, GROUPS = 200, 3  # blocks of 64 rows


@pytest.fixture(
    params=[pytest.param("tpu", marks=pytest.mark.slow), "default"],
    scope="module",
)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Choose the implementation for TPU, lowered for the CPU, or for other platforms."""
    if request.param == "default":  # what a CPU compiles
        yield request.param
        return

    def choose(*arguments: Any, **ways: Callable[..., Any]) -> Any:
        return ways[request.param](*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "platform_dependent", choose)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


@pytest.fixture(scope="module")
def compiled(implementation: str) -> Callable[..., Any]:
    """Compile the matmul and, for a cotangent, the gradients of rows and kernels."""

    def both(rows: Any, kernels: Any, sizes: Any, cotangent: Any) -> Any:
        out, back = jax.vjp(lambda *args: grouped_matmul(*args, sizes), rows, kernels)
        return out, *back(cotangent)

    return jax.jit(both)


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_loop(rows: Any, kernels: Any, sizes: Any, cotangent: Any) -> Any:
    out, d_rows, d_kernels = np.zeros_like(cotangent), np.zeros_like(rows), np.zeros_like(kernels)
    first = 0
    for group, size in enumerate(sizes):
        for r in range(first, first + size):
            out[r] = rows[r] @ kernels[group]
            d_rows[r] = kernels[group] @ cotangent[r]
            d_kernels[group] += np.outer(rows[r], cotangent[r])
        first += size
    return out, d_rows, d_kernels


close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


@given(st.lists(st.integers(0, ROWS), min_size=GROUPS, max_size=GROUPS), st.booleans())
def test_equals_a_loop_over_rows(
    compiled: Callable[..., Any], edges: list[int], filled: bool
) -> None:
    sizes = np.diff([0, *sorted(edges)[:-1], ROWS if filled else max(edges)]).astype(np.int32)
    rows, kernels = draw(ROWS, 5), draw(GROUPS, 5, 4, seed=1)
    cotangent = draw(ROWS, 4, seed=2)
    expected = by_loop(rows, kernels, sizes, cotangent)
    # Rows after the last group may hold NaN and must not affect other rows.
    used = sizes.sum()
    rows[used:], cotangent[used:] = np.nan, np.nan
    out, d_rows, d_kernels = jax.device_get(compiled(rows, kernels, sizes, cotangent))
    close(out[:used], expected[0][:used])
    close(d_rows[:used], expected[1][:used])
    close(d_kernels, expected[2])


@pytest.mark.parametrize("axes", [(0, None, 0), (None, 2, None)])
def test_vmap(compiled: Callable[..., Any], axes: tuple[int | None, ...]) -> None:
    """Each element of a batch equals the same arguments without vmap."""
    sizes = np.array([[90, 0, 70], [10, 100, 90]], np.int32)
    whole = draw(2, ROWS, 5), draw(2, GROUPS, 5, 4, seed=1), sizes
    arguments = [
        whole[i][0] if axis is None else np.moveaxis(whole[i], 0, axis)
        for i, axis in enumerate(axes)
    ]
    cotangent = draw(2, ROWS, 4, seed=2)
    result = jax.jit(jax.vmap(compiled, (*axes, 0)))(*arguments, cotangent)
    for i in range(2):
        leaf = [
            a if axis is None else np.moveaxis(a, axis, 0)[i]
            for a, axis in zip(arguments, axes, strict=True)
        ]
        used = leaf[2].sum()
        for mine, alone in zip(result, compiled(*leaf, cotangent[i]), strict=True):
            close(mine[i][:used], alone[:used])


@pytest.mark.slow
def test_vmap_of_vmap(compiled: Callable[..., Any]) -> None:
    """Clients of islands: kernels by island, rows by client, sizes by both."""
    rows, kernels = draw(3, ROWS, 5), draw(2, GROUPS, 5, 4, seed=1)
    sizes = np.random.default_rng(3).integers(0, ROWS // GROUPS, (2, 3, GROUPS), np.int32)
    cotangent = draw(ROWS, 4, seed=2)
    inner = jax.vmap(compiled, (0, None, 0, None))
    result = jax.jit(jax.vmap(inner, (None, 0, 0, None)))(rows, kernels, sizes, cotangent)
    for island, client in np.ndindex(2, 3):
        used = sizes[island, client].sum()
        one = by_loop(rows[client], kernels[island], sizes[island, client], cotangent)
        for mine, alone in zip(result, one, strict=True):
            close(mine[island, client][:used], alone[:used])


def test_bfloat16_is_summed_in_float32(compiled: Callable[..., Any]) -> None:
    """In bfloat16 the small terms would be lost, within a block of 64 rows and between two."""
    small = 2.0**-14
    rows = jnp.full((128, 1), small, jnp.bfloat16).at[0].set(1).at[64].set(-1)
    others = jnp.ones((1, 1, 1), jnp.bfloat16), jnp.array([128], jnp.int32), jnp.ones_like(rows)
    _, _, gradient = compiled(rows, *others)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient[0, 0, 0]) == float(jnp.bfloat16(126 * small))


def test_the_gradient_has_a_forward_mode_derivative(implementation: str) -> None:
    """A Hessian times a vector, against finite differences of the gradient."""
    rows, kernels, direction = draw(20, 4), draw(2, 4, 3, seed=1), draw(2, 4, 3, seed=2)
    sizes = np.array([5, 12], np.int32)
    used = np.arange(20) < 17

    def loss(kernels: Any) -> Any:
        out = grouped_matmul(jnp.asarray(rows, kernels.dtype), kernels, jnp.asarray(sizes))
        return jnp.sum(jnp.where(used[:, None], jnp.sin(out), 0))

    with jax.enable_x64(True):
        slope = jax.jit(jax.grad(loss))
        exact = jax.jit(lambda k, d: jax.jvp(jax.grad(loss), (k,), (d,))[1])
        kernels, direction = np.float64(kernels), np.float64(direction)
        step = 1e-5 * direction
        expected = (slope(kernels + step) - slope(kernels - step)) / 2e-5
        np.testing.assert_allclose(exact(kernels, direction), expected, rtol=1e-5, atol=1e-7)
