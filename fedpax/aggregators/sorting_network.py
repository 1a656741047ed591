"""A sorting network: sorts the participants' values of all coordinates by whole rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def sort_rows(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    """Sort each coordinate over the participants, in ascending order."""
    # On a CPU, XLA sorts one coordinate after another, with a call for each comparison. A bitonic
    # sorting network compares whole rows instead, in `k (k + 1) / 2` steps for up to `2^k`
    # participants: 21 for 64. Each step is a vectorized comparison. Other devices use XLA's sort.
    # Reference: Batcher, Sorting networks and their applications, AFIPS 1968, section "Bitonic
    # sorters".
    return jax.lax.platform_dependent(x, cpu=_bitonic_sort, default=lambda x: jnp.sort(x, 0))


def _bitonic_sort(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    n = x.shape[0]
    if n < 2:
        return x
    levels = (n - 1).bit_length()
    steps = [(level, bit) for level in range(levels) for bit in range(level, -1, -1)]
    level, bit = jnp.array(steps).T[:, :, None]
    row = jnp.arange(2**levels)
    partners = row ^ 1 << bit
    ascending = row >> level + 1 & 1 == 0

    def step(
        x: Float[Array, "rows ..."], pairs: tuple[Int[Array, " rows"], Bool[Array, " rows"]]
    ) -> tuple[Float[Array, "rows ..."], None]:
        partner, takes_less = pairs
        partner_row = jnp.take(x, partner, 0, mode="clip")
        takes_less = takes_less.reshape(-1, *[1] * (x.ndim - 1))
        # Not by `minimum` and `maximum`: they would add 0 times the other row's derivative, which
        # may be NaN, and halve the derivatives of equal values.
        # `where` would need equal shardings, also on an explicit axis of one device.
        is_exchanged = (takes_less & (x > partner_row)) | (~takes_less & (x < partner_row))
        return jnp.where(is_exchanged, partner_row, x), None

    padding = [(0, row.size - n)] + [(0, 0)] * (x.ndim - 1)
    rows = jnp.pad(x, padding, constant_values=jnp.inf)
    return jax.lax.scan(step, rows, (partners, (row < partners) == ascending))[0][:n]
