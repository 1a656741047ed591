"""Terms that methods add to the gradients of local steps, as optax transformations.

Chain one in front of the client optimizer: `optax.chain(proximal_term(mu, x), client_optimizer)`.
"""

from typing import Any

import jax
import optax

from fedpax.algorithms.local_steps import scale, subtract
from fedpax.training.algorithm import Params


def added_term(term: Params) -> optax.GradientTransformation:
    """Add a constant to each gradient: `g + term`.

    Args:
        term: of the structure of the parameters.

    Example:
        >>> correction = added_term(2.0)
        >>> correction.update(1.0, correction.init(0.0), 0.0)[0]
        3.0
    """
    return optax.stateless(lambda gradient, params: optax.tree.add(gradient, term))


def proximal_term(mu: Any, x: Params) -> optax.GradientTransformation:
    """Add the gradient of `mu / 2 |y - x|^2` to that of the loss at y: `g + mu (y - x)`.

    Args:
        mu: a number.
        x: the point that steps are drawn to, of the structure of the parameters.

    Example:
        >>> import jax.numpy as jnp
        >>> proximal = proximal_term(0.5, jnp.float32(2.0))
        >>> proximal.update(jnp.float32(1.0), proximal.init(0.0), jnp.float32(6.0))[0].item()
        3.0
    """

    def add(gradient: Params, y: Params | None) -> Params:
        return jax.tree.map(
            lambda g, pull: g + pull.astype(g.dtype), gradient, scale(mu, subtract(y, x))
        )

    return optax.stateless(add)
