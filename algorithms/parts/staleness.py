"""Factors of stale updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fedpax.algorithm import Params
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.checks import NON_NEGATIVE

StalenessFn: TypeAlias = Callable[[Float[Array, ""]], Float[Array, ""]]
"""The factor of an update by its staleness: `float32 scalar -> float32 scalar`."""


def polynomial_staleness(exponent: float = 0.5) -> StalenessFn:
    """Weigh an update by `(1 + staleness)^(-exponent)`.

    Args:
        exponent: at least 0. Default 0.5, FedBuff's. 0 weighs all updates equally.

    Returns:
        A function of the staleness, for `fedbuff(staleness_fn=...)` and `fedasync`.

    Raises:
        ValueError: the exponent is negative.

    Example:
        >>> polynomial_staleness()(jnp.float32(3.0)).item()
        0.5
    """
    remedy = "Pass 0.0 to weigh all updates equally."
    check_setting("polynomial_staleness", "exponent", exponent, NON_NEGATIVE, remedy=remedy)
    return lambda staleness: (1.0 + staleness) ** -exponent


def hinge_staleness(slope: float, free: float) -> StalenessFn:
    """Weigh an update by 1 up to a staleness of `free`, and by `1 / (slope (s - free) + 1)` above.

    Args:
        slope: a, at least 0.
        free: b, at least 0.

    Returns:
        A function of the staleness, for `fedbuff(staleness_fn=...)` and `fedasync`.

    Raises:
        ValueError: a setting is negative.

    Example:
        >>> weigh = hinge_staleness(slope=0.5, free=4.0)
        >>> weigh(jnp.float32(4.0)).item(), weigh(jnp.float32(6.0)).item()
        (1.0, 0.5)

    Reference:
        Xie et al., Asynchronous Federated Optimization, arXiv:1903.03934, section 5.2.
    """
    check_setting(
        "hinge_staleness", "slope", slope, NON_NEGATIVE, remedy="Pass 0.0 for equal weights."
    )
    check_setting("hinge_staleness", "free", free, NON_NEGATIVE, remedy="Pass 0.0 for none.")
    return lambda staleness: 1.0 / (slope * jnp.maximum(staleness - free, 0.0) + 1.0)


# The last versions of the server's model, from which stale participants have started.
class History(NamedTuple):
    """The last versions of a model, in a ring buffer."""

    versions: Params  # the model's pytree with leaves `[length, ...]`; version v is at v mod length
    current: Int[Array, ""]  # int32 scalar, the number of the latest version, from 0

    def read(self, staleness: Int[Array, ""]) -> Params:
        """Return the version that was the latest `staleness` versions ago."""
        version = jnp.maximum(self.current - staleness, 0)
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(
                leaf, version % leaf.shape[0], axis=0, keepdims=False
            ),
            self.versions,
        )

    def append(self, params: Params) -> History:
        """Overwrite the oldest version by a new one."""
        current = self.current + 1
        versions = jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_index_in_dim(
                leaf, new, current % leaf.shape[0], axis=0
            ),
            self.versions,
            params,
        )
        return History(versions, current)


def start_history(params: Params, length: int) -> History:
    """Make a history whose only version, number 0, is `params`."""

    def fill(leaf: chex.Array) -> Any:
        return jnp.broadcast_to(leaf, (length, *jnp.shape(leaf)))

    return History(jax.tree.map(fill, params), jnp.int32(0))
