"""What every method has in common: a participant's optimizer steps on its own batches."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

LossFn = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array] | None]]


def local_steps(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    params: Any,
    optimizer_state: optax.OptState,
    batches: Any,
    steps: jax.Array | int | None = None,
) -> tuple[Any, optax.OptState, dict[str, jax.Array]]:
    """Takes one optimizer step a batch: `y <- y + update(grad loss_fn(y, batch))`.

    With `steps`, only that many are taken, on the first batches, and no others are computed: a
    loop whose length is known when it runs. Such a loop has forward derivatives (`jax.jvp`), but
    JAX cannot run it backwards; to differentiate backwards, take all steps.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars, or None)`.
        optimizer: any optax optimizer.
        params: a pytree of float arrays.
        optimizer_state: the optimizer's state for `params`.
        batches: a pytree of arrays `[local_steps, batch, ...]`.
        steps: an integer scalar from 0 to `local_steps`, larger ones mean `local_steps`; None
            takes all.

    Returns:
        The new parameters, the new optimizer state, and metrics: `loss_fn`'s dict and `"loss"`,
        each averaged over the steps that were taken, in float32; 0 after no step.

    Raises:
        TypeError: `steps` is no integer scalar; what `loss_fn` returns beside the loss is no dict.

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
        return (optax.apply_updates(params, updates), state), as_metrics(loss, aux)

    start = (params, optimizer_state)
    if steps is None:
        (params, optimizer_state), metrics = jax.lax.scan(step, start, batches)
        return params, optimizer_state, jax.tree.map(_mean_over_steps, metrics)

    taken = _check_steps(steps, jax.tree.leaves(batches)[0].shape[0])

    def batch(i: jax.Array | int) -> Any:
        return jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, keepdims=False), batches)

    def add_step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        where, totals = carry
        where, metrics = step(where, batch(i))
        return where, jax.tree.map(lambda t, m: t + m.astype(jnp.float32), totals, metrics)

    metrics = jax.eval_shape(lambda: step(start, batch(0))[1])
    totals = jax.tree.map(lambda m: jnp.zeros(m.shape, jnp.float32), metrics)
    (params, optimizer_state), totals = jax.lax.fori_loop(0, taken, add_step, (start, totals))
    return params, optimizer_state, jax.tree.map(lambda t: t / jnp.maximum(taken, 1), totals)


def _check_steps(steps: Any, available: int) -> jax.Array:
    given = jnp.asarray(steps)
    if given.shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise TypeError(
            f"local_steps(): steps is {given.dtype}{list(given.shape)}, expected one integer for a "
            "participant. Pass an integer array with one entry for each participant to the round."
        )
    return jnp.clip(given, 0, available).astype(jnp.int32)


def _mean_over_steps(values: jax.Array) -> jax.Array:
    return jnp.mean(values.astype(jnp.float32))


def subtract(x: Any, y: Any) -> Any:
    """`x - y`, leaf by leaf."""
    return jax.tree.map(jnp.subtract, x, y)


def as_metrics(loss: jax.Array, aux: Any) -> dict[str, jax.Array]:
    """Puts the loss beside what the loss function returns with it.

    Args:
        loss: the loss.
        aux: a dict of scalars, or None for no others.

    Returns:
        The dict and `"loss"`.

    Raises:
        TypeError: `aux` is neither.
        ValueError: it has a `"loss"` of its own.

    Example:
        >>> as_metrics(0.5, {"accuracy": 0.75})
        {'accuracy': 0.75, 'loss': 0.5}
    """
    if aux is None:
        return {"loss": loss}
    if not isinstance(aux, Mapping):
        raise TypeError(
            f"loss_fn returned {type(aux).__name__} beside the loss, expected a dict of metrics. "
            "Return loss, {'accuracy': accuracy}, or loss, None."
        )
    if "loss" in aux:
        raise ValueError(
            "loss_fn returned 'loss' among the metrics beside the loss, which is reported under "
            "that name already. Leave it out, or call it something else."
        )
    return {**aux, "loss": loss}
