"""Arrivals: which islands of a round arrive at a server, and how it steps with their updates."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators import Aggregator, mean
from fedpax.aggregators.aggregator import without_epsilon
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.algorithms.parts.participation import mean_metrics, takes_part, without_absent
from fedpax.algorithms.parts.server import given_aggregator
from fedpax.algorithms.parts.tree_arithmetic import scale, select
from fedpax.checks import COUNT, FRACTION, NON_NEGATIVE, Range, check_argument
from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_map, federated_sum

Carry = TypeVar("Carry", bound=tuple[Any, ...])


def outer_gradients(
    outer_gradient: Callable[..., tuple[Params, optax.OptState, Metrics]],
    local_params: Params,
    inner_state: optax.OptState,
    cohort: Cohort,
    aggregator: Aggregator | None,
) -> tuple["ArrivingUpdates", optax.OptState, Bool[Array, " islands"], Metrics]:
    """Train each island that is present from its own model. Inside a program."""
    cohort = without_absent(cohort, cohort.client_ids)
    if cohort.schedule is not None:
        cohort = without_absent(cohort, cohort.schedule.position)
    gradients, inner_state, metrics = federated_map(
        outer_gradient, local_params, inner_state, cohort.batches, cohort.num_steps
    )
    sends = takes_part(cohort)
    weights = federated_map(lambda s: s.astype(jnp.float32), sends)
    metrics = mean_metrics(metrics, weights, mean() if aggregator is None else aggregator)
    if cohort.schedule is not None:
        metrics |= {"arrivals": federated_sum(weights)}
    return ArrivingUpdates(gradients, aggregator), inner_state, sends, metrics


class Combined(NamedTuple):
    """The carry from one combination of a round to the next."""

    state: chex.ArrayTree | None  # the state of the aggregator; None without one
    metrics: Metrics  # sums of the aggregator's metrics
    instants: Float[Array, ""]  # number of combinations with an update

    def mean_metrics(self) -> Metrics:
        """Average the aggregator's metrics over the combinations with an update."""
        return {name: value / jnp.maximum(self.instants, 1) for name, value in self.metrics.items()}


class ArrivingUpdates(NamedTuple):
    """The updates of a round's islands, combined a few at a time."""

    updates: Params
    aggregator: Aggregator | None  # combines those that arrive together; None: they are added up

    def start(self, state: chex.ArrayTree | None) -> Combined:
        """Return the carry before the first combination. Inside a program."""
        placed = jax.tree.leaves(self.updates)[0].shape[0]
        types = jax.eval_shape(lambda: self._aggregate(state, jnp.ones(placed))[2])
        zeros = jax.tree.map(lambda value: jnp.zeros(value.shape, value.dtype), types)
        return Combined(state, zeros, jnp.float32(0))

    def combine(
        self, arriving: Bool[Array, " islands"], before: Combined
    ) -> tuple[Params, Float[Array, ""], Combined]:
        """Combine the updates of the islands that arrive together. Inside a program."""
        # If no island arrives, the sum is 0 and the aggregator's state does not change.
        if self.aggregator is None:

            def send(update: Params, here: Bool[Array, ""]) -> tuple[Params, jax.Array]:
                sent = jax.tree.map(lambda u: jnp.where(here, u, jnp.zeros_like(u)), update)
                return sent, here.astype(jnp.float32)

            total, count = federated_sum(federated_map(send, self.updates, arriving))
            return total, count, before._replace(instants=before.instants + (count > 0))
        weights = federated_map(lambda here: here.astype(jnp.float32), arriving)
        count = federated_sum(weights)
        average, state, metrics = self._aggregate(before.state, weights)
        state = select(count > 0, state, before.state)
        metrics = jax.tree.map(
            lambda total, new: total + jnp.where(count > 0, new, 0), before.metrics, metrics
        )
        after = Combined(state, metrics, before.instants + (count > 0))
        return scale(count, average), count, after

    def _aggregate(
        self, state: chex.ArrayTree | None, weights: Float[Array, " islands"]
    ) -> tuple[Params, chex.ArrayTree | None, Metrics]:
        if self.aggregator is None:
            return self.updates, None, {}
        return self.aggregator.aggregate(state, self.updates, weights)


