"""Grouped matmul: rows in groups, each group multiplied by its own kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from fedpax.parallel.axes import explicit_spec

# Most rows of a block. With 1,024 rows of bfloat16, a TPU v5e computes for as long as it moves the
# float32 sum of a kernel's gradient.
MAX_BLOCK = 1024


@jax.custom_vjp
def grouped_matmul(
    rows: Float[Array, "rows inputs"],
    kernels: Float[Array, "groups inputs outputs"],
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "rows outputs"]:
    """Multiply the rows of each group by its kernel: out[r] = rows[r] @ kernels[group of r]."""
    # On TPU the forward pass is `jax.lax.ragged_dot_general`. Elsewhere, and for the kernels'
    # gradient on TPU too, XLA would compute every row with every group and mask the rest: a loop
    # multiplies one block of rows after another instead. Rows after the last group cost no time;
    # they hold arbitrary values, NaN included, and so do these rows of the gradient. Sums are
    # float32. The gradient has a forward-mode derivative; the matmul itself has none.
    return raw_grouped_matmul(rows, kernels, group_sizes)


def _forward(
    rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # Not `grouped_matmul`: it has no forward-mode rule, which the derivative of a gradient needs.
    return raw_grouped_matmul(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _backward(
    residuals: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, group_sizes = residuals
    return (
        raw_grouped_matmul(cotangents, kernels, group_sizes, transposed=True),
        _kernel_gradients(rows, cotangents, group_sizes),
        None,
    )


grouped_matmul.defvjp(_forward, _backward)


def raw_grouped_matmul(
    rows: jax.Array,
    kernels: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiply the rows of each group by its (transposed) kernel, without a derivative rule."""
    out = jnp.dtype(rows.dtype if dtype is None else dtype)

    # One after another: TPUs have no batched ragged matmul, and batched loops would all run as long
    # as the longest.
    @jax.custom_batching.sequential_vmap
    def compute(rows: jax.Array, kernels: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            rows,
            kernels,
            group_sizes,
            tpu=functools.partial(_ragged_dot, transposed=transposed, dtype=out),
            default=functools.partial(_matmul_in_blocks, transposed=transposed, dtype=out),
        )

    return compute(rows, kernels, group_sizes)


def _ragged_dot(
    rows: jax.Array,
    kernels: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2 if transposed else 1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = explicit_spec((None, None), (len(rows), kernels.shape[1 if transposed else 2]))
    return jax.lax.ragged_dot_general(
        rows, kernels, group_sizes, dimensions, preferred_element_type=dtype, out_sharding=out
    )


def _matmul_in_blocks(
    rows: jax.Array,
    kernels: jax.Array,
    group_sizes: jax.Array,
    *,
    transposed: bool,
    dtype: DTypeLike,
) -> jax.Array:
    block, kernel_axis = _block_size(len(rows), len(kernels)), 1 if transposed else 0
    outputs = kernels.shape[1 if transposed else 2]

    def multiply_group(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        kernel, start, end = group

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            first, inside = _bounds(start + i * block, end, block, len(rows))
            part = jax.lax.dynamic_slice_in_dim(rows, first, block)
            inner = (((1,), (kernel_axis,)), ((), ()))
            new = jax.lax.dot_general(part, kernel, inner, preferred_element_type=dtype)
            old = jax.lax.dynamic_slice_in_dim(out, first, block)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside, new, old), first, 0)

        return jax.lax.fori_loop(0, -(-(end - start) // block), step, out), None

    ends = jnp.cumsum(group_sizes)
    start = jnp.zeros_like(rows, shape=(len(rows), outputs), dtype=dtype)
    return jax.lax.scan(multiply_group, start, (kernels, ends - group_sizes, ends))[0]


@jax.custom_batching.sequential_vmap
def _kernel_gradients(rows: jax.Array, cotangents: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Return, for each group, the sum of the outer products of its rows and their cotangents."""
    block = _block_size(len(rows), len(group_sizes))
    accurate = jnp.promote_types(rows.dtype, jnp.float32)

    def sum_group(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, end = group

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            first, inside = _bounds(start + i * block, end, block, len(rows))
            # Both operands are masked, because 0 times NaN is NaN.
            inputs, outputs = (
                jnp.where(inside, jax.lax.dynamic_slice_in_dim(values, first, block), 0)
                for values in (rows, cotangents)
            )
            outer = (((0,), (0,)), ((), ()))
            return total + jax.lax.dot_general(
                inputs, outputs, outer, preferred_element_type=accurate
            )

        shape = rows.shape[1], cotangents.shape[1]
        zero = jnp.zeros_like(rows, shape=shape, dtype=accurate)
        return jax.lax.fori_loop(0, -(-(end - start) // block), step, zero).astype(rows.dtype)

    ends = jnp.cumsum(group_sizes)
    return jax.lax.map(sum_group, (ends - group_sizes, ends))


def _block_size(rows: int, groups: int) -> int:
    """Return a quarter of the average group size: the last block of a group is computed whole."""
    return min(rows, max(64, min(MAX_BLOCK, rows // (4 * groups))))


def _bounds(start: jax.Array, end: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row of the block from `start` on, and a mask of its rows before `end`."""
    first = jnp.minimum(start, rows - block)
    indices = first + jnp.arange(block)
    return first, ((start <= indices) & (indices < end))[:, None]
