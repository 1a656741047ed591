"""Aggregates do not depend on how many participants a device runs at once, and have derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import (
    adaptive_clip,
    add_local_noise,
    add_noise,
    bulyan,
    chain,
    clip_by_norm,
    coordinate_median,
    geometric_median,
    krum,
    mean,
    private_mean,
    private_secure_mean,
    quantized_mean,
    secure_mean,
    trimmed_mean,
)

N = 8
STREAMED = {
    "clip_by_norm": chain(clip_by_norm(1.0), mean()),
    "adaptive_clip": chain(adaptive_clip(initial_norm=1.0), mean()),
    "noise": chain(add_noise(0.1, seed=0), add_local_noise(0.1, seed=0), mean()),
    "private_mean": private_mean(
        max_norm=1.0, noise_multiplier=0.5, seed=0, quantile=0.5, count_stddev=1.0
    ),
}
STORED = {
    "coordinate_median": coordinate_median(),
    "trimmed_mean": trimmed_mean(0.25),
    "krum": krum(2),
    "multi_krum": krum(1, num_selected=3),
    "bulyan": bulyan(1),
    "geometric_median": geometric_median(num_iterations=3),
    "secure_mean": secure_mean(max_value=2.0, num_neighbors=2),
    "private_secure_mean": private_secure_mean(
        max_norm=1.0, noise_multiplier=0.5, seed=0, min_participants=4, num_neighbors=2
    ),
    "quantized_mean": quantized_mean(4),
}
PARAMS = {"sin": np.zeros(5, np.float32), "sum": np.zeros((), np.float32)}


def average(aggregators, **options):
    @fedpax.program(clients=N, **options)
    def average(w, x, weights):
        updates = fedpax.federated_map(lambda x: {"sin": jnp.sin(w * x), "sum": (w * x).sum()}, x)
        return {
            name: aggregator.aggregate(aggregator.init(PARAMS), updates, weights)[::2]
            for name, aggregator in aggregators.items()
        }

    return average


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    return np.float32(2.0), np.float32(rng.standard_normal((N, 5))), np.float32([1, 2, 0, 1] * 2)


@pytest.mark.parametrize(
    ("chunk_size", "names"),
    [
        (1, ("clip_by_norm", "private_mean")),
        pytest.param(1, STREAMED | STORED, marks=pytest.mark.slow),
        pytest.param(2, STREAMED | STORED, marks=pytest.mark.slow),
    ],
)
def test_the_chunk_size_does_not_matter(chunk_size, names):
    aggregators = {name: (STREAMED | STORED)[name] for name in names}
    expected = jax.jit(average(aggregators))(*inputs())
    aggregate = jax.jit(average(aggregators, chunk_size=chunk_size))(*inputs())
    for name, values in expected.items():
        for f, e in zip(jax.tree.leaves(aggregate[name]), jax.tree.leaves(values), strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [*STREAMED, "secure_mean", "private_secure_mean"])
def test_memory_is_flat_in_the_number_of_participants(name):
    program = average({name: (STREAMED | STORED)[name]}, chunk_size=1)
    updates = f"[{N},5]"
    assert updates not in fedpax.explain(program, *inputs())
    stored = average({"coordinate_median": STORED["coordinate_median"]}, chunk_size=1)
    assert updates in fedpax.explain(stored, *inputs())


@pytest.mark.parametrize("name", ["clip_by_norm", "private_mean", "coordinate_median"])
def test_derivatives_are_those_of_finite_differences(name):
    program = average({name: (STREAMED | STORED)[name]})
    w, x, weights = inputs()

    @jax.jit
    @jax.value_and_grad
    def norm(w):
        return jnp.sum(program(w, x, weights)[name][0]["sin"] ** 2)

    step = 1e-2
    expected = (norm(w + step)[0] - norm(w - step)[0]) / (2 * step)
    assert norm(w)[1] == pytest.approx(float(expected), rel=0.02, abs=1e-3)
