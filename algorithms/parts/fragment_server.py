"""The server's part of methods that synchronize a model fragment by fragment."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import optax
from jaxtyping import Array, Num

from fedpax.aggregators import Aggregator, random_stream
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.fragments import Fragment
from fedpax.algorithms.parts.frozen_leaves import keep_leaves, without_leaves
from fedpax.algorithms.parts.optimizer_step import optimizer_step
from fedpax.algorithms.parts.tree_arithmetic import subtract
from fedpax.primitives import federated_map

State = TypeVar("State", bound=Any)


class FragmentServer(NamedTuple):
    """The outer model of islands, with states for each fragment. Inside a program."""

    # It reads and replaces fields of a method's state, a NamedTuple: `params`, `local_params`,
    # `outer_optimizer_state` and `aggregator_state`. The last two have an entry for each fragment.

    optimizer: optax.GradientTransformation  # steps each fragment of the outer model
    aggregator: Aggregator  # combines the islands' outer gradients of a fragment

    def init(
        self, params: Params, fragments: Sequence[Fragment]
    ) -> tuple[tuple[optax.OptState, ...], tuple[Any, ...]]:
        """Return the states of the optimizer and of the aggregator for each fragment."""
        parts = [fragment.take(params) for fragment in fragments]
        aggregators = [without_leaves(self.aggregator, fragment.frozen) for fragment in fragments]
        states = (a.init(part) for a, part in zip(aggregators, parts, strict=True))
        return tuple(map(self.optimizer.init, parts)), tuple(states)

    def average(
        self, state: State, p: int, fragment: Fragment, weights: Num[Array, " islands"] | None
    ) -> tuple[Params, chex.ArrayTree, Metrics]:
        """Combine fragment p of the outer gradients; return the aggregator's new state too."""
        x = fragment.take(state.params)
        gradients = federated_map(lambda y: subtract(x, fragment.take(y)), state.local_params)
        with random_stream(p):  # separate noise for each fragment
            aggregator = without_leaves(self.aggregator, fragment.frozen)
            return aggregator.aggregate(state.aggregator_state[p], gradients, weights)

    def step(
        self, state: State, p: int, fragment: Fragment, delta: Params
    ) -> tuple[tuple[Params, optax.OptState], tuple[Params, optax.OptState]]:
        """Step fragment p along `delta`: fragment and optimizer state, after and before."""
        before = fragment.take(state.params), state.outer_optimizer_state[p]
        x, optimizer_state = optimizer_step(self.optimizer, delta, before[1], before[0])
        return (keep_leaves(fragment.frozen, x, before[0]), optimizer_state), before


def with_entry(entries: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """Replace an entry of a tuple."""
    return (*entries[:index], value, *entries[index + 1 :])
