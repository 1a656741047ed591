"""Parameters that a client optimizer never moves: they are not sent, and get no noise."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Num

from fedpax.aggregators import Aggregator
from fedpax.algorithm import Metrics, Params
from fedpax.primitives.layout import unplaced_aval
from fedpax.primitives.zeros import zero_results


def frozen_leaves(optimizer: optax.GradientTransformation, params: Params) -> list[bool]:
    """Return for each parameter whether an optimizer leaves it as it is, whatever the gradient."""
    # This is read from the graph of `optimizer.update`: an update is 0 if it is computed from zeros
    # alone, as by `optax.set_to_zero`.
    types = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)
    count = len(jax.tree.leaves(types))

    def update(state: optax.OptState, gradient: Params, params: Params) -> tuple[Any, Any]:
        return optimizer.update(gradient, state, params)

    try:
        init = jax.make_jaxpr(optimizer.init)(types)
        state = jax.eval_shape(optimizer.init, types)
        step = jax.make_jaxpr(update)(state, types, types)
    except Exception:  # it takes further arguments, or other parameters than these
        return [False] * count
    zeros, moving = zero_results(init, [False] * count), [False] * 2 * count
    while True:
        are_zero = zero_results(step, [*zeros, *moving])  # of the updates, then of the state
        kept = [a and b for a, b in zip(zeros, are_zero[count:], strict=True)]
        if kept == zeros:
            return are_zero[:count]
        zeros = kept


def without_frozen_leaves(
    aggregator: Aggregator, optimizer: optax.GradientTransformation
) -> Aggregator:
    """Aggregate only the parameters that the participants' optimizer moves."""
    # The others are not sent. Their aggregate is 0: an aggregator that adds noise or rounds would
    # move them.

    def split(tree: Params, types: Params) -> tuple[list[Any], list[bool]]:
        frozen = frozen_leaves(optimizer, types)
        leaves = jax.tree.leaves(tree)
        return [x for x, is_frozen in zip(leaves, frozen, strict=True) if not is_frozen], frozen

    def init(params: Params) -> chex.ArrayTree:
        moved, frozen = split(params, params)
        return aggregator.init(moved if any(frozen) else params)

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Num[Array, " participants"] | None
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        types = jax.tree.map(lambda u: unplaced_aval(jax.typeof(u)), updates)
        moved, frozen = split(updates, types)
        if not any(frozen):
            return aggregator.aggregate(state, updates, weights)
        aggregates, state, metrics = aggregator.aggregate(state, moved, weights)
        rest = iter(aggregates)
        leaves, tree = jax.tree.flatten(types)
        filled = [
            jnp.zeros(leaf.shape, leaf.dtype) if is_frozen else next(rest)
            for leaf, is_frozen in zip(leaves, frozen, strict=True)
        ]
        return jax.tree.unflatten(tree, filled), state, metrics

    return aggregator._replace(init=init, aggregate=aggregate)
