"""A random regression of clients, and FedAvg with traced rates on it, for tests of self_tuning."""

import jax.numpy as jnp
import numpy as np
import optax

import fedpax
from fedpax.algorithms import fedavg

FEATURES = 6


def loss_fn(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2), {}


def random_cohort(participants: int = 4, steps: int = 3, ragged: bool = False) -> fedpax.Cohort:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(participants, steps, 5, FEATURES)).astype(np.float32)
    truth = rng.normal(size=(participants, FEATURES)) * 0.1 + np.arange(FEATURES)
    y = np.einsum("csbf,cf->csb", x, truth).astype(np.float32)
    num_steps = np.arange(participants) % steps + 1 if ragged else None
    return fedpax.Cohort({"x": x, "y": y}, np.arange(1, participants + 1), num_steps)


def fedavg_of(h, participants: int = 4):
    server = optax.sgd(h["rate"], momentum=1 - h["damping"])
    client = optax.sgd(h.get("client_rate", 0.02))
    return fedavg(
        loss_fn,
        cohort_size=participants,
        client_optimizer=client,
        server_optimizer=server,
        chunk_size=1,
    )
