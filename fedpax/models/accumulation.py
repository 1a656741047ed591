"""Gradient accumulation: a batch's loss, a few of its rows at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedpax.models.losses import Batch, LossFn


def accumulate_gradients(loss_fn: LossFn, grad_accum_steps: int) -> LossFn:
    """Computes a loss as the mean over micro-batches, one after another.

    Its gradient accumulates in the parameters' dtype, and a micro-batch's activations are all that
    the device holds: each is computed again in the backward pass.

    Args:
      loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`, both means over the rows.
      grad_accum_steps: number of micro-batches, which divides the rows; 1 leaves the loss as it is.

    Returns:
      A loss of the same signature. Where a mask weighs the rows, every micro-batch counts alike.

    Raises:
      ValueError: `grad_accum_steps` below 1, or one that does not divide the rows.

    Example:
      >>> loss_fn = lambda w, batch: (jnp.mean((w - batch["x"]) ** 2), {})
      >>> batch = {"x": jnp.arange(4.0)}
      >>> jax.grad(accumulate_gradients(loss_fn, 2), has_aux=True)(1.0, batch)[0].item()
      -1.0
    """
    if grad_accum_steps < 1:
        raise ValueError(
            f"accumulate_gradients(): grad_accum_steps={grad_accum_steps}, expected at least 1 micro-batch."
        )
    if grad_accum_steps == 1:
        return loss_fn

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % grad_accum_steps:
            raise ValueError(
                f"accumulate_gradients(): {grad_accum_steps} micro-batches do not divide a batch of {x.shape[0]} "
                "rows. Change the number of one of them."
            )
        # Every grad_accum_steps-th row: a device that holds a block of rows keeps a part of each micro-batch.
        return jnp.moveaxis(
            x.reshape(x.shape[0] // grad_accum_steps, grad_accum_steps, *x.shape[1:]), 1, 0
        )

    def accumulated(params: Any, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        @jax.checkpoint
        def one(params: Any, part: Batch) -> Any:
            return loss_fn(params, part)

        parts = jax.tree.map(split, dict(batch))
        types = jax.eval_shape(lambda: one(params, jax.tree.map(lambda x: x[0], parts)))

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            return jax.tree.map(
                lambda t, x: t + x / grad_accum_steps, total, one(params, part)
            ), None

        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.result_type(x, jnp.float32)), types)
        return jax.lax.scan(add, start, parts)[0]

    return accumulated
