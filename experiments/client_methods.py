"""Methods for clients as configuration: each makes its algorithm for an experiment's clients."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import chex
import jax
import optax
from jaxtyping import Array, Int

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import (
    agnostic,
    fedac,
    fedac_i,
    fedavg,
    feddyn,
    fednova,
    fedprox,
    mime,
    mime_lite,
    scaffold,
    self_tuning,
)
from fedpax.checks import COUNT, DECAY, NON_NEGATIVE, POSITIVE, check_ranges
from fedpax.clients.cohort import Cohort


class ClientTraining(NamedTuple):
    """The settings that all methods share.

    Attributes:
        cohort_size: number of clients in a round.
        num_clients: number of clients in the population.
        learning_rate: learning rate of the clients' SGD.
        server_optimizer: the server optimizer.
        chunk_size: number of clients that a device runs at once.
        aggregator: combines the clients' updates. Default None: the weighted mean.
    """

    cohort_size: int
    num_clients: int
    learning_rate: float
    server_optimizer: optax.GradientTransformation
    chunk_size: int
    aggregator: Aggregator | None = None

    @property
    def shared_arguments(self) -> dict[str, Any]:
        """Return the arguments of all methods: the size of a round, and its aggregator."""
        return {
            "cohort_size": self.cohort_size,
            "chunk_size": self.chunk_size,
            "aggregator": self.aggregator,
        }

    def arguments(self, momentum: float | None = None) -> dict[str, Any]:
        """Return the arguments of a method with SGD on the clients and an optimizer on the server.

        Args:
            momentum: momentum of the clients' SGD. Default None: no momentum.
        """
        return {
            **self.shared_arguments,
            "client_optimizer": optax.sgd(self.learning_rate, momentum),
            "server_optimizer": self.server_optimizer,
        }

    @property
    def stored_arguments(self) -> dict[str, Any]:
        """Return the arguments of a method that keeps a state for each client."""
        return {**self.arguments(), "num_clients": self.num_clients}


class PersonalTraining(NamedTuple):
    """Inputs of a client's own model.

    Attributes:
        loss_fn: the clients' loss.
        learning_rate: learning rate of the clients' SGD.
        params: the parameters of the algorithm's state.
        batches: the client's training batches, a pytree of arrays `[steps, batch, ...]`.
        num_steps: number of the first batches that are valid. None: all.
    """

    loss_fn: LossFn
    learning_rate: float
    params: Params
    batches: chex.ArrayTree
    num_steps: Int[Array, ""] | None


@dataclasses.dataclass(frozen=True)
class MethodConfig(abc.ABC):
    """A method for clients; the base class of the methods.

    Attributes:
        has_server_optimizer: whether the method takes the experiment's server optimizer.
        has_shared_model: whether the parameters of the algorithm's state are one model.
    """

    has_server_optimizer: ClassVar[bool] = True
    has_shared_model: ClassVar[bool] = True

    @abc.abstractmethod
    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make the algorithm.

        Args:
            loss_fn: the clients' loss.
            settings: the settings that all methods share.
        """

    def make_init(self, init: Callable[[jax.Array], Params]) -> Callable[[jax.Array], Params]:
        """Make the initial parameters of the algorithm, by default those of one model.

        Args:
            init: `key -> params` of one model.
        """
        return init

    def personalize(self, inputs: PersonalTraining) -> Params:
        """Make a client's own model from the server's parameters, by default the shared model.

        Args:
            inputs: the server's parameters, and the client's batches.
        """
        return inputs.params

    def personal_models(
        self, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
    ) -> Params:
        """Return the own models of clients, by default those that `personalize` makes.

        Args:
            loss_fn: the clients' loss.
            learning_rate: learning rate of the clients' SGD.
            state: the algorithm's state.
            cohort: the clients, with their ids and training batches `[clients, steps, batch, ...]`.

        Returns:
            A pytree of arrays `[clients, ...]`.
        """

        def personalize(batches: chex.ArrayTree, num_steps: Any) -> Params:
            return self.personalize(
                PersonalTraining(loss_fn, learning_rate, state.params, batches, num_steps)
            )

        size = jax.tree.leaves(cohort.batches)[0].shape[0]
        return jax.vmap(personalize, axis_size=size)(cohort.batches, cohort.num_steps)


