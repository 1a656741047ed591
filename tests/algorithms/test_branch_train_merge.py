"""Branch-Train-Merge: nothing but metrics is sent; merges, soups and the ensemble."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from method_problem import random_params
from method_table import trainer

from fedpax.algorithms import cached_prior, ensemble_log_likelihood, greedy_soup, merge
from fedpax.hlo.collectives import collectives

# On one worker, where each method is compiled once for all of these tests.
pytestmark = pytest.mark.xdist_group("algorithms")

EXPERTS, TEXTS, TOKENS = 3, 4, 6


def random_log_likelihoods(seed=0):
    return np.log(np.random.default_rng(seed).uniform(0.01, 1, size=(EXPERTS, TEXTS, TOKENS)))


@pytest.mark.slow
def test_training_sends_metrics_alone():
    compiled = trainer("Branch-Train-Merge", "4x2 automatic")
    communication = [
        c for c in collectives(compiled.round.as_text(), compiled.mesh) if "islands" in c.axes
    ]
    assert {c.kind for c in communication} == {"all-reduce"}
    assert {shape for c in communication for shape in c.shapes} == {"f32[]"}


@pytest.mark.parametrize("prior", [None, [0.5, 0.2, 0.3]])
def test_the_ensemble_follows_bayes_rule(prior):
    """Against products of probabilities, token by token."""
    likelihoods = np.exp(random_log_likelihoods())
    start = np.full(EXPERTS, 1 / EXPERTS) if prior is None else np.array(prior)
    mixed, posterior = jax.jit(ensemble_log_likelihood)(
        random_log_likelihoods(), None if prior is None else np.log(start)
    )
    mixed, posterior = np.asarray(mixed), np.asarray(posterior)
    for text in range(TEXTS):
        belief = start
        for t in range(TOKENS):
            belief = belief / belief.sum()
            np.testing.assert_allclose(np.exp(posterior[:, text, t]), belief, rtol=1e-5)
            wanted = np.sum(belief * likelihoods[:, text, t])
            np.testing.assert_allclose(np.exp(mixed[text, t]), wanted, rtol=1e-5)
            belief = belief * likelihoods[:, text, t]


def test_the_cached_prior_weighs_posteriors_of_texts():
    likelihoods = np.exp(random_log_likelihoods()).prod(axis=-1)
    posterior = likelihoods / likelihoods.sum(0)
    weights = 0.3 ** np.arange(1, TEXTS + 1)
    result = jax.jit(cached_prior)(random_log_likelihoods())
    np.testing.assert_allclose(np.exp(result), posterior @ weights / weights.sum(), rtol=1e-5)


def test_merges_and_soups():
    models = {k: np.stack([random_params(s)[k] for s in range(4)]) for k in random_params()}
    weights = np.array([0.1, 2.0, 0.0, 0.7])
    merged = merge(models, weights)
    for name, leaf in models.items():
        wanted = np.average(leaf, axis=0, weights=weights)
        np.testing.assert_allclose(merged[name], wanted, rtol=1e-5, atol=1e-6)

    target = np.mean(models["kernel"][[0, 2]], axis=0)  # the best soup has the models 0 and 2
    soup, used = greedy_soup(models, lambda m: -float(np.square(m["kernel"] - target).sum()))
    assert sorted(used) == [0, 2]
    np.testing.assert_allclose(soup["out"], np.mean(models["out"][[0, 2]], axis=0), rtol=1e-5)
    small = merge(jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), models))
    assert {leaf.dtype for leaf in small.values()} == {jnp.dtype(jnp.bfloat16)}


def test_invalid_input_raises():
    with pytest.raises(ValueError, match=r"weights has shape \[2\], expected \[3\]"):
        merge(jnp.ones((3, 2)), [1.0, 2.0])
    with pytest.raises(ValueError, match="one entry for each expert"):
        ensemble_log_likelihood(jnp.zeros((3, 2)), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"Pass 0\.3"):
        cached_prior(jnp.zeros((3, 2, 2)), decay=0.0)
