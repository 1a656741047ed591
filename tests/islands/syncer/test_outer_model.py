"""The outer model of a syncer."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedpax.aggregators import (
    add_local_noise,
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


def merge_of_zeros(outer, p=0):
    gradient = {k: None if x is None else np.zeros(3) for k, x in outer.fragments[p].params.items()}
    state, _ = outer.merge(p, [(0, gradient, 1.0), (1, gradient, 1.0)])
    (moved,) = (np.asarray(x) for x in state.params.values() if x is not None)
    return moved


@pytest.mark.parametrize(
    ("aggregator", "stddev"),
    [
        (private_mean(max_norm=0.5, noise_multiplier=2.0, seed=0), 0.5),
        (chain(add_noise(1.5, seed=0), mean()), 1.5),
        (chain(add_local_noise(3.0, seed=0), mean()), 3.0 / np.sqrt(2)),
    ],
    ids=["private_mean", "add_noise", "add_local_noise"],
)
def test_the_seed_that_islands_know_does_not_give_the_noise(aggregator, stddev):
    """Two syncers of one seed draw other noise, of the same size, and so does each merge."""
    syncers = [OuterModel(make_parts(aggregator), PARAMS) for _ in range(2)]
    drawn = np.stack([merge_of_zeros(outer) for outer in syncers for _ in range(60)])
    assert len(np.unique(drawn)) == drawn.size
    assert np.std(drawn) == pytest.approx(stddev, rel=0.25)  # 360 numbers: 6 standard errors
