"""The last versions of the server's model, from which stale participants have started."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.algorithm import Params


class History(NamedTuple):
    """The last versions of a model, in a ring buffer.

    Attributes:
        versions: the model's pytree with leaves `[length, ...]`; version v is at v mod length.
        current: int32 scalar, the number of the latest version, from 0.
    """

    versions: Params
    current: Int[Array, ""]

    def read(self, staleness: Int[Array, ""]) -> Params:
        """Return the version that was the latest `staleness` versions ago.

        Args:
            staleness: integer scalar, from 0 to length - 1. A version before the first reads the
                first.
        """
        version = jnp.maximum(self.current - staleness, 0)
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(
                leaf, version % leaf.shape[0], axis=0, keepdims=False
            ),
            self.versions,
        )

    def append(self, params: Params) -> "History":
        """Add a version in place of the oldest one."""
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
    """Make a history whose only version, number 0, is `params`.

    Args:
        params: the model.
        length: number of versions to keep, at least 1: the largest staleness + 1. Memory: `length`
            models.

    Example:
        >>> history = start_history(jnp.float32(1.0), length=3)
        >>> history = history.append(jnp.float32(2.0)).append(jnp.float32(3.0))
        >>> [history.read(jnp.int32(staleness)).item() for staleness in (0, 1, 2)]
        [3.0, 2.0, 1.0]
    """

    def fill(leaf: chex.Array) -> Any:
        return jnp.broadcast_to(leaf, (length, *jnp.shape(leaf)))

    return History(jax.tree.map(fill, params), jnp.int32(0))
