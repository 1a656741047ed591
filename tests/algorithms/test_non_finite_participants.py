"""A participant whose numbers are not finite, beside an aggregator that leaves it out."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_any_aggregator import CLIENTS, METHODS, POPULATION, N, loss_fn

from fedpax import Cohort
from fedpax.aggregators import Aggregator, coordinate_median, geometric_median, krum
from fedpax.algorithm import FederatedAlgorithm
from fedpax.algorithms import decoupled_diloco, diloco, eager_diloco, easgd, mime, streaming_diloco

ADAM = optax.adam(0.05)
ISLANDS: dict[str, Any] = {"islands": N, "inner_optimizer": ADAM}
# The methods whose participants have states of an optimizer, with one that has such states.
WITH_STATE = {
    "diloco": lambda **a: diloco(loss_fn, **ISLANDS, **a),
    "eager_diloco": lambda **a: eager_diloco(loss_fn, **ISLANDS, **a),
    "streaming_diloco": lambda **a: streaming_diloco(
        loss_fn, fragments=lambda path, leaf: leaf.ndim - 1, delay=1, **ISLANDS, **a
    ),
    "decoupled_diloco": lambda **a: decoupled_diloco(
        loss_fn, fragments=lambda path, leaf: leaf.ndim - 1, **ISLANDS, **a
    ),
    "easgd": lambda **a: easgd(loss_fn, islands=N, optimizer=ADAM, **a),
    "mime": lambda **a: mime(loss_fn, **(CLIENTS | {"client_optimizer": ADAM}), **a),
}
# In these, the others' votes or numbers depend on whether a participant is absent.
NOT_AS_ABSENT = ("feddyn", "streaming_diloco", "decoupled_diloco", "self-tuning", "hypcluster")
FAST = ("diloco", "scaffold II")


def random_cohort(seed: int) -> Cohort:
    rng = np.random.default_rng(seed)
    batches = {
        "x": rng.normal(size=(N, 4, 3, 5)).astype(np.float32),
        "y": rng.normal(size=(N, 4, 3, 2)).astype(np.float32),
    }
    return Cohort(batches, rng.integers(1, 9, N), np.full(N, 4), rng.permutation(POPULATION)[:N])


def initial_params(name: str) -> Any:
    rng = np.random.default_rng(7)
    params = {"kernel": rng.normal(size=(5, 2)), "bias": rng.normal(size=2)}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    return jax.tree.map(lambda p: jnp.stack([p, -p]), params) if name == "hypcluster" else params


def train(algorithm: FederatedAlgorithm, params: Any, cohorts: list[Cohort]) -> tuple[Any, Any]:
    train_round, state = jax.jit(algorithm.round), algorithm.init(params)
    metrics = {}
    for cohort in cohorts:
        state, metrics = train_round(state, cohort)
    return state, metrics


@pytest.mark.parametrize(
    "name",
    [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in METHODS | WITH_STATE],
)
@pytest.mark.parametrize(
    "aggregator",
    [
        geometric_median(num_iterations=4),
        pytest.param(coordinate_median(), marks=pytest.mark.slow),
        pytest.param(krum(2), marks=pytest.mark.slow),
    ],
    ids=["geometric_median", "coordinate_median", "krum"],
)
def test_the_whole_state_stays_finite_and_is_that_without_the_participant(
    name: str, aggregator: Aggregator, request: pytest.FixtureRequest
) -> None:
    algorithm = (METHODS | WITH_STATE)[name](aggregator=aggregator)
    cohorts = [random_cohort(seed) for seed in range(3)]
    if name in ("streaming_diloco", "eager_diloco", "decoupled_diloco"):
        cohorts = [c._replace(num_steps=None, num_examples=None) for c in cohorts]
    k, broken = 2, jax.tree.map(np.copy, cohorts[0].batches)
    broken["x"][k, 1, 0, 0] = np.nan  # in the second step
    params = initial_params(name)
    state, metrics = train(algorithm, params, [cohorts[0]._replace(batches=broken), *cohorts[1:]])
    chex.assert_tree_all_finite(state)
    chex.assert_tree_all_finite(metrics)
    # The coordinate-wise median counts NaN as the largest number, and Krum counts participants.
    if (
        name in NOT_AS_ABSENT
        or cohorts[0].num_steps is None
        or "geometric" not in request.node.name
    ):
        return
    absent = np.array(cohorts[0].num_steps)
    absent[k] = 0
    expected, _ = train(algorithm, params, [cohorts[0]._replace(num_steps=absent), *cohorts[1:]])
    chex.assert_trees_all_close(state, expected, rtol=1e-4, atol=1e-5)


def test_the_mean_tells_a_loss_that_is_not_finite():
    algorithm = METHODS["scaffold II"]()
    cohort = random_cohort(0)
    cohort.batches["x"][2] = np.nan
    state, metrics = train(algorithm, initial_params("scaffold II"), [cohort])
    assert jnp.isnan(metrics["loss"]) and jnp.isnan(state.control["kernel"]).all()
