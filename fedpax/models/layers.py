"""What layers share: parameters with logical axes, gathered before use, projections, RMSNorm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from fedpax.models.lora import AdaptedWeight
from fedpax.ops.quantization import Quantization, quantized_einsum
from fedpax.ops.remat import PROJECTION
from fedpax.parallel.axes import constrain, explicit_spec


def normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], stddev: float, logical_axes: tuple[str, ...]
) -> nnx.Param:
    """Initialize a float32 parameter from a normal distribution with mean 0."""
    return nnx.Param(stddev * jax.random.normal(rngs.params(), shape), logical_axes=logical_axes)


def gather_weight(parameter: nnx.Param, dtype: DTypeLike) -> jax.Array:
    """Cast a parameter to the compute dtype and all-gather its embed axis."""
    # The all-gather happens where fsdp shards the embed axis, after the cast. Shards of tensor
    # parallelism stay where they are.
    return _gathered(parameter[...], parameter.logical_axes, dtype)


def project(
    subscripts: str,
    x: jax.Array,
    parameter: nnx.Param,
    out_sharding: jax.sharding.PartitionSpec | None = None,
    quantization: Quantization = "none",
) -> jax.Array:
    """Contract features with a parameter; repeat the all-gather in the backward pass."""
    # Gathered weights are not stored for the backward pass, because the weights of all layers would
    # take the memory that fsdp saves. `parameter` may be one layer of stacked parameters, and its
    # value an `AdaptedWeight`.

    def compute(x: jax.Array, value: jax.Array | AdaptedWeight) -> jax.Array:
        if isinstance(value, AdaptedWeight):
            return compute(x, value.weight) + _low_rank(
                subscripts, x, value, parameter.logical_axes, out_sharding
            )
        gathered = _gathered(value, parameter.logical_axes, x.dtype)
        if quantization != "none":
            projected = quantized_einsum(subscripts, x, gathered, quantization)
            return checkpoint_name(projected, PROJECTION)
        return jnp.einsum(subscripts, x, gathered, out_sharding=out_sharding)

    # prevent_cse is not needed: the scan over layers already separates the two passes.
    return jax.checkpoint(compute, prevent_cse=False)(x, parameter.get_value())


def _low_rank(
    subscripts: str,
    x: jax.Array,
    adapted: AdaptedWeight,
    logical_axes: tuple[str | None, ...],
    out_sharding: jax.sharding.PartitionSpec | None,
) -> jax.Array:
    """Compute scale (x A) B; the matrix A B is never computed."""
    operands, result = subscripts.split("->")
    features, letters = operands.split(",")
    inputs = "".join(letter for letter in letters if letter not in result)
    outputs = letters.removeprefix(inputs)
    kept = "".join(letter for letter in features if letter not in inputs)
    names = logical_axes[-len(letters) :]
    a = _gathered(adapted.a, (*names[: len(inputs)], None), x.dtype)
    b = _gathered(adapted.b, (None, *names[len(inputs) :]), x.dtype)
    shape = (*x.shape[: len(kept)], a.shape[-1])
    reduced = jnp.einsum(
        f"{features},{inputs}r->{kept}r",
        x,
        a,
        out_sharding=explicit_spec(("batch", "sequence", None), shape),
    )
    return adapted.scale * jnp.einsum(
        f"{kept}r,r{outputs}->{result}", reduced, b, out_sharding=out_sharding
    )


def _gathered(
    value: jax.Array, logical_axes: tuple[str | None, ...], dtype: DTypeLike
) -> jax.Array:
    # The scan over layers has removed the first axis, "layers".
    names = logical_axes[-value.ndim :]
    return constrain(value.astype(dtype), [None if name == "embed" else name for name in names])


class RMSNorm(nnx.Module):
    """Root mean square normalization: x / sqrt(mean(x^2) + epsilon) * scale."""

    # Zhang and Sennrich (arXiv:1910.07467).

    def __init__(self, features: int, *, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones(features), logical_axes=("norm",))

    def __call__(self, x: Float[Array, "*batch features"]) -> Float[Array, "*batch features"]:
        """Normalize x [..., features]; compute in float32 and return x's dtype."""
        accurate = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(accurate), axis=-1, keepdims=True)
        return (accurate * jax.lax.rsqrt(mean_square + self.epsilon) * self.scale[...]).astype(
            x.dtype
        )