def is_at(position: Int[Array, ""] | None, k: Int[Array, ""] | None) -> Bool[Array, ""]:
    """Return whether an event is at position k; without a schedule, all events are."""
    return jnp.asarray(True if position is None else position == k)


def process_in_order(
    process: Callable[..., Carry], start: Carry, last: Int[Array, ""] | None
) -> Carry:
    """Call `process(k, *carry)` for the positions 0 to `last`; `process(None, *start)` for None."""
    if last is None:
        return process(None, *start)
    return jax.lax.fori_loop(0, last + 1, lambda k, carry: process(k, *carry), start)


def arrivals_aggregator(
    method: str, aggregator: Aggregator | None, optimizer: optax.GradientTransformation
) -> Aggregator | None:
    """Return an aggregator that can combine the updates of a few islands at a time."""
    if aggregator is None:
        return None
    checked = given_aggregator(aggregator, aggregator, optimizer)
    if checked.needs_all:
        raise ArgumentError(
            f"{method}(): the aggregator needs the updates of all islands at once, but islands "
            "arrive at different times. Use an aggregator that treats each update by itself, such "
            "as compressed_mean(codec) or chain(clip_by_norm(1.0), mean()), or a synchronous "
            "method, such as diloco."
        )
    return without_epsilon(checked)  # it would be averaged over the combinations of a round


class DelayedNesterovState(NamedTuple):
    """The state of delayed Nesterov."""

    momentum: Params  # m
    accumulated: Params  # the sum D of the gradients since the last update of the momentum
    arrivals: Float[Array, ""]  # their number, below the period


class DelayedNesterov(NamedTuple):
    """A server's optimizer for gradients that arrive one at a time, or some together.

    For a gradient g, the second line is for every N-th one, the first line for all others:

        x <- x - eta (g / N + c beta m);  D <- D + g
        m <- beta m + (D + g) / N;  x <- x - eta (g / N + (1 - c N + c) beta m);  D <- 0

    Gradients that arrive together count as an arrival each, and are applied before the momentum.

    Attributes:
        learning_rate: eta.
        momentum: beta, from 0 to 1.
        period: N, number of arrivals between updates of the momentum, at least 1.
        activation: c, from 0 to 1 / N: the share of the momentum that each arrival applies.

    Example:
        >>> outer = DelayedNesterov(learning_rate=0.5, momentum=0.9, period=1)  # plain Nesterov
        >>> outer.update(jnp.float32(2.0), jnp.float32(1.0), outer.init(0.0), jnp.float32(0.0))[0]
        Array(-1.9, dtype=float32)

    Reference:
        Liu et al., arXiv:2401.09135.
    """

    learning_rate: float
    momentum: float
    period: int
    activation: float = 0.0

    def init(self, params: Params) -> DelayedNesterovState:
        """Return the initial state: zeros."""
        zeros = optax.tree.zeros_like(params)
        return DelayedNesterovState(zeros, zeros, jnp.float32(0))

    def update(
        self, total: Params, count: Float[Array, ""], state: DelayedNesterovState, params: Params
    ) -> tuple[Params, DelayedNesterovState]:
        """Apply gradients that arrive together.

        Args:
            total: the sum of the gradients.
            count: their number, float32; with 0 nothing changes.
            state: the state.
            params: x.

        Returns:
            The new parameters and the new state.
        """
        arrivals = state.arrivals + count
        is_due = arrivals >= self.period
        accumulated = optax.tree.add(state.accumulated, total)
        updated = jax.tree.map(
            lambda m, d: self.momentum * m + d / self.period, state.momentum, accumulated
        )
        before = self.activation * jnp.where(is_due, count - 1, count)
        last = jnp.where(is_due, 1 - self.activation * (self.period - 1), 0.0)

        def move(x: jax.Array, g: jax.Array, old: jax.Array, new: jax.Array) -> jax.Array:
            step = g / self.period + self.momentum * (before * old + last * new)
            return (x - self.learning_rate * step).astype(x.dtype)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_due, new, old).astype(old.dtype)

        return jax.tree.map(move, params, total, state.momentum, updated), DelayedNesterovState(
            jax.tree.map(choose, updated, state.momentum),
            jax.tree.map(choose, optax.tree.zeros_like(accumulated), accumulated),
            jnp.where(is_due, arrivals % self.period, arrivals),
        )


