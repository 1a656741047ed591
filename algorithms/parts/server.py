"""The server's part of a round: aggregate pseudo-gradients, and step along the result."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.aggregators import Aggregator, mean
from fedpax.aggregators.aggregator import Weights, without_epsilon
from fedpax.algorithm import Metrics, Params, describe_value, is_scalar
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves, keep_leaves, without_frozen_leaves
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.algorithms.parts.method_checks import check_no_keys, check_optimizer
from fedpax.algorithms.parts.participation import mean_metrics
from fedpax.algorithms.parts.tree_arithmetic import select
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_sum
from fedpax.primitives.monoids import weight_dtype

State = TypeVar("State", bound=Any)
Tree = TypeVar("Tree", bound=chex.ArrayTree)


class Server(NamedTuple):
    """The server of a method that averages: an aggregator, then an optimizer."""

    # It replaces `params`, `server_optimizer_state` and `aggregator_state` in a method's state.

    optimizer: optax.GradientTransformation
    aggregator: Aggregator
    client_optimizer: optax.GradientTransformation | None = None  # what it freezes stays
    # as in `FederatedAlgorithm`; the aggregator then states no epsilon
    sent_exactly: str | None = None

    def init(self, params: Params) -> tuple[optax.OptState, chex.ArrayTree]:
        """Return the initial `server_optimizer_state` and `aggregator_state`. Inside a program."""
        check_no_keys(params)
        return self.optimizer.init(params), self.aggregator.init(params)

    def aggregate(
        self, state: State, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, State, Metrics]:
        """Combine placed updates, and return the state with the aggregator's new state."""
        aggregated, aggregator_state, metrics = self.aggregator.aggregate(
            state.aggregator_state, updates, weights
        )
        return aggregated, state._replace(aggregator_state=aggregator_state), metrics

    def descend(self, state: State, pseudo_gradient: Params, weights: Weights) -> State:
        """Step the model along a pseudo-gradient, unless all participants are absent."""
        before = state.params, state.server_optimizer_state
        x, stepped_state = optimizer_step(self.optimizer, pseudo_gradient, before[1], before[0])
        if self.client_optimizer is not None:
            x = keep_leaves(frozen_leaves(self.client_optimizer, before[0]), x, before[0])
        stepped = x, stepped_state
        params, optimizer_state = unless_all_absent(weights, stepped, before, self.aggregator)
        return state._replace(params=params, server_optimizer_state=optimizer_state)

    def step(
        self, state: State, pseudo_gradients: Params, metrics: Metrics, weights: Weights
    ) -> tuple[State, Metrics]:
        """End a round: aggregate, step, and average the participants' metrics by weight."""
        weights = as_floats(weights)
        pseudo_gradient, state, reported = self.aggregate(state, pseudo_gradients, weights)
        metrics = mean_metrics(metrics, weights, self.aggregator, reported)
        return self.descend(state, pseudo_gradient, weights), metrics


def unless_all_absent(
    weights: Weights, stepped: Tree, before: Tree, aggregator: Aggregator
) -> Tree:
    """Return the result of a server's step; the state before it if no participant takes part."""
    # Momentum would otherwise move the model. Inside a program. Without weights, each takes part.
    if weights is None or aggregator.acts_when_all_absent:
        return stepped
    total = federated_sum(as_floats(weights))  # the mean's own sum: nothing more is sent
    return select(total != 0, stepped, before)


def as_floats(weights: Weights) -> Float[Array, " participants"] | None:
    """Return weights in the dtype of their sum, so that all reductions of a round share the sum."""
    if weights is None:
        return None
    return weights.astype(weight_dtype(weights.dtype))


def make_server(
    method: str,
    optimizer: optax.GradientTransformation | None,
    aggregator: Aggregator | None,
    client_optimizer: optax.GradientTransformation,
    *,
    sent_exactly: str | None = None,
) -> Server:
    """Check a method's optimizers, and make its server: by default, it takes the weighted mean."""
    check_optimizer(method, "client_optimizer", client_optimizer)
    check_optimizer(method, "server_optimizer", optimizer, optional=True)
    given = given_aggregator(aggregator, mean(), client_optimizer)
    return Server(
        optax.sgd(1.0) if optimizer is None else optimizer,
        given if sent_exactly is None else without_epsilon(given),
        client_optimizer,
        sent_exactly,
    )


