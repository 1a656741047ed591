"""Methods for clients as configuration: functions of `fedpax.algorithms`, with settings."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax import algorithms
from fedpax.aggregators import Aggregator, mean, private_mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Params
from fedpax.algorithms import local_steps
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.checks import DECAY, POSITIVE
from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError
from fedpax.settings.function_settings import FunctionSettings, accepted, is_choice, passes_on


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

    def arguments(self, loss_fn: LossFn) -> dict[str, Any]:
        """Return the arguments that a method can have beside its settings."""
        return {
            "loss_fn": loss_fn,
            "client_optimizer": optax.sgd(self.learning_rate),
            "client_learning_rate": self.learning_rate,
        } | {name: value for name, value in self._asdict().items() if name != "learning_rate"}


@dataclasses.dataclass(frozen=True)
class MethodConfig(FunctionSettings):
    """A method for clients; the base class of the methods."""

    group = "method"
    given: ClassVar[Mapping[str, Any]] = ClientTraining(
        # A learning rate near 0 fits every setting that limits it.
        cohort_size=1,
        num_clients=1,
        learning_rate=1e-30,
        server_optimizer=optax.sgd(1.0),
        chunk_size=1,
    ).arguments(lambda params, batch: (params, {}))
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fedprox": {"mu": 0.1},
        "feddyn": {"alpha": 0.1},
        "agnostic": {"mixture_learning_rate": 0.001},
        "_fedac": {"strong_convexity": 0.1, "local_steps": 10},
        "ditto": {"lam": 0.1},
        "apfl": {"mixing": 0.5},
        "hypcluster": {"num_clusters": 2},
        "per_fedavg": {"adaptation_learning_rate": 0.1},
        "reptile": {"meta_learning_rate": 0.5},
    }

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        """Return the methods of `fedpax.algorithms` for clients, by name."""
        methods = {name: getattr(algorithms, name) for name in algorithms.__all__}
        methods |= {
            f.__name__.strip("_"): f for f in (_fedac, _MIME, _MIME_LITE, _self_tuning_fedavg)
        }
        return {
            name: method
            for name, method in methods.items()
            if inspect.isfunction(method)
            and "cohort_size" in inspect.signature(method).parameters
            and is_choice(method, cls.given, FederatedAlgorithm)
        }

    @property
    def has_server_optimizer(self) -> bool:
        """Tell whether the method takes the experiment's server optimizer."""
        return "server_optimizer" in inspect.signature(self.function).parameters

    @property
    def has_aggregator(self) -> bool:
        """Tell whether the method takes the experiment's aggregator."""
        return "aggregator" in inspect.signature(self.function).parameters

    def example(self, given: Mapping[str, Any] = types.MappingProxyType({})) -> FederatedAlgorithm:
        """Make the algorithm with some values of `given`, to read its attributes."""
        algorithm: FederatedAlgorithm = self.call({**self.given, **given})
        return algorithm

    @property
    def sent_exactly(self) -> str | None:
        """Return `FederatedAlgorithm.sent_exactly` of the method with a private aggregator."""
        private = private_mean(max_norm=1, noise_multiplier=1, seed=0)
        return self.example({"aggregator": private}).sent_exactly

    @property
    def has_own_models(self) -> bool:
        """Tell whether each client has a model of its own."""
        algorithm = self.example()
        return algorithm.kept_models is not None or algorithm.adapted_model is not None

    @property
    def has_shared_model(self) -> bool:
        """Tell whether the algorithm's state has one model, without clusters."""
        return not hasattr(self, "num_clusters")

    def make(self, loss_fn: LossFn, settings: ClientTraining) -> FederatedAlgorithm:
        """Make the algorithm, whose aggregator must fit it."""
        algorithm: FederatedAlgorithm = self.call(settings.arguments(loss_fn))
        if settings.aggregator is not None and settings.aggregator.accountant is not None:
            self.check_private("a private aggregator", algorithm.sent_exactly)
        if settings.aggregator not in (None, mean()) and not self.has_aggregator:
            name = self.function.__name__
            raise ArgumentError(
                f"The aggregator has no effect: {name}() has no argument aggregator, and combines "
                "updates itself. Add the argument to the function, or leave the aggregator out."
            )
        return algorithm

    def check_private(self, combine: str, sent_exactly: str | None) -> None:
        """Check that a private aggregator adds noise to everything that changes the model."""
        name = self.function.__name__.strip("_")
        if not self.has_aggregator:
            raise ArgumentError(
                f"method={name} with {combine}: {name}() has no argument aggregator, so that "
                "nothing gets noise, and no epsilon holds. Add the argument to the function, or "
                "leave the aggregator out."
            )
        if sent_exactly is None:
            return
        choices = map(MethodConfig.of, self.functions())
        made = [choice() for choice in choices if not choice.required()]
        covered = [m for m in made if m.has_aggregator and m.sent_exactly is None]
        names = ", ".join(m.function.__name__.strip("_") for m in covered)
        raise ArgumentError(
            f"method={name} with {combine}: clients send {sent_exactly} too, which change the "
            "model and have no noise, so that no epsilon holds. Set --method to one of "
            f"{names}, or set another --aggregator, such as secure_mean."
        )

    def make_init(self, init: Callable[[jax.Array], Params]) -> Callable[[jax.Array], Params]:
        """Make the initial parameters: one model, or one for each cluster from its own key."""
        if self.has_shared_model:
            return init
        count = self.num_clusters  # type: ignore[attr-defined]  # an argument of hypcluster
        return lambda key: jax.vmap(init)(jax.random.split(key, count))

    def personal_models(
        self, loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort
    ) -> Params:
        """Return the clients' own models `[clients, ...]`; the shared one if there are none."""
        given = {"loss_fn": loss_fn, "client_learning_rate": learning_rate}
        algorithm = self.example({**given, "client_optimizer": optax.sgd(learning_rate)})
        if algorithm.kept_models is not None:
            return algorithm.kept_models(state, jnp.asarray(cohort.client_ids))
        adapted = algorithm.adapted_model or (lambda state, batches, num_steps: state.params)
        return _of_each_client(functools.partial(adapted, state), cohort)


