"""Chains of aggregator transformations."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import Aggregator, chain, mean


def scale(factor: float):
    def transform(inner: Aggregator) -> Aggregator:
        def aggregate(state, updates, weights):
            updates = fedpax.federated_map(lambda u: u * factor, updates)
            aggregated, state, metrics = inner.aggregate(state, updates, weights)
            return aggregated + 1, state, metrics | {f"scaled_{factor}": jnp.float32(factor)}

        return Aggregator(inner.init, aggregate)

    return transform


def test_the_first_stage_is_the_outermost_transformation():
    updates = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    aggregator = chain(scale(2.0), scale(3.0), mean())

    @fedpax.program(clients=4)
    def aggregate(updates):
        aggregated, _, metrics = aggregator.aggregate(aggregator.init(None), updates, None)
        return aggregated, metrics

    aggregated, metrics = aggregate(updates)
    np.testing.assert_allclose(aggregated, 6 * updates.mean(0) + 2, rtol=1e-5)
    assert metrics.keys() == {"scaled_2.0", "scaled_3.0"}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ((), r"last stage is missing, .* Add mean\(\) at the end"),
        ((scale(2.0),), r"last stage is a function, .* Add mean\(\) at the end"),
        ((mean(), scale(2.0)), "stage 0 is an Aggregator, .* Put the aggregator last"),
        ((1.0, mean()), "stage 0 is a float, expected a transformation"),
    ],
)
def test_a_chain_without_its_aggregator_at_the_end_is_refused(stages, words):
    with pytest.raises(TypeError, match=words):
        chain(*stages)
