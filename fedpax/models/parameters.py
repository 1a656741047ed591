"""Parameters with logical axes: drawn at random, and gathered when a layer computes with them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from fedpax.models.quantization import Quantization, quantized_einsum
from fedpax.models.remat import PROJECTION
from fedpax.parallel.axes import constrain


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, logical_axes: tuple[str, ...]
) -> nnx.Param:
    """Draws a parameter from a normal distribution around 0.

    Args:
      rngs: the module's random keys.
      shape: its shape.
      stddev: the standard deviation.
      logical_axes: the names of its axes, as in `fedpax.parallel.axes.RULES`.

    Returns:
      The parameter, float32.

    Example:
      >>> kernel = normal(nnx.Rngs(0), (3, 2), 0.1, ("embed", "mlp"))
      >>> kernel.shape, kernel.logical_axes
      ((3, 2), ('embed', 'mlp'))
    """
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape), logical_axes=logical_axes)


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
    return _gathered(parameter[...], parameter.logical_axes, dtype)


def project(
    subscripts: str,
    x: jax.Array,
    parameter: nnx.Param,
    out_sharding: jax.sharding.PartitionSpec | None = None,
    quantization: Quantization = "none",
) -> jax.Array:
    """Contracts features with a parameter, which is gathered again in the backward pass.

    Kept from one pass to the other, the gathered weights of all layers would take the memory that
    sharding them saves.

    Args:
      subscripts: of `jnp.einsum`, for x and the parameter.
      x: features.
      parameter: a parameter with logical axes, or one layer of a stack of them.
      out_sharding: the result's layout where a contracted axis is sharded explicitly.
      quantization: the number format of the product in the forward pass.

    Returns:
      The product, in x's dtype.

    Example:
      >>> kernel = normal(nnx.Rngs(0), (3, 2), 0.1, ("embed", "mlp"))
      >>> project("btw,wm->btm", jnp.ones((1, 4, 3)), kernel).shape
      (1, 4, 2)
    """

    def compute(x: jax.Array, value: jax.Array) -> jax.Array:
        gathered = _gathered(value, parameter.logical_axes, x.dtype)
        if quantization != "none":
            product = quantized_einsum(subscripts, x, gathered, quantization)
            return checkpoint_name(product, PROJECTION)
        return jnp.einsum(subscripts, x, gathered, out_sharding=out_sharding)

    # A scan over layers already keeps the two passes apart, which prevent_cse is there to ensure.
    return jax.checkpoint(compute, prevent_cse=False)(x, parameter[...])


def _gathered(value: jax.Array, logical_axes: tuple[str, ...], dtype: DTypeLike) -> jax.Array:
    # Inside the scan over layers the axis "layers", which comes first, is gone.
    names = logical_axes[-value.ndim :]
    return constrain(value.astype(dtype), [None if name == "embed" else name for name in names])