def check_delayed_nesterov(method: str, name: str, server: DelayedNesterov) -> None:
    """Check that an argument is a `DelayedNesterov` with settings in range."""
    if not isinstance(server, DelayedNesterov):
        raise ArgumentTypeError(
            f"{method}(): {name} is a {type(server).__name__}, expected a DelayedNesterov. Pass "
            "for example fedpax.algorithms.DelayedNesterov(learning_rate=0.7, momentum=0.9, "
            "period=4)."
        )
    prefix = f"{name}." if name else ""
    remedy = "Pass for example 0.7."
    check_setting(
        method, f"{prefix}learning_rate", server.learning_rate, NON_NEGATIVE, remedy=remedy
    )
    remedy = "Pass 0.0 for no momentum."
    check_setting(method, f"{prefix}momentum", server.momentum, FRACTION, remedy=remedy)
    remedy = "Pass the number of participants that arrive between two updates of the momentum."
    check_argument(method, f"{prefix}period", server.period, COUNT, remedy=remedy)
    most, remedy = 1 / server.period, "Pass 0.0, as the paper."
    check_setting(
        method, f"{prefix}activation", server.activation, Range(most=most, least=0), remedy=remedy
    )


StalenessFn: TypeAlias = Callable[[Float[Array, ""]], Float[Array, ""]]
"""The factor of an update by its staleness: `float32 scalar -> float32 scalar`."""


def polynomial_staleness(exponent: float = 0.5) -> StalenessFn:
    """Weigh an update by `(1 + staleness)^(-exponent)`.

    Args:
        exponent: at least 0. Default 0.5, FedBuff's. 0 weighs all updates equally.

    Returns:
        A function of the staleness, for `fedbuff(staleness_fn=...)` and `fedasync`.

    Raises:
        ValueError: the exponent is negative.

    Example:
        >>> polynomial_staleness()(jnp.float32(3.0)).item()
        0.5
    """
    remedy = "Pass 0.0 to weigh all updates equally."
    check_setting("polynomial_staleness", "exponent", exponent, NON_NEGATIVE, remedy=remedy)
    return lambda staleness: (1.0 + staleness) ** -exponent


def hinge_staleness(slope: float, free: float) -> StalenessFn:
    """Weigh an update by 1 up to a staleness of `free`, and by `1 / (slope (s - free) + 1)` above.

    Args:
        slope: a, at least 0.
        free: b, at least 0.

    Returns:
        A function of the staleness, for `fedbuff(staleness_fn=...)` and `fedasync`.

    Raises:
        ValueError: a setting is negative.

    Example:
        >>> weigh = hinge_staleness(slope=0.5, free=4.0)
        >>> weigh(jnp.float32(4.0)).item(), weigh(jnp.float32(6.0)).item()
        (1.0, 0.5)

    Reference:
        Xie et al., arXiv:1903.03934, section 5.2.
    """
    check_setting(
        "hinge_staleness", "slope", slope, NON_NEGATIVE, remedy="Pass 0.0 for equal weights."
    )
    check_setting("hinge_staleness", "free", free, NON_NEGATIVE, remedy="Pass 0.0 for none.")
    return lambda staleness: 1.0 / (slope * jnp.maximum(staleness - free, 0.0) + 1.0)


class History(NamedTuple):
    """The last versions of a model, in a ring buffer."""

    versions: Params  # the model's pytree with leaves `[length, ...]`; version v is at v mod length
    current: Int[Array, ""]  # the number of the latest version, from 0

    def read(self, staleness: Int[Array, ""]) -> Params:
        """Return the version that was the latest `staleness` versions ago."""
        version = jnp.maximum(self.current - staleness, 0)
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(
                leaf, version % leaf.shape[0], axis=0, keepdims=False
            ),
            self.versions,
        )

    def append(self, params: Params) -> "History":
        """Overwrite the oldest version by a new one."""
        current = self.current + 1
        versions = jax.tree.map(
            lambda leaf, new: jax.lax.dynamic_update_index_in_dim(
                leaf, new, current % leaf.shape[0], axis=0
            ),
            self.versions,
            params,
        )
        return History(versions, current)


def start_history(params: Params, length: int) -> History:
    """Make a history whose only version, number 0, is `params`."""

    def fill(leaf: chex.Array) -> Any:
        return jnp.broadcast_to(leaf, (length, *jnp.shape(leaf)))

    return History(jax.tree.map(fill, params), jnp.int32(0))
