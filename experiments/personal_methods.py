"""Methods for personal models as configuration: each also makes the own models of clients."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import (
    apfl,
    apfl_models,
    choose_cluster,
    ditto,
    hypcluster,
    per_fedavg,
    reptile,
)
from fedpax.algorithms.parts.local_evaluation import full_gradient
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.checks import COUNT, FRACTION, NON_NEGATIVE, POSITIVE, check_ranges
from fedpax.clients import gather_clients
from fedpax.clients.cohort import Cohort
from fedpax.experiments.client_methods import ClientTraining, MethodConfig, PersonalTraining


@dataclasses.dataclass(frozen=True)
class Ditto(MethodConfig):
    """Ditto: FedAvg, and beside it a model for each client.

    Attributes:
        lam: weight of the distance between a client's model and the shared one.
    """

    lam: float = 0.1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", lam=NON_NEGATIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make Ditto."""
        return ditto(loss_fn, lam=self.lam, **settings.stored_arguments)

    def personal_models(
        self, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
    ) -> Params:
        """Return the models that clients keep."""
        return gather_clients(state.personal_params, jnp.asarray(cohort.client_ids))


@dataclasses.dataclass(frozen=True)
class APFL(MethodConfig):
    """APFL: FedAvg, and beside it a local model for each client, mixed with the shared one.

    Attributes:
        mixing: share of the local model in a client's mixture, in the first round.
        mixing_learning_rate: learning rate of this share. 0: it is fixed.
    """

    mixing: float = 0.5
    mixing_learning_rate: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "method", mixing=FRACTION, mixing_learning_rate=NON_NEGATIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make APFL."""
        return apfl(
            loss_fn,
            mixing=self.mixing,
            mixing_learning_rate=self.mixing_learning_rate,
            **settings.stored_arguments,
        )

    def personal_models(
        self, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
    ) -> Params:
        """Return the mixtures of the shared model and the models that clients keep."""
        return apfl_models(state, jnp.asarray(cohort.client_ids))


@dataclasses.dataclass(frozen=True)
class HypCluster(MethodConfig):
    """HypCluster: several shared models, of which each client trains the one that fits it best.

    The parameters have an axis of clusters in front. An experiment must make a model for each
    cluster, as `fedpax.experiments.personal_images.PersonalImages` does.

    Attributes:
        num_clusters: number of models.
    """

    num_clusters: int = 2
    has_shared_model = False

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", num_clusters=COUNT)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make HypCluster."""
        return hypcluster(loss_fn, num_clusters=self.num_clusters, **settings.arguments())

    def make_init(self, init: Callable[[jax.Array], Params]) -> Callable[[jax.Array], Params]:
        """Make the initial models from different random keys: equal models would stay equal."""
        return lambda key: jax.vmap(init)(jax.random.split(key, self.num_clusters))

    def personalize(self, inputs: PersonalTraining) -> Params:
        """Choose the model with the least loss on the client's training batches."""
        cluster = choose_cluster(inputs.loss_fn, inputs.params, inputs.batches, inputs.num_steps)
        return jax.tree.map(lambda p: p[cluster], inputs.params)


@dataclasses.dataclass(frozen=True)
class PerFedAvg(MethodConfig):
    """Per-FedAvg: a model from which one step on a client's data gives a good model.

    Attributes:
        adaptation_learning_rate: learning rate of this step.
        first_order: leave out the Hessian.
    """

    adaptation_learning_rate: float = 0.1
    first_order: bool = False

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", adaptation_learning_rate=NON_NEGATIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make Per-FedAvg."""
        return per_fedavg(
            loss_fn,
            adaptation_learning_rate=self.adaptation_learning_rate,
            first_order=self.first_order,
            **settings.arguments(),
        )

    def personalize(self, inputs: PersonalTraining) -> Params:
        """Take one step along the gradient of all training batches of the client."""
        gradient = full_gradient(inputs.loss_fn, inputs.params, inputs.batches, inputs.num_steps)
        rate = self.adaptation_learning_rate
        return jax.tree.map(lambda p, g: p - rate * g, inputs.params, gradient)


@dataclasses.dataclass(frozen=True)
class Reptile(MethodConfig):
    """Reptile, with clients as tasks. It sets the server optimizer.

    Attributes:
        meta_learning_rate: learning rate of the server.
    """

    meta_learning_rate: float = 0.5
    has_server_optimizer = False

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", meta_learning_rate=POSITIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make Reptile."""
        optimizer = optax.sgd(settings.learning_rate)
        rate = self.meta_learning_rate
        return reptile(
            loss_fn,
            client_optimizer=optimizer,
            meta_learning_rate=rate,
            **settings.shared_arguments,
        )

    def personalize(self, inputs: PersonalTraining) -> Params:
        """Take the local steps of a round."""
        optimizer = optax.sgd(inputs.learning_rate)
        start = optimizer.init(inputs.params)
        return local_steps(
            inputs.loss_fn, optimizer, inputs.params, start, inputs.batches, inputs.num_steps
        )[0]
