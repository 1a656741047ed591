"""What every method has in common: a participant's optimizer steps on its own batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

LossFn = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]


def local_steps(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Any,
    optimizer_state: optax.OptState,
    batches: Any,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Takes one optimizer step a batch: `y <- y + update(grad loss_fn(y, batch))`.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        optimizer: any optax optimizer.
        params: a pytree of float arrays.
        optimizer_state: the optimizer's state for `params`.
        batches: a pytree of arrays `[local_steps, batch, ...]`.

    Returns:
        The new parameters, the new optimizer state, and metrics: `loss_fn`'s dict and `"loss"`,
        each averaged over the steps, in float32.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> descent = optax.sgd(0.25)
        >>> w = jnp.float32(0.0)
        >>> w, _, metrics = local_steps(loss_fn, descent, w, descent.init(w), jnp.ones((2, 1)))
        >>> w.item(), metrics["loss"].item()
        (0.75, 0.625)
    """

    def step(
        carry: tuple[Any, optax.OptState], batch: Any
    ) -> tuple[tuple[Any, optax.OptState], dict[str, jax.Array]]:
        params, state = carry
        (loss, aux), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), {**aux, "loss": loss}

    (params, optimizer_state), metrics = jax.lax.scan(step, (params, optimizer_state), batches)
    return params, optimizer_state, jax.tree.map(_mean_over_steps, metrics)


def _mean_over_steps(values: jax.Array) -> jax.Array:
    return jnp.mean(values.astype(jnp.float32))


def subtract(x: Any, y: Any) -> Any:
    """`x - y`, leaf by leaf."""
    return jax.tree.map(jnp.subtract, x, y)
