"""Programs that no method of fedpax has, for every engine: written as a user would write them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedpax
from fedpax import federated_map, federated_max, federated_mean, federated_sum
from fedpax.algorithm import FederatedAlgorithm
from fedpax.deploy import EachClient

N, STEPS, BATCH, FEATURES = 3, 2, 4, 5


class Personal(NamedTuple):
    """The shared body, and the head of each participant, which stays there."""

    body: Any
    heads: Any


@fedpax.program(clients=N)
def fedprox_with_personal_heads(state, cohort):
    """Train a shared body near the server's, and a head that no message has."""

    def local(head, batches, num_examples):
        def loss(both, batch):
            body, head = both
            hidden = jnp.tanh(batch["x"] @ body["w"] + body["b"])
            error = jnp.mean((hidden @ head - batch["y"]) ** 2)
            far = sum(
                jnp.sum((x - y) ** 2)
                for x, y in zip(jax.tree.leaves(body), jax.tree.leaves(state.body), strict=True)
            )
            return error + 0.05 * far

        def step(both, batch):
            value, gradient = jax.value_and_grad(loss)(both, batch)
            return jax.tree.map(lambda x, g: x - 0.1 * g, both, gradient), value

        (body, head), losses = jax.lax.scan(step, (state.body, head), batches)
        delta = jax.tree.map(jnp.subtract, body, state.body)
        return delta, head, losses.mean(), num_examples

    delta, heads, losses, weights = federated_map(
        local, state.heads, cohort.batches, cohort.num_examples
    )
    mean = federated_mean(delta, weights=weights)
    after = Personal(jax.tree.map(jnp.add, state.body, mean), heads)
    return after, {"loss": federated_mean(losses, weights=weights), "worst": federated_max(losses)}


class Linear(NamedTuple):
    """A linear model and its momentum."""

    w: Any
    momentum: Any


@fedpax.program(clients=N)
def standardized_regression(state, cohort):
    """Standardize with means of all participants, then take a step on the standardized data."""

    def moments(batches):
        x = batches["x"].reshape(-1, FEATURES)
        return x.mean(axis=0), (x**2).mean(axis=0)

    first, second = federated_mean(
        federated_map(moments, cohort.batches), weights=cohort.num_examples
    )
    deviation = jnp.sqrt(second - first**2)

    def gradient(batches):
        x = (batches["x"].reshape(-1, FEATURES) - first) / deviation
        error = x @ state.w - batches["y"].reshape(-1)
        return x.T @ error / len(x), jnp.mean(error**2)

    mean, loss = federated_mean(
        federated_map(gradient, cohort.batches), weights=cohort.num_examples
    )
    momentum = 0.9 * state.momentum + mean
    return Linear(state.w - 0.1 * momentum, momentum), {"loss": loss, "deviation": deviation.max()}


@fedpax.program(clients=N)
def clipped_at_a_weighted_quantile(state, cohort):
    """Clip updates at the weighted 0.6 quantile of their norms, found by three halvings."""

    def local(batches):
        x = batches["x"].reshape(-1, FEATURES)
        return x.T @ (batches["y"].reshape(-1) - x @ state.w) / len(x)

    updates = federated_map(local, cohort.batches)
    norms = federated_map(jnp.linalg.norm, updates)
    total = federated_sum(cohort.num_examples)
    low, high = jnp.zeros(()), federated_max(norms)
    for _ in range(3):
        middle = (low + high) / 2
        share = federated_sum(
            federated_map(
                lambda n, k, m=middle: jnp.where(n <= m, k, 0), norms, cohort.num_examples
            )
        )
        low, high = jax.tree.map(
            lambda x, y, is_less=share < 0.6 * total: jnp.where(is_less, x, y),
            (middle, high),
            (low, middle),
        )
    clipped = federated_map(
        lambda u, n: u * jnp.minimum(1, high / jnp.maximum(n, 1e-12)), updates, norms
    )
    mean = federated_mean(clipped, weights=cohort.num_examples)
    return Linear(state.w + 0.1 * mean, state.momentum), {"clip": high, "norms": jnp.sort(norms)}


def init_personal(params):
    heads = np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32)
    return Personal(params, jnp.asarray(heads))


def init_linear(params):
    return Linear(params["w"][:, 0], jnp.zeros(FEATURES))


def init_params(key):
    return {"w": jax.random.normal(key, (FEATURES, 3)), "b": jnp.ones(3)}


PROGRAMS = {
    "personal heads": FederatedAlgorithm(init_personal, fedprox_with_personal_heads),
    "standardized": FederatedAlgorithm(init_linear, standardized_regression),
    "weighted quantile": FederatedAlgorithm(init_linear, clipped_at_a_weighted_quantile),
}
STAGES = {"personal heads": 1, "standardized": 2, "weighted quantile": 5}


def cohort_of(participant):
    """The data of a participant, of its own scale."""
    random = np.random.default_rng((3, participant))
    x = (1 + participant) * random.normal(size=(STEPS, BATCH, FEATURES)) + participant
    y = x.sum(axis=2) * 0.2 + random.normal(size=(STEPS, BATCH))
    batches = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return fedpax.Cohort(batches, num_examples=np.float32(5 + 3 * participant))


def open_clients():
    return EachClient(cohort_of, N)


def load_data(node):
    """The data of a participant on a node, whichever the round."""
    cohort = jax.tree.map(lambda x: np.asarray(x)[None], cohort_of(node.participant))
    return lambda number: cohort


def state_of(name, seed=0):
    return PROGRAMS[name].init(init_params(jax.random.key(seed)))
