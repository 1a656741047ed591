"""A user's script: a round of its own, and a method. mypy --strict and pyright accept it."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import fedpax
from fedpax.algorithms import fedavg


def loss_fn(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jnp.mean((batch - w) ** 2), {"norm": jnp.linalg.norm(w)}


@fedpax.program(clients=4, static_argnames="scale")
def step(w: jax.Array, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    means = fedpax.federated_map(lambda x: scale * jnp.mean(x, axis=0), x)
    return w + fedpax.federated_mean(means)


w, x = jnp.zeros(3), jnp.ones((4, 2, 8, 3))
method = fedavg(loss_fn, cohort_size=4, client_optimizer=optax.sgd(0.1))
state = method.init(w)
with jax.set_mesh(fedpax.make_mesh(clients=1)):
    for _ in range(2):
        state, metrics = method.round(state, fedpax.Cohort(x))
        assert_type(metrics, dict[str, jax.Array])
        print(float(metrics["loss"]), state.params)
assert_type(step(w, x[:, 0], scale=2.0), jax.Array)
assert_type(step.with_options(chunk_size=1)(w, x[:, 0]), jax.Array)
assert_type(fedpax.out_of_core(step, chunk_size=2)(w, x[:, 0]), jax.Array)
print(fedpax.explain(step, w, x[:, 0]), fedpax.algorithms.diloco)
