"""A participant's loss and gradient at a fixed model, over all its batches."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.algorithm import LossFn, Metrics, Params, loss_and_metrics
from fedpax.algorithms.parts.local_steps import fold_steps, gradient_and_metrics
from fedpax.algorithms.parts.participation import valid_steps


def local_metrics(
    loss_fn: LossFn,
    params: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> Metrics:
    """Average the loss and the metrics of a model over a participant's valid batches."""

    def evaluate(carry: None, batch: chex.ArrayTree) -> tuple[None, Metrics]:
        return None, loss_and_metrics(loss_fn, params, batch)[1]

    return fold_steps(evaluate, None, batches, num_steps)[1]


def full_gradient(
    loss_fn: LossFn,
    params: Params,
    batches: chex.ArrayTree,
    num_steps: Int[Array, ""] | int | None = None,
) -> Params:
    """Average the gradient at one model over a participant's valid batches."""

    def add(total: Params, batch: chex.ArrayTree) -> tuple[Params, Metrics]:
        gradient, _ = gradient_and_metrics(loss_fn, params, batch)
        return jax.tree.map(jnp.add, total, gradient), {}

    total, _ = fold_steps(add, accumulator(params), batches, num_steps)
    return mean_of(total, count_steps(batches, num_steps), params)


def count_steps(
    batches: chex.ArrayTree, num_steps: Int[Array, ""] | int | None = None
) -> Int[Array, ""]:
    """Count a participant's valid steps: those that `local_steps` takes."""
    valid = valid_steps(batches, num_steps)
    if valid is None:
        return jnp.int32(jax.tree.leaves(batches)[0].shape[0])
    return jnp.sum(valid, dtype=jnp.int32)


def accumulator(params: Params) -> Params:
    """Return zeros to sum gradients in, of at least float32."""
    return jax.tree.map(
        lambda p: jnp.zeros_like(p, dtype=jnp.promote_types(p.dtype, jnp.float32)), params
    )


def mean_of(total: Params, count: Int[Array, ""], like: Params) -> Params:
    """Divide a sum by its count, in the dtypes of `like`; 0 where the count is 0."""
    return jax.tree.map(lambda t, p: (t / jnp.maximum(count, 1)).astype(p.dtype), total, like)