def outer_sgd(
    method: str,
    optimizer: optax.GradientTransformation | None,
    learning_rate: float,
    momentum: float = 0.9,
) -> optax.GradientTransformation:
    """Check a method's outer optimizer, and return it; for None, SGD with Nesterov momentum."""
    check_optimizer(method, "outer_optimizer", optimizer, optional=True)
    default = optax.sgd(learning_rate, momentum=momentum, nesterov=True)
    return default if optimizer is None else optimizer


def given_aggregator(
    aggregator: Any,
    default: Aggregator,
    optimizer: optax.GradientTransformation | None = None,
) -> Aggregator:
    """Return the aggregator that a method was given, with its result checked, or its default."""
    if aggregator is None:
        return default
    if not isinstance(aggregator, Aggregator):
        name = getattr(aggregator, "__name__", None)
        argument = f"the function {name}" if name else f"a {type(aggregator).__name__}"
        raise ArgumentTypeError(
            f"aggregator is {argument}, expected a fedpax.aggregators.Aggregator. Call a function "
            "that makes one, as in coordinate_median(). End a transformation in an aggregator, as "
            "in chain(clip_by_norm(1.0), mean())."
        )
    checked = checked_aggregator(aggregator)
    return checked if optimizer is None else without_frozen_leaves(checked, optimizer)


def checked_aggregator(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator that checks what `aggregate` returns, by types and shapes alone."""

    def aggregate(
        state: chex.ArrayTree, updates: chex.ArrayTree, weights: Weights
    ) -> tuple[chex.ArrayTree, chex.ArrayTree, Metrics]:
        returned = aggregator.aggregate(state, updates, weights)
        if not isinstance(returned, tuple) or len(returned) != 3:
            raise ArgumentTypeError(
                f"aggregator.aggregate returned {describe_value(returned)}, expected (aggregated, "
                "state, metrics). Return {} as metrics if there are none."
            )
        _check_aggregated(returned[0], updates)
        _check_metrics(returned[2])
        return returned

    return aggregator._replace(aggregate=aggregate)


def _check_aggregated(aggregated: Any, updates: chex.ArrayTree) -> None:
    expected: Any = jax.tree.structure(updates)
    actual: Any = jax.tree.structure(aggregated)
    if actual != expected:
        raise ArgumentTypeError(
            f"aggregator.aggregate returned an aggregate of the structure {actual}, expected that "
            f"of the updates, {expected}. Return one array for each array of the updates."
        )
    leaves = zip(jax.tree.leaves_with_path(aggregated), jax.tree.leaves(updates), strict=True)
    for (path, leaf), update in leaves:
        shape, wanted = list(jnp.shape(leaf)), list(jnp.shape(update)[1:])
        if shape != wanted:
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ArgumentError(
                f"aggregator.aggregate returned an aggregate of shape {shape}{at}, expected "
                f"{wanted}: the shape of the updates without their axis of participants. Reduce "
                "the updates, as in fedpax.federated_mean(updates, weights)."
            )


def _check_metrics(metrics: Any) -> None:
    if not isinstance(metrics, Mapping):
        raise ArgumentTypeError(
            f"aggregator.aggregate returned {describe_value(metrics)} as metrics, expected a dict "
            "of scalars. Return {} if there are none."
        )
    if "loss" in metrics:
        raise ArgumentError(
            "aggregator.aggregate returned a metric called 'loss', the name of the training loss. "
            "Rename it."
        )
    for name, value in metrics.items():
        if not is_scalar(value):
            raise ArgumentTypeError(
                f"aggregator.aggregate returned a metric {name!r} of {describe_value(value)}, "
                "expected a scalar. Reduce it, as in fedpax.federated_mean(values, weights)."
            )