@dataclasses.dataclass(frozen=True)
class FedAvg(MethodConfig):
    """FedAvg, or with another server optimizer FedAvgM, FedAdagrad, FedAdam or FedYogi."""

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make FedAvg."""
        return fedavg(loss_fn, **settings.arguments())


@dataclasses.dataclass(frozen=True)
class FedProx(MethodConfig):
    """FedProx.

    Attributes:
        mu: weight of the proximal term.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", mu=NON_NEGATIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make FedProx."""
        return fedprox(loss_fn, mu=self.mu, **settings.arguments())


@dataclasses.dataclass(frozen=True)
class Scaffold(MethodConfig):
    """SCAFFOLD.

    Attributes:
        option: how a client updates its control variate. "I" computes one more gradient per batch.
    """

    option: Literal["I", "II"] = "II"

    def __post_init__(self) -> None:
        """Check the option."""
        check_ranges(self, "method")

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make SCAFFOLD."""
        return scaffold(loss_fn, option=self.option, **settings.stored_arguments)


@dataclasses.dataclass(frozen=True)
class FedDyn(MethodConfig):
    """FedDyn.

    Attributes:
        alpha: weight of the dynamic regularizer.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", alpha=POSITIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make FedDyn."""
        return feddyn(loss_fn, alpha=self.alpha, **settings.stored_arguments)


@dataclasses.dataclass(frozen=True)
class FedNova(MethodConfig):
    """FedNova."""

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make FedNova."""
        return fednova(loss_fn, **settings.arguments())


@dataclasses.dataclass(frozen=True)
class Mime(MethodConfig):
    """Mime with SGD and momentum.

    Attributes:
        momentum: momentum of the clients' SGD, which the server holds.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", momentum=DECAY)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make Mime."""
        return mime(loss_fn, **settings.arguments(self.momentum))


@dataclasses.dataclass(frozen=True)
class MimeLite(Mime):
    """MimeLite with SGD and momentum."""

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make MimeLite."""
        return mime_lite(loss_fn, **settings.arguments(self.momentum))


@dataclasses.dataclass(frozen=True)
class FedAc(MethodConfig):
    """FedAc-I. It has no server optimizer.

    Attributes:
        strong_convexity: the loss's strong convexity, or a guess.
        local_steps: number of local steps of a client in a round, or their mean.
    """

    strong_convexity: float = 0.1
    local_steps: int = 10
    has_server_optimizer = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "method", strong_convexity=POSITIVE, local_steps=COUNT)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make FedAc, with the clients' learning rate as eta."""
        rates = fedac_i(
            settings.learning_rate,
            strong_convexity=self.strong_convexity,
            local_steps=self.local_steps,
        )
        return fedac(loss_fn, rates=rates, **settings.shared_arguments)


@dataclasses.dataclass(frozen=True)
class Agnostic(MethodConfig):
    """Agnostic federated learning: minimizes the loss of the worst mixture of clients.

    Attributes:
        mixture_learning_rate: learning rate of the mixture.
    """

    mixture_learning_rate: float = 0.001

    def __post_init__(self) -> None:
        """Check the range."""
        check_ranges(self, "method", mixture_learning_rate=POSITIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make agnostic federated learning."""
        return agnostic(
            loss_fn, mixture_learning_rate=self.mixture_learning_rate, **settings.stored_arguments
        )


@dataclasses.dataclass(frozen=True)
class SelfTuningFedAvg(MethodConfig):
    """FedAvgM that tunes the server's learning rate and momentum. It sets the server optimizer.

    Attributes:
        server_learning_rate: learning rate of the server in the first round.
        damping: 1 minus the server's momentum in the first round.
    """

    server_learning_rate: float = 0.5
    damping: float = 0.5
    has_server_optimizer = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(self, "method", server_learning_rate=POSITIVE, damping=POSITIVE)

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make the method."""

        def make_fedavg(h: Mapping[str, Any]) -> FederatedAlgorithm:
            server = optax.sgd(h["learning_rate"], momentum=1 - h["damping"])
            return fedavg(loss_fn, **{**settings.arguments(), "server_optimizer": server})

        start = {"learning_rate": self.server_learning_rate, "damping": self.damping}
        return self_tuning(make_fedavg, start, loss_fn, chunk_size=settings.chunk_size)
