"""The outer model of a syncer."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax.aggregators import (
    add_noise,
    chain,
    mean,
    private_mean,
    private_secure_mean,
    secure_mean,
)
from fedpax.algorithms.parts.decoupled_parts import decoupled_diloco_parts
from fedpax.errors import ConfigurationError
from fedpax.islands.syncer.outer_model import OuterModel


def make_parts(aggregator):
    """Make the parts of a method of two fragments of one shape."""
    return decoupled_diloco_parts(
        lambda params, batch: (jnp.sum(params["a"]), {}),
        islands=2,
        inner_optimizer=optax.sgd(0.1),
        steps_per_sync=1,
        outer_optimizer=optax.sgd(1.0),
        fragments=lambda path, leaf: ["a", "b"].index(path),
        aggregator=aggregator,
    )


PARAMS = {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    "aggregator",
    [
        secure_mean(max_value=1.0),
        private_secure_mean(max_norm=1.0, noise_multiplier=1.0, seed=0),
    ],
    ids=["secure_mean", "private_secure_mean"],
)
def test_terms_that_must_be_masked_are_refused(aggregator):
    with pytest.raises(ConfigurationError, match="the syncer of Decoupled DiLoCo sees each"):
        OuterModel(make_parts(aggregator), PARAMS)


def test_a_private_mean_adds_the_noise_that_its_epsilon_counts():
    """In each fragment, whatever an island sends: its part in a merge is clipped."""
    noise, max_norm = 2.0, 0.5
    outer = OuterModel(
        make_parts(private_mean(max_norm=max_norm, noise_multiplier=noise, seed=0)), PARAMS
    )
    for p in range(2):
        state = outer.fragments[p]
        gradient = {k: None if x is None else x + 1e6 for k, x in state.params.items()}
        new, metrics = outer.merge(p, [(0, gradient, 1.0), (1, gradient, 1.0)])
        assert metrics["noise_stddev"] == pytest.approx(noise * max_norm / 2)
        assert "epsilon" not in metrics  # an island is not part of each merge
        (moved,) = (np.asarray(x) for x in new.params.values() if x is not None)
        assert np.all(np.abs(moved) < max_norm + 6 * metrics["noise_stddev"])
        assert np.all(moved != 0)


def test_fragments_of_one_shape_have_noise_of_their_own():
    outer = OuterModel(make_parts(chain(add_noise(1.0, seed=0), mean())), PARAMS)
    merged = []
    for p in range(2):
        state = outer.fragments[p]
        (name,) = (k for k, leaf in state.params.items() if leaf is not None)
        gradient = {k: None if k != name else np.zeros(3, np.float32) for k in "ab"}
        new, _ = outer.merge(p, [(0, gradient, 1.0), (1, gradient, 1.0)])
        merged.append(np.asarray(new.params[name]))
    assert np.all(merged[0] != 0) and not np.any(np.isclose(*merged))