def method(function: str | Callable[..., FederatedAlgorithm], **settings: Any) -> MethodConfig:
    """Configure a method, for the field `method` of an experiment.

    The command line then takes `--method=scaffold --method.option=I`.

    Args:
        function: the name of a method, or a function of one's own with the arguments `loss_fn`,
            `cohort_size`, and any of `client_optimizer`, `client_learning_rate`, `num_clients`,
            `server_optimizer`, `aggregator` and `chunk_size`. Its other arguments are numbers,
            texts or choices, or have defaults.
        **settings: values of these other arguments.

    Raises:
        ValueError: there is no such method, or a setting is out of range.

    Example:
        >>> method("scaffold", option="I").option
        'I'
    """
    return MethodConfig.configure(function, settings)


def __getattr__(name: str) -> Any:
    """Return the configuration class of a method, as older runs name it."""
    return MethodConfig.named(name)


@passes_on(algorithms.fedac, algorithms.fedac_i, sets=("rates", "learning_rate"))
def _fedac(*, client_learning_rate: float, **arguments: Any) -> FederatedAlgorithm:
    """Take accelerated local steps (FedAc-I), with the clients' learning rate as eta."""
    rates = algorithms.fedac_i(client_learning_rate, **accepted(algorithms.fedac_i, arguments))
    return algorithms.fedac(rates=rates, **accepted(algorithms.fedac, arguments))


def _with_momentum(mime: Callable[..., FederatedAlgorithm]) -> Callable[..., FederatedAlgorithm]:
    """Make Mime or MimeLite with SGD on the clients, whose momentum the server holds."""

    def method(
        *, client_learning_rate: float, momentum: float = 0.9, **arguments: Any
    ) -> FederatedAlgorithm:
        check_setting(mime.__name__, "momentum", momentum, DECAY, remedy="Pass 0.9, as the paper.")
        return mime(client_optimizer=optax.sgd(client_learning_rate, momentum), **arguments)

    summary = (inspect.getdoc(mime) or "").partition("\n")[0]
    method.__name__ = mime.__name__
    method.__doc__ = f"{summary}\n\nArgs:\n    momentum: momentum of the clients' SGD."
    return passes_on(mime, sets=("client_optimizer",))(method)


_MIME, _MIME_LITE = _with_momentum(algorithms.mime), _with_momentum(algorithms.mime_lite)


@passes_on(algorithms.fedavg, sets=("server_optimizer",))
def _self_tuning_fedavg(  # noqa: D417, --help shows the arguments that it states
    *, server_learning_rate: float = 0.5, damping: float = 0.5, **arguments: Any
) -> FederatedAlgorithm:
    """Train with FedAvgM, and tune the server's learning rate and momentum after each round.

    Args:
        server_learning_rate: learning rate of the server in the first round.
        damping: 1 minus the server's momentum in the first round.
    """
    start = {"server_learning_rate": server_learning_rate, "damping": damping}
    for name, value in start.items():
        check_setting("self_tuning_fedavg", name, value, POSITIVE, remedy="Pass 0.5.")

    def make_fedavg(h: Mapping[str, Any]) -> FederatedAlgorithm:
        optimizer = optax.sgd(h["learning_rate"], momentum=1 - h["damping"])
        return algorithms.fedavg(server_optimizer=optimizer, **arguments)

    start = {"learning_rate": server_learning_rate, "damping": damping}
    return algorithms.self_tuning(make_fedavg, start, **accepted(algorithms.self_tuning, arguments))


def fine_tuned_models(loss_fn: LossFn, learning_rate: float, state: Any, cohort: Cohort) -> Params:
    """Take the local steps of one more round from the shared model, for any method."""
    optimizer = optax.sgd(learning_rate)

    def train(batches: chex.ArrayTree, num_steps: Any) -> Params:
        start = optimizer.init(state.params)
        return local_steps(loss_fn, optimizer, state.params, start, batches, num_steps)[0]

    return _of_each_client(train, cohort)


def _of_each_client(personalize: Callable[[chex.ArrayTree, Any], Params], cohort: Cohort) -> Params:
    size = jax.tree.leaves(cohort.batches)[0].shape[0]
    return jax.vmap(personalize, axis_size=size)(cohort.batches, cohort.num_steps)
