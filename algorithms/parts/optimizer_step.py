"""One step of an optimizer, in the dtypes of its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedpax.algorithm import Params


def optimizer_step(
    optimizer: optax.GradientTransformation,
    gradient: Params,
    state: optax.OptState,
    params: Params,
    **extra: Any,
) -> tuple[Params, optax.OptState]:
    """Step parameters along a gradient. Parameters and state keep their dtypes.

    A setting that is a float32 array, such as a momentum to differentiate in, would make the state
    of bfloat16 parameters float32: the state of the next round would have another type.

    Example:
        >>> descent = optax.sgd(jnp.float32(0.5), momentum=jnp.float32(0.75))
        >>> x = jnp.bfloat16(3.0)
        >>> x, state = optimizer_step(descent, jnp.bfloat16(2.0), descent.init(x), x)
        >>> x.item(), jax.tree.leaves(state)[0].dtype
        (2.0, dtype(bfloat16))
    """
    updates, stepped = optimizer.update(gradient, state, params, **extra)
    return optax.apply_updates(params, updates), jax.tree.map(_like, stepped, state)


def _like(new: Any, old: Any) -> Any:
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jnp.asarray(new).astype(dtype)
