"""Arithmetic of pytrees, leaf by leaf."""

from typing import Any

import chex
import jax
import jax.numpy as jnp


def subtract(x: chex.ArrayTree, y: chex.ArrayTree) -> chex.ArrayTree:
    """Subtract two pytrees leaf by leaf: `x - y`."""
    return jax.tree.map(jnp.subtract, x, y)


def scale(factor: Any, x: chex.ArrayTree) -> chex.ArrayTree:
    """Multiply a pytree by a number, leaf by leaf, in the leaves' own dtypes."""
    return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), x)


def weighted_sum(a: Any, x: chex.ArrayTree, b: Any, y: chex.ArrayTree) -> chex.ArrayTree:
    """Compute `a x + b y` of two pytrees, leaf by leaf, in the dtypes of x."""
    return jax.tree.map(lambda x, y: (a * x + b * y).astype(x.dtype), x, y)


def select(condition: Any, x: chex.ArrayTree, y: chex.ArrayTree) -> chex.ArrayTree:
    """Select x where a scalar condition holds and y elsewhere, leaf by leaf."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), x, y)
