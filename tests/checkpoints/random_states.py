"""Random states of a run, and their comparison bit by bit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding


class State(NamedTuple):
    params: Any
    optimizer: Any
    key: jax.Array
    step: jax.Array


def random_state(seed: int, sharding: NamedSharding) -> State:
    """Return a state with leaves of many types and shapes, and an optimizer's empty parts."""
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {
        "w": jax.device_put(jax.random.normal(keys[0], (8, 4)), sharding),
        "layers": [jax.random.normal(keys[1], (3,)).astype(jnp.bfloat16), jnp.float32(seed)],
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return State(params, optimizer.init(params), keys, jnp.int32(seed))


def like(state: Any, sharding: NamedSharding | None = None) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=sharding if sharding and x.shape == (8, 4) else x.sharding
        ),
        state,
    )


def assert_same_bits(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)

    def bits(x: Any) -> tuple[Any, bytes]:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return x.dtype, np.asarray(x).tobytes()

    assert jax.tree.map(bits, one) == jax.tree.map(bits, other)
