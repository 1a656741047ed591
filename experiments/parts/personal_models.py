"""The clients' own models of methods for personal models."""

from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.algorithm import LossFn, Params
from fedpax.algorithms import apfl_models, choose_cluster, local_steps
from fedpax.algorithms.parts.local_steps import full_gradient
from fedpax.clients import gather_clients
from fedpax.clients.cohort import Cohort

PersonalModels = Callable[[Any, LossFn, float, Any, Cohort], Params]
"""`(settings of a method, loss_fn, learning rate, state, cohort) -> models [clients, ...]`."""


def shared_model(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Give each client the shared model."""
    return _of_each_client(lambda batches, num_steps: state.params, cohort)


def _ditto(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Read the models that clients keep."""
    return gather_clients(state.personal_params, jnp.asarray(cohort.client_ids))


def _apfl(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Mix the shared model and the models that clients keep."""
    return apfl_models(state, jnp.asarray(cohort.client_ids))


def _hypcluster(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Choose for each client the model with the least loss on its training batches."""

    def choose(batches: chex.ArrayTree, num_steps: Any) -> Params:
        cluster = choose_cluster(loss_fn, state.params, batches, num_steps)
        return jax.tree.map(lambda p: p[cluster], state.params)

    return _of_each_client(choose, cohort)


def _per_fedavg(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Take one step along the gradient of all training batches of each client."""

    def adapt(batches: chex.ArrayTree, num_steps: Any) -> Params:
        gradient = full_gradient(loss_fn, state.params, batches, num_steps)
        rate = settings.adaptation_learning_rate
        return jax.tree.map(lambda p, g: p - rate * g, state.params, gradient)

    return _of_each_client(adapt, cohort)


def _reptile(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> Params:
    """Take the local steps of a round."""
    optimizer = optax.sgd(learning_rate)

    def train(batches: chex.ArrayTree, num_steps: Any) -> Params:
        start = optimizer.init(state.params)
        return local_steps(loss_fn, optimizer, state.params, start, batches, num_steps)[0]

    return _of_each_client(train, cohort)


fine_tuned_models: PersonalModels = _reptile
"""Models that take the local steps of one more round from the shared model, for any method."""


def sum_fine_tuned(
    settings: Any, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
) -> tuple[Params, chex.Array]:
    """Add up the fine-tuned models of clients, weighted by their examples, and the weights."""
    models = fine_tuned_models(settings, loss_fn, learning_rate, state, cohort)
    weights = jnp.float32(cohort.num_examples)
    return jax.tree.map(lambda x: jnp.tensordot(weights, x, 1), models), weights.sum()


KEPT = ("ditto", "apfl")
"""Methods whose own models are kept between rounds, and not made from training batches."""

MODELS: Mapping[str, PersonalModels] = {
    "ditto": _ditto,
    "apfl": _apfl,
    "hypcluster": _hypcluster,
    "per_fedavg": _per_fedavg,
    "reptile": _reptile,
}
"""How the clients' own models are made, by the name of the method."""


def _of_each_client(personalize: Callable[[chex.ArrayTree, Any], Params], cohort: Cohort) -> Params:
    """Call a function on the batches and the number of steps of each client."""
    size = jax.tree.leaves(cohort.batches)[0].shape[0]
    return jax.vmap(personalize, axis_size=size)(cohort.batches, cohort.num_steps)
