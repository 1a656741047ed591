"""Parameters with logical axes: drawn at random, and gathered when a layer computes with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fedpax.parallel.axes import constrain


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float, logical: tuple[str, ...]
) -> nnx.Param:
    """Draws a parameter from a normal distribution around 0.

    Args:
      rngs: the module's random keys.
      shape: its shape.
      deviation: the standard deviation.
      logical: the names of its axes, as in `fedpax.parallel.axes.RULES`.

    Returns:
      The parameter, float32.

    Example:
      >>> kernel = normal(nnx.Rngs(0), (3, 2), 0.1, ("embed", "mlp"))
      >>> kernel.shape, kernel.logical
      ((3, 2), ('embed', 'mlp'))
    """
    return nnx.Param(deviation * jax.random.normal(rngs.params(), shape), logical=logical)


def weight(parameter: nnx.Param, dtype: DTypeLike) -> jax.Array:
    """Brings a parameter to a layer that computes with it: in the layer's dtype, embed axis whole.

    Where fsdp shards the embed axis, this is the gathering before use, of `dtype`'s bytes; tensor
    parallelism's shards stay where they are.

    Args:
      parameter: a parameter with logical axes, or one layer of a stack of them.
      dtype: what the layer computes in.

    Returns:
      The value.

    Example:
      >>> weight(normal(nnx.Rngs(0), (3, 2), 0.1, ("embed", "mlp")), "bfloat16").dtype
      dtype(bfloat16)
    """
    value = jnp.asarray(parameter[...], dtype)
    # Inside the scan over layers the axis "layers", which comes first, is gone.
    names = parameter.logical[-value.ndim :]
    return constrain(value, [None if name == "embed" else name for name in names])
