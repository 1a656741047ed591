"""Arrivals: which islands of a round arrive at a server, and how their updates are combined."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from fedpax.aggregators import Aggregator, mean
from fedpax.aggregators.aggregator import without_epsilon
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.participation import mean_metrics, takes_part
from fedpax.algorithms.parts.server import given_aggregator
from fedpax.algorithms.parts.tree_arithmetic import scale, select
from fedpax.clients.cohort import Cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_sum

Carry = TypeVar("Carry", bound=tuple[Any, ...])


def outer_gradients(
    outer_gradient: Callable[..., tuple[Params, optax.OptState, Metrics]],
    local_params: Params,
    inner_state: optax.OptState,
    cohort: Cohort,
    aggregator: Aggregator | None,
) -> tuple[Params, optax.OptState, Bool[Array, " islands"], Metrics]:
    """Train each island from its own model. Inside a program."""
    # Returns the outer gradients and the inner states, placed; which islands have a valid step, and
    # so an update to send; the mean metrics of those islands, with a schedule also their number,
    # `arrivals`.
    gradients, inner_state, metrics = federated_map(
        outer_gradient, local_params, inner_state, cohort.batches, cohort.num_steps
    )
    sends = takes_part(cohort)
    weights = federated_map(lambda s: s.astype(jnp.float32), sends)
    metrics = mean_metrics(metrics, weights, mean() if aggregator is None else aggregator)
    if cohort.schedule is not None:
        metrics |= {"arrivals": federated_sum(weights)}
    return gradients, inner_state, sends, metrics


class Combined(NamedTuple):
    """The carry from one combination of a round to the next."""

    state: chex.ArrayTree | None  # the state of the aggregator; None without one
    metrics: Metrics  # sums of the aggregator's metrics
    instants: Float[Array, ""]  # float32 scalar, number of combinations with an update

    def mean_metrics(self) -> Metrics:
        """Average the aggregator's metrics over the combinations with an update."""
        return {name: value / jnp.maximum(self.instants, 1) for name, value in self.metrics.items()}


class ArrivingUpdates(NamedTuple):
    """The updates of a round's islands, combined a few at a time."""

    updates: Params  # placed, of the structure of the parameters
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
        # Returns the sum of their updates: their number times the aggregate; their number, float32;
        # the carry. If no island arrives, the sum is 0 and the aggregator's state does not change.
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
