"""Weights of 0, which mark absent participants."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators.aggregator import Weights
from fedpax.errors import ArgumentTypeError
from fedpax.primitives import federated_broadcast, federated_map, federated_sum
from fedpax.primitives.mean import count_participants
from fedpax.primitives.placement import resolve_placement


def num_participants() -> int:
    """Return the number of participants whose updates are aggregated. Inside a program."""
    return resolve_placement("aggregate", None).placement.size


def count_all() -> Float[Array, ""]:
    """Return the number of participants as an array; in `fedpax.stages`, of those that answer."""
    return count_participants(resolve_placement("aggregate", None).placement)


def mean_dtype(leaf: jax.Array) -> jnp.dtype:
    """Return the dtype of a leaf's mean, as in `federated_mean`: float32 for integers."""
    return leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.inexact) else jnp.dtype(jnp.float32)


def present(weights: Weights) -> Bool[Array, " participants"]:
    """Return which participants have a weight other than 0. Inside a program."""
    if weights is None:
        return federated_broadcast(True)
    return jnp.asarray(weights) != 0


def select(
    taken: Bool[Array, ""], update: chex.ArrayTree, dtype: jax.typing.DTypeLike | None = None
) -> chex.ArrayTree:
    """Return an update, or zeros where it is not taken, even for NaN and infinity."""
    return jax.tree.map(
        lambda u: jnp.where(taken, u, jnp.zeros_like(u)).astype(dtype or u.dtype), update
    )


# Checks and weights of updates that are encoded before they are averaged.
def check_floats(function: str, updates: chex.ArrayTree) -> None:
    """Check that updates are arrays of floats."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ArgumentTypeError(
                f"{function}(): updates{jax.tree_util.keystr(path)} has dtype "
                f"{jnp.result_type(leaf)}, expected floats. Use fedpax.aggregators.mean() for "
                "other dtypes."
            )


def normalized_weights(weights: Num[Array, " participants"]) -> Float[Array, " participants"]:
    """Scale weights to a mean of 1. Inside a program."""
    # All are 0 where the weights sum to 0, and NaN where their sum overflows.
    total, n = federated_sum(weights.astype(jnp.float32)), weights.shape[0]
    scale = jnp.where(total == 0, 0.0, n / jnp.where(total == 0, 1.0, total))
    scale = jnp.where(jnp.isinf(total), jnp.nan, scale)
    return federated_map(lambda w: w.astype(jnp.float32) * scale, weights)
