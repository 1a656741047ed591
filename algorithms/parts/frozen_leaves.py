"""Parameters that a client optimizer never moves: they are not sent, and get no noise."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import Metrics, Params
from fedpax.primitives.jaxpr_analysis import zero_results
from fedpax.primitives.layout import unplaced_aval

# Raised by an optimizer with further arguments, or with masks and labels of other parameters.
UNSUITABLE = (TypeError, ValueError, LookupError, AttributeError)


def frozen_leaves(optimizer: optax.GradientTransformation, params: Params) -> list[bool]:
    """Return for each parameter whether an optimizer leaves it as it is, whatever the gradient."""
    # In the graph of `optimizer.update`, an update is 0 if it is computed from zeros alone.
    types = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)
    count = len(jax.tree.leaves(types))

    extra_args = optax.with_extra_args_support(optimizer)

    def update(
        state: optax.OptState, gradient: Params, params: Params, loss: jax.Array
    ) -> tuple[Any, Any]:
        extra = {"value": loss, "grad": gradient, "value_fn": lambda _: loss}
        return extra_args.update(gradient, state, params, **extra)

    try:
        init = jax.make_jaxpr(optimizer.init)(types)
        state = jax.eval_shape(optimizer.init, types)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        step = jax.make_jaxpr(update)(state, types, types, loss)
    except UNSUITABLE:
        return [False] * count
    zeros, moving = zero_results(init, [False] * count), [False] * (2 * count + 1)
    while True:
        are_zero = zero_results(step, [*zeros, *moving])
        kept = [a and b for a, b in zip(zeros, are_zero[count:], strict=True)]
        if kept == zeros:
            return are_zero[:count]
        zeros = kept


def without_frozen_leaves(
    aggregator: Aggregator, optimizer: optax.GradientTransformation
) -> Aggregator:
    """Aggregate only the parameters that the participants' optimizer moves."""

    def moved(types: Params) -> Aggregator:
        return without_leaves(aggregator, frozen_leaves(optimizer, types))

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        types = jax.tree.map(lambda u: unplaced_aval(jax.typeof(u)), updates)
        return moved(types).aggregate(state, updates, weights)

    return aggregator._replace(init=lambda params: moved(params).init(params), aggregate=aggregate)


def without_leaves(aggregator: Aggregator, frozen: Sequence[bool]) -> Aggregator:
    """Aggregate all leaves but the frozen ones, whose aggregate is 0."""
    # They are not sent, and noise does not move them. If all are frozen, the aggregator's state and
    # metrics are as usual.
    if not any(frozen):
        return aggregator
    sent = [True] * len(frozen) if all(frozen) else [not x for x in frozen]

    def split(tree: Params) -> list[Any]:
        return [x for x, is_sent in zip(jax.tree.leaves(tree), sent, strict=True) if is_sent]

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        types, tree = jax.tree.flatten(
            jax.tree.map(lambda u: unplaced_aval(jax.typeof(u)), updates)
        )
        aggregates, state, metrics = aggregator.aggregate(state, split(updates), weights)
        rest = iter(aggregates)
        sent_aggregates = [next(rest) if is_sent else None for is_sent in sent]
        filled = [
            jnp.zeros(leaf.shape, leaf.dtype) if is_frozen else x
            for leaf, is_frozen, x in zip(types, frozen, sent_aggregates, strict=True)
        ]
        return jax.tree.unflatten(tree, filled), state, metrics

    return aggregator._replace(
        init=lambda params: aggregator.init(split(params)), aggregate=aggregate
    )


def keep_leaves(frozen: Sequence[bool], params: Params, before: Params) -> Params:
    """Keep frozen parameters as before a step: weight decay or momentum would move them."""
    if not any(frozen):
        return params
    leaves, tree = jax.tree.flatten(params)
    kept = zip(leaves, jax.tree.leaves(before), frozen, strict=True)
    return jax.tree.unflatten(tree, [old if is_frozen else new for new, old, is_frozen in kept])
