"""The last versions of the server's model, from which stale participants have started."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from fedpax.algorithm import Params


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

    def append(self, params: Params) -> "History":
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
