"""Rounds whose clients add given updates to the server's model, so that only servers differ."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.algorithms import fedavg

SHAPES = {"kernel": (5, 3), "bias": (3,)}


def draw_updates(rounds, clients, seed=0):
    """Draw the update of each client in each round, `[rounds, clients, ...]`."""
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(rng.standard_normal((rounds, clients, *shape)))
        for name, shape in SHAPES.items()
    }


def draw_params(seed=1):
    return {name: x[0, 0] for name, x in draw_updates(1, 1, seed).items()}


def make(clients, **settings):
    """Make FedAvg whose clients take one step, by the one batch that they have."""

    def loss_fn(params, batch):
        return -optax.tree.vdot(params, jax.tree.map(lambda x: x[0], batch)), None

    return fedavg(loss_fn, cohort_size=clients, client_optimizer=optax.sgd(1.0), **settings)


def cohort_of(updates, num_examples=None):
    """Make the cohort whose clients have the updates `[clients, ...]`."""
    return fedpax.Cohort(
        jax.tree.map(lambda x: jnp.asarray(x)[:, None, None], updates), num_examples
    )
