"""Chains of aggregator transformations."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedpax
from fedpax.aggregators import (
    Aggregator,
    adaptive_clip,
    chain,
    clip_by_norm,
    mean,
    private_mean,
    secure_mean,
)


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


def metrics_of(*stages):
    """Return the metrics of a chain for updates of norms 3 and 6."""

    @fedpax.program(clients=2)
    def aggregate(updates):
        aggregator = chain(*stages)
        return aggregator.aggregate(aggregator.init(None), updates, None)[2]

    return aggregate(np.float32([[0, 3], [0, 6]]))


def test_stages_with_metrics_of_one_name_keep_them_all():
    metrics = metrics_of(
        clip_by_norm(4.0), adaptive_clip(initial_norm=2.0), clip_by_norm(9.0), mean()
    )
    assert [metrics[f"participant_norm{n}"] for n in ("", "_2", "_3")] == [4.5, 3.5, 2.0]
    assert [metrics[f"clipped_fraction{n}"] for n in ("", "_2", "_3")] == [0.5, 1.0, 0.0]
    assert metrics["max_norm"] == 2.0 and len(metrics) == 10
    private = private_mean(max_norm=1.0, noise_multiplier=0.0, seed=0)
    metrics = metrics_of(adaptive_clip(initial_norm=2.0), private)
    assert (metrics["max_norm"], metrics["max_norm_2"]) == (2.0, 1.0)


def test_the_clipped_updates_and_the_clipped_entries_are_two_metrics():
    metrics = metrics_of(clip_by_norm(4.0), secure_mean(max_value=3.5))
    assert (metrics["clipped_fraction"], metrics["clipped_entry_fraction"]) == (0.5, 0.25)


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
