"""Distances of all pairs of updates: by blocks of coordinates, without a copy of the updates."""

import jax
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import all_updates

N = 8


def distances(updates):
    """Return the squared distances of all pairs."""
    return fedpax.program(clients=N)(lambda u: all_updates.squared_distances(u))(updates)


@pytest.mark.parametrize("width", [1, 5, 7, 20, 21, 1000])
def test_blocks_of_coordinates_give_the_distances(width, monkeypatch):
    monkeypatch.setattr(all_updates, "_BLOCK_SIZE", width * N)
    rng = np.random.default_rng(width)
    updates = [np.float32(rng.normal(size=(N, *shape))) for shape in ((3, 7), (), (13,))]
    flat = np.concatenate([np.float64(x).reshape(N, -1) for x in updates], axis=1)
    expected = np.square(flat[:, None] - flat[None, :]).sum(-1)
    np.testing.assert_allclose(distances(updates), expected, rtol=1e-5, atol=1e-4)


def test_an_update_with_nan_is_infinitely_far(monkeypatch):
    monkeypatch.setattr(all_updates, "_BLOCK_SIZE", 5 * N)
    updates = np.float32(np.random.default_rng(0).normal(size=(N, 33)))
    updates[3, 30] = np.nan
    result = np.asarray(distances(updates))
    assert np.all(np.isinf(result[3])) and np.all(np.isinf(result[:, 3]))
    assert np.all(np.isfinite(np.delete(np.delete(result, 3, 0), 3, 1)))


def test_integers_are_multiplied_as_floats():
    """XLA cannot compile a matmul of integers whose result is float32 for a GPU."""
    text = jax.jit(distances).lower(np.ones((N, 33), np.int32)).as_text()
    matmuls = [line for line in text.splitlines() if "dot_general" in line]
    assert matmuls and not any("xi32" in line for line in matmuls)


def test_a_cpu_multiplies_blocks():
    """A matmul of a CPU copies its operands, which may be mapped files."""
    updates = jax.ShapeDtypeStruct((N, 1_000_000), np.float32)
    text = jax.jit(distances).lower(updates).compile().as_text()
    assert f"f32[{N},{all_updates._BLOCK_SIZE // N}]" in text
