"""Streams: states of one aggregator have random numbers of their own."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import (
    add_local_noise,
    add_noise,
    chain,
    codecs,
    compressed_mean,
    mean,
    private_mean,
    private_secure_mean,
    random_stream,
)
from fedpax.aggregators.random_numbers import PURPOSES, round_key

N, SIZE = 2, 1_000
AGGREGATORS = {
    "add_noise": chain(add_noise(1.0, seed=0), mean()),
    "add_local_noise": chain(add_local_noise(1.0, seed=0), mean()),
    "private_mean": private_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    "private_secure_mean": private_secure_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    "compressed_mean": compressed_mean(codecs.uniform(2)),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "private_secure_mean" else name
        for name in AGGREGATORS
    ],
)
def test_streams_differ_and_stream_0_is_no_stream(name):
    aggregator = AGGREGATORS[name]
    x = 0.1 * np.float32(np.random.default_rng(0).standard_normal((N, SIZE)))
    x = x if name == "compressed_mean" else np.zeros_like(x)

    @jax.jit
    @fedpax.program(clients=N)
    def average(x):
        def run(context):
            with context:
                return aggregator.aggregate(aggregator.init(None), x, None)[0]

        streams = (contextlib.nullcontext(), random_stream(0), random_stream(1))
        return jnp.stack([run(stream) for stream in streams])

    none, *streams = np.float64(average(x))
    np.testing.assert_array_equal(streams[0], none)
    errors = np.array(streams) - x.mean(0)
    correlations = np.corrcoef(errors)[np.triu_indices(2, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(SIZE)


def key_in(*indices, purpose="masks", round_number=3):
    with contextlib.ExitStack() as stack:
        for index in indices:
            stack.enter_context(random_stream(index))
        key = round_key(7, purpose, jnp.int32(round_number))
    return jax.random.key_data(key)


def test_every_combination_of_nested_streams_has_keys_of_its_own():
    old = jax.random.fold_in(jax.random.key(7, impl="threefry2x32"), PURPOSES.index("masks"))
    old = jax.random.key_data(jax.random.fold_in(old, 3))
    pairs = list(itertools.product(range(3), repeat=2))

    @jax.jit
    def draw():
        same = [key_in(), key_in(0), key_in(0, 0)], [key_in(2), key_in(2, 0)]
        others = [key_in(1, purpose="quantile"), key_in(1, round_number=4)]
        return same, [key_in(*pair) for pair in pairs] + others

    (none, two), keys = draw()
    assert all(np.array_equal(key, old) for key in none)
    np.testing.assert_array_equal(*two)
    assert len({tuple(key.tolist()) for key in keys}) == len(pairs) + 2


def test_a_jitted_function_is_traced_for_each_stream():
    key = jax.jit(lambda: jax.random.key_data(round_key(0, "masks", jnp.int32(0))))
    none = key()
    with random_stream(1):
        other = key()
    assert np.any(none != other)
    np.testing.assert_array_equal(key(), none)


@pytest.mark.parametrize(("index", "error"), [(-1, ValueError), (1.0, TypeError)])
def test_a_bad_index_is_refused(index, error):
    with (
        pytest.raises(error, match=rf"random_stream\(\): index is {index}, .* Pass the number"),
        random_stream(index),
    ):
        pass
