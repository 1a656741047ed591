"""Mark the values that a participant sends, for `fedpax.cost`."""

import chex
import jax
from jax.ad_checkpoint import checkpoint_name

SENT = "fedpax_sent"
"""The name that marks a sent value in the jaxpr of a mapped function."""


def mark_sent(values: chex.ArrayTree) -> chex.ArrayTree:
    """Mark values as what a participant sends in place of its update. Inside a mapped function.

    An aggregator that compresses updates marks the encoded arrays. `fedpax.cost` counts their bytes
    as the compressed size of the update. The mark does not change the compiled program.

    Args:
        values: a pytree of arrays, such as packed codes and their scale.

    Returns:
        The same values.

    Example:
        >>> import jax.numpy as jnp
        >>> mark_sent(jnp.array([1, 2], jnp.uint8)).tolist()
        [1, 2]
    """
    return jax.tree.map(lambda value: checkpoint_name(value, SENT), values)
