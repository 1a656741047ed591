"""States of participants that stay finite beside an aggregator that leaves participants out."""

from typing import TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Num

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import Params
from fedpax.algorithms.parts.inner_steps import InnerReport, InnerSteps
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.clients.cohort import NumSteps
from fedpax.primitives import federated_map

Tree = TypeVar("Tree", bound=chex.ArrayTree)


def keep_finite(aggregator: Aggregator, before: Tree, after: Tree) -> Tree:
    """Return what a participant keeps; `before` if it is non-finite beside a robust aggregator."""
    if not aggregator.tolerates_non_finite:
        return after
    turned = [
        jnp.any(jnp.isfinite(old) & ~jnp.isfinite(new))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        if jnp.issubdtype(new.dtype, jnp.inexact)
    ]
    return select(jnp.any(jnp.array(turned)), before, after) if turned else after


def finite_steps(inner_steps: InnerSteps, aggregator: Aggregator) -> InnerSteps:
    """Return inner steps after which an island keeps its model and state as in `keep_finite`."""
    if not aggregator.tolerates_non_finite:
        return inner_steps

    def steps(
        params: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
    ) -> tuple[Params, optax.OptState, InnerReport]:
        *after, report = inner_steps(params, inner_state, batches, num_steps)
        params, inner_state = keep_finite(aggregator, (params, inner_state), tuple(after))
        return params, inner_state, report

    return steps


def weights_of_finite(aggregator: Aggregator, values: chex.ArrayTree, weights: Weights) -> Weights:
    """Return the weights of a mean beside an aggregator, 0 for values that it leaves out."""
    return finite_weights(values, weights) if aggregator.tolerates_non_finite else weights


def finite_weights(values: chex.ArrayTree, weights: Weights) -> Num[Array, " n"]:
    """Return the weights of a mean, 0 for participants with a value that is not finite."""

    def of_finite(value: chex.ArrayTree, weight: Num[Array, ""] | None) -> Float[Array, ""]:
        finite: Bool[Array, ""] = jnp.all(
            jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(value)])
        )
        return jnp.where(finite, jnp.float32(1) if weight is None else weight, 0)

    return federated_map(of_finite, values, weights)
