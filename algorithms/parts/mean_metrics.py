"""The mean of the participants' metrics, beside an aggregator that may leave participants out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import Metrics
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_mean, federated_sum

NON_FINITE_PARTICIPANTS = "non_finite_participants"


class _Terms(NamedTuple):
    """A participant's terms of the sums over participants."""

    totals: Metrics  # weight times value of each metric; 0 where the value is not finite
    weights: Metrics  # the weight of each metric; 0 where the value is not finite
    # whether the participant takes part and a value of it is not finite.
    is_left_out: Bool[Array, ""]


def mean_metrics(metrics: Metrics, weights: Weights, aggregator: Aggregator) -> Metrics:
    """Average the participants' metrics by weight. Inside a program."""
    # One participant with a NaN makes the plain mean of the updates NaN, and so the model: the
    # metrics are averaged like the updates, so that the loss is NaN too. A robust aggregator keeps
    # the model finite. Each metric is then the mean over the participants whose value is finite,
    # and a further metric, `"non_finite_participants"`, is the number of present participants with
    # a value that is not.
    if not aggregator.tolerates_non_finite:
        return federated_mean(metrics, weights)
    if NON_FINITE_PARTICIPANTS in metrics:
        raise ArgumentError(
            f"loss_fn returned a metric called {NON_FINITE_PARTICIPANTS!r}, the name under which "
            "a round reports participants whose metrics are not finite. Rename it."
        )

    def terms(values: Metrics, weight: Num[Array, ""] | None) -> _Terms:
        wide = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
        weight = jnp.asarray(1 if weight is None else weight, jnp.float32)
        finite = {name: jnp.isfinite(value) for name, value in wide.items()}
        finite_weights = {
            name: jnp.where(is_finite, weight, 0) for name, is_finite in finite.items()
        }
        totals = {
            name: finite_weights[name] * jnp.where(finite[name], wide[name], 0) for name in wide
        }
        all_finite = jnp.all(jnp.array(list(finite.values())))
        return _Terms(totals, finite_weights, (weight != 0) & ~all_finite)

    sums = federated_sum(federated_map(terms, metrics, weights))
    count = sums.is_left_out

    def divide(total: Float[Array, ""], weight: Float[Array, ""]) -> Float[Array, ""]:
        nothing = jnp.where(count > 0, jnp.nan, 0.0)
        return jnp.where(weight == 0, nothing, total / jnp.where(weight == 0, 1, weight))

    means = jax.tree.map(divide, sums.totals, sums.weights)
    return means | {NON_FINITE_PARTICIPANTS: count}
