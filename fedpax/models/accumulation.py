"""Gradient accumulation: the loss of a batch, computed one microbatch at a time."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from fedpax.errors import ArgumentError
from fedpax.models.losses import Batch, ModelLoss


def accumulate_gradients(loss_fn: ModelLoss, grad_accum_steps: int) -> ModelLoss:
    """Split the batch of a loss into microbatches that run one after another.

    The loss is the mean over microbatches. Its gradient accumulates in the parameters' dtype. The
    device holds the activations of one microbatch at a time, because each microbatch is
    recomputed in the backward pass.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`, both means over the rows.
        grad_accum_steps: number of microbatches, a divisor of the number of rows. 1 returns
            `loss_fn` itself.

    Returns:
        A loss of the same signature. Every microbatch has the same weight in the mean, also where
        a mask gives the rows different weights.

    Raises:
        ValueError: `grad_accum_steps` is below 1 or does not divide the number of rows.

    Example:
        >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
        >>> batch = {"x": jnp.arange(4.0)}
        >>> jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)(1.0, batch)[0].item()
        -1.0
    """
    if grad_accum_steps < 1:
        raise ArgumentError(
            f"accumulate_gradients(): grad_accum_steps={grad_accum_steps}, expected at least 1 "
            "microbatch."
        )
    if grad_accum_steps == 1:
        return loss_fn

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % grad_accum_steps:
            raise ArgumentError(
                f"accumulate_gradients(): grad_accum_steps={grad_accum_steps} does not divide a "
                f"batch of {x.shape[0]} rows. Change one of the two numbers."
            )
        # Strided, not contiguous: a device that holds a block of rows keeps part of each
        # microbatch, and no row moves between devices.
        rows = x.shape[0] // grad_accum_steps
        return jnp.moveaxis(x.reshape(rows, grad_accum_steps, *x.shape[1:]), 1, 0)

    def accumulated(params: chex.ArrayTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        @jax.checkpoint
        def micro_loss(params: chex.ArrayTree, microbatch: Batch) -> chex.ArrayTree:
            return loss_fn(params, microbatch)

        microbatches = jax.tree.map(split, dict(batch))
        types = jax.eval_shape(
            lambda: micro_loss(params, jax.tree.map(lambda x: x[0], microbatches))
        )

        def add(total: chex.ArrayTree, microbatch: Batch) -> tuple[chex.ArrayTree, None]:
            value = micro_loss(params, microbatch)
            return jax.tree.map(lambda t, x: t + x / grad_accum_steps, total, value), None

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.result_type(x, jnp.float32)), types)
        return jax.lax.scan(add, start, microbatches)[0]

    return accumulated
