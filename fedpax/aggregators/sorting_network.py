"""A sorting network: sorts the participants' values of all coordinates by whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def sort_rows(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    """Sort each coordinate over the participants, in ascending order.

    On a CPU, XLA sorts one coordinate after another, with a call for each comparison. A bitonic
    sorting network compares whole rows instead, in `k (k + 1) / 2` steps for up to `2^k`
    participants: 21 for 64. Each step is a vectorized minimum or maximum. Other devices use XLA's
    sort.

    Args:
        x: the values, without NaN.

    Returns:
        The sorted values.

    Example:
        >>> sort_rows(jnp.array([[3.0, 1.0], [2.0, jnp.inf], [1.0, 5.0]])).tolist()
        [[1.0, 1.0], [2.0, 5.0], [3.0, inf]]

    Reference:
        Batcher, Sorting networks and their applications, AFIPS 1968, section "Bitonic sorters".
    """
    return jax.lax.platform_dependent(x, cpu=_bitonic_sort, default=lambda x: jnp.sort(x, 0))


def _bitonic_sort(x: Float[Array, "participants ..."]) -> Float[Array, "participants ..."]:
    n = x.shape[0]
    partners, takes_less = _network(n)

    def step(
        x: Float[Array, "rows ..."], pairs: tuple[jax.Array, jax.Array]
    ) -> tuple[Float[Array, "rows ..."], None]:
        partner, less = pairs
        other = jnp.take(x, partner, 0, mode="clip")
        less = less.reshape(-1, *[1] * (x.ndim - 1))
        return jnp.where(less, jnp.minimum(x, other), jnp.maximum(x, other)), None

    padding = [(0, partners.shape[1] - n)] + [(0, 0)] * (x.ndim - 1)
    rows = jnp.pad(x, padding, constant_values=jnp.inf)
    return jax.lax.scan(step, rows, (partners, takes_less))[0][:n]


def _network(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's partner in each step, and whether the row takes the smaller value."""
    levels = max(n - 1, 0).bit_length()
    rows = np.arange(2**levels)
    partners = [rows ^ 1 << bit for level in range(levels) for bit in range(level, -1, -1)]
    ascending = [rows >> level + 1 & 1 == 0 for level in range(levels) for _ in range(level + 1)]
    partner = np.array(partners, np.int32).reshape(-1, 2**levels)
    return partner, (rows < partner) == np.array(ascending).reshape(partner.shape)
