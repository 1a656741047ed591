"""Quantized training: int8 or fp8 matmuls in the forward pass, full precision in the backward."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array, Float, Int

from fedpax.errors import ArgumentError, MissingPackageError
from fedpax.ops.grouped_matmul import grouped_matmul, raw_grouped_matmul

Quantization: TypeAlias = Literal["none", "int8", "fp8"]
FORMATS = {"int8": "int8", "fp8": "float8_e4m3fn"}


def quantized_einsum(
    subscripts: str,
    x: jax.Array,
    weight: jax.Array,
    quantization: Quantization,
) -> jax.Array:
    """Contract features and weights rounded to 8 bits, with the gradient of the exact einsum."""
    # Each operand is divided by a scale that maps the largest absolute value along the contracted
    # axes to the largest number of the format, and rounded. The matmul sums in int32 or float32.
    # The gradient is that without rounding: the straight-through estimator. "fp8" is float8_e4m3fn.
    # Jacob et al. (arXiv:1712.05877), section 3; Bengio et al. (arXiv:1308.3432), the estimator.
    _check_mesh(quantization)
    return _einsum(x, weight, subscripts, quantization)


def quantized_grouped_matmul(
    rows: Float[Array, "rows inputs"],
    kernels: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
    quantization: Quantization,
) -> Float[Array, "rows outputs"]:
    """Apply `grouped_matmul` to rows and kernels rounded to 8 bits, as in `quantized_einsum`."""
    # Each row has its own scale, and so has each output of each kernel.
    _check_mesh(quantization)
    return _grouped(rows, kernels, group_sizes, quantization)


def _check_mesh(quantization: Quantization) -> None:
    types = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Explicit in types:
        raise ArgumentError(
            f"quantization={quantization!r} on a mesh with axes of types {types}: it needs "
            "automatic axes. Make the mesh with axis_types=jax.sharding.AxisType.Auto, or set "
            "quantization='none'."
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _einsum(
    x: jax.Array,
    weight: jax.Array,
    subscripts: str,
    quantization: Quantization,
) -> jax.Array:
    inputs, output = subscripts.split("->")
    rounded = [
        _rounded(operand, [i for i, letter in enumerate(letters) if letter in output], quantization)
        for operand, letters in zip((x, weight), inputs.split(","), strict=True)
    ]
    return _qwix().einsum(subscripts, *rounded).astype(x.dtype)


def _rounded(operand: jax.Array, scaled_axes: list[int], quantization: Quantization) -> Any:
    """Round an operand to the format, with one scale per index of `scaled_axes`."""
    dtype = jnp.dtype(FORMATS[quantization])
    return _qwix().quantize(operand, dtype, channelwise_axes=scaled_axes)


def _forward(
    x: jax.Array, weight: jax.Array, *options: Any
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _einsum(x, weight, *options), (x, weight)


def _backward(
    subscripts: str,
    _: Quantization,
    operands: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array, ...]:
    def exact(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum(subscripts, x, weight)

    return jax.vjp(exact, *operands)[1](gradient)


_einsum.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(
    rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array, quantization: Quantization
) -> jax.Array:
    left, right = _rounded(rows, [0], quantization), _rounded(kernels, [0, 2], quantization)
    accumulator = jnp.int32 if quantization == "int8" else jnp.float32
    sums = raw_grouped_matmul(left.qvalue, right.qvalue, group_sizes, dtype=accumulator)
    # The group of each row, from the ends of the groups.
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(len(rows)), side="right")
    scales = left.scale * right.scale[:, 0].at[group].get(mode="clip")
    return (sums * scales).astype(rows.dtype)


def _grouped_forward(
    rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array, quantization: Quantization
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _grouped(rows, kernels, group_sizes, quantization), (rows, kernels, group_sizes)


def _grouped_backward(
    _: Quantization, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, group_sizes = residuals

    def exact(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return grouped_matmul(rows, kernels, group_sizes)

    return *jax.vjp(exact, rows, kernels)[1](gradient), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _qwix() -> Any:
    try:
        return importlib.import_module("qwix")
    except ImportError:
        raise MissingPackageError(
            "Quantized training needs the package qwix, which is not installed: install "
            "fedpax[quantization], or set quantization='none'."
        ) from None
