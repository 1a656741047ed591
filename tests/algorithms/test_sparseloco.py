"""SparseLoCo: what its default codec sends; its settings. The method table has its equations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from method_problem import loss_fn

from fedpax import Cohort
from fedpax.algorithms import sparseloco


@pytest.mark.slow
def test_the_default_sends_64_of_4096_entries_in_four_values():
    def follow(w, batch):
        return jnp.sum(w * batch[0]), {}  # the outer gradient is the batch

    algorithm = sparseloco(follow, islands=1, inner_optimizer=optax.sgd(1.0))
    update = np.random.default_rng(0).normal(size=(1, 1, 1, 2 * 4096)).astype(np.float32)
    state, _ = jax.jit(algorithm.round)(algorithm.init(jnp.zeros(2 * 4096)), Cohort(update))
    moved = -np.asarray(state.params)
    assert np.count_nonzero(moved) == 2 * 64
    assert len(np.unique(moved[moved != 0])) <= 2 * 4
    np.testing.assert_allclose(
        moved + state.aggregator_state.residual[0], update[0, 0, 0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 0.0}, "decay"),
        ({"outer_learning_rate": -1.0}, "outer_learning_rate is -1.0, .* Pass 1.0, the default"),
    ],
)
def test_settings_out_of_range_raise(settings, words):
    with pytest.raises(ValueError, match=words):
        sparseloco(loss_fn, islands=2, inner_optimizer=optax.sgd(0.1), **settings)
