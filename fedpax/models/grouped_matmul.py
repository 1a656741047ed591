"""Rows in groups, each group multiplied by a kernel of its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedpax.parallel.axes import explicit_spec

# The most rows that a loop takes at once: 1,024 rows of bfloat16 keep a TPU v5e computing for as
# long as it takes to read and write the float32 sum of a kernel's gradient.
BLOCK = 1024


@jax.custom_vjp
def grouped_matmul(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies the rows of each group by its kernel: out[r] = rows[r] @ kernels[group of r].

    On TPU it is `jax.lax.ragged_dot`. On other platforms, and for the kernels' gradient on TPU
    too, XLA computes that for every row and every group, and then clears what does not belong
    together. In these cases a loop takes blocks of rows, of one group after another. Either way
    rows after the last group cost nothing but their memory.

    It has gradients, under `jax.vmap` too. A gradient has a forward-mode derivative, the product
    itself has none.

    Args:
      rows: [rows, inputs], those of group 0 first.
      kernels: [groups, inputs, outputs], of the rows' dtype.
      sizes: int32 [groups], the number of rows in each group, together at most all of them.

    Returns:
      [rows, outputs], of the rows' dtype, summed in float32. Rows after the last group may hold
      anything, not a number included; so may these rows of a gradient.

    Example:
      >>> kernels = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
      >>> grouped_matmul(jnp.ones((3, 2)), kernels, jnp.array([1, 2])).tolist()
      [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]
    """
    return raw_grouped_matmul(rows, kernels, sizes)


def _forward(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # Not by its own name: the derivative of a gradient would find no rule for it.
    return raw_grouped_matmul(rows, kernels, sizes), (rows, kernels, sizes)


def _backward(
    kept: tuple[jax.Array, ...], cotangents: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, sizes = kept
    return (
        raw_grouped_matmul(cotangents, kernels, sizes, transposed=True),
        _kernel_gradients(rows, cotangents, sizes),
        None,
    )


grouped_matmul.defvjp(_forward, _backward)


def raw_grouped_matmul(
    rows: jax.Array,
    kernels: jax.Array,
    sizes: jax.Array,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """The product without derivatives, or with kernels transposed the gradient of its rows.

    Args:
      rows: as those of `grouped_matmul`, of any type.
      kernels: likewise.
      sizes: likewise.
      transposed: out[r] = rows[r] @ kernels[group of r].T.
      dtype: what is returned, and summed in; None for the rows' dtype.

    Returns:
      [rows, outputs].
    """
    out = jnp.dtype(rows.dtype if dtype is None else dtype)

    # What vmap batches comes one after the other: a TPU has no batches of ragged products, and in
    # a batch of loops each would run as long as the longest.
    @jax.custom_batching.sequential_vmap
    def one(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(
            rows,
            kernels,
            sizes,
            tpu=functools.partial(_ragged_dot, transposed=transposed, dtype=out),
            default=functools.partial(_matmul_in_blocks, transposed=transposed, dtype=out),
        )

    return one(rows, kernels, sizes)


def _ragged_dot(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool, dtype: DTypeLike
) -> jax.Array:
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2 if transposed else 1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out = explicit_spec((None, None), (len(rows), kernels.shape[1 if transposed else 2]))
    return jax.lax.ragged_dot_general(
        rows, kernels, sizes, dimensions, preferred_element_type=dtype, out_sharding=out
    )


def _matmul_in_blocks(
    rows: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool, dtype: DTypeLike
) -> jax.Array:
    block, kernel_axis = _block(len(rows), len(kernels)), 1 if transposed else 0
    outputs = kernels.shape[1 if transposed else 2]

    def of_group(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        kernel, start, end = group

        def step(i: jax.Array, out: jax.Array) -> jax.Array:
            first, inside = _bounds(start + i * block, end, block, len(rows))
            part = jax.lax.dynamic_slice_in_dim(rows, first, block)
            inner = (((1,), (kernel_axis,)), ((), ()))
            new = jax.lax.dot_general(part, kernel, inner, preferred_element_type=dtype)
            old = jax.lax.dynamic_slice_in_dim(out, first, block)
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside, new, old), first, 0)

        return jax.lax.fori_loop(0, -(-(end - start) // block), step, out), None

    ends = jnp.cumsum(sizes)
    start = jnp.zeros_like(rows, shape=(len(rows), outputs), dtype=dtype)
    return jax.lax.scan(of_group, start, (kernels, ends - sizes, ends))[0]


@jax.custom_batching.sequential_vmap
def _kernel_gradients(rows: jax.Array, cotangents: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group the sum of the outer products of its rows and their cotangents."""
    block = _block(len(rows), len(sizes))
    accurate = jnp.promote_types(rows.dtype, jnp.float32)

    def of_group(group: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, end = group

        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            first, inside = _bounds(start + i * block, end, block, len(rows))
            # Both, since 0 times what is not a number is none.
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

    ends = jnp.cumsum(sizes)
    return jax.lax.map(of_group, (ends - sizes, ends))


def _block(rows: int, groups: int) -> int:
    """A quarter of an average group, since a group's last block is computed whole."""
    return min(rows, max(64, min(BLOCK, rows // (4 * groups))))


def _bounds(start: jax.Array, end: jax.Array, block: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Where to slice for the rows from start on, and which of the slice's rows are these."""
    first = jnp.minimum(start, rows - block)
    places = first + jnp.arange(block)
    return first, ((start <= places) & (places < end))[:, None]
