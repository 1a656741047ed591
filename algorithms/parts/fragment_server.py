"""The server's part of methods that synchronize a model fragment by fragment."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator, random_stream
from fedpax.aggregators.aggregator import Weights
from fedpax.aggregators.random_streams import traced_random_stream
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.fragments import Fragment
from fedpax.algorithms.parts.frozen_leaves import keep_leaves, without_leaves
from fedpax.algorithms.parts.local_steps import optimizer_step
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
        self, state: State, p: int | jax.Array, fragment: Fragment, weights: Weights
    ) -> tuple[Params, chex.ArrayTree, Metrics]:
        """Combine fragment p of the outer gradients; return the aggregator's new state too."""
        x = fragment.take(state.params)
        gradients = federated_map(lambda y: subtract(x, fragment.take(y)), state.local_params)
        # Separate noise for each fragment.
        stream = random_stream(p) if isinstance(p, int) else traced_random_stream(p)
        with stream:
            aggregator = without_leaves(self.aggregator, fragment.frozen)
            return aggregator.aggregate(entry(state.aggregator_state, p), gradients, weights)

    def step(
        self, state: State, p: int | jax.Array, fragment: Fragment, delta: Params
    ) -> tuple[tuple[Params, optax.OptState], tuple[Params, optax.OptState]]:
        """Step fragment p along `delta`: fragment and optimizer state, after and before."""
        before = fragment.take(state.params), entry(state.outer_optimizer_state, p)
        x, optimizer_state = optimizer_step(self.optimizer, delta, before[1], before[0])
        return (keep_leaves(fragment.frozen, x, before[0]), optimizer_state), before


class Stacked(NamedTuple):
    """The states of consecutive fragments as arrays with an axis in front, in place of a tuple."""

    states: Any
    first: int  # number of the first fragment


def entry(entries: tuple[Any, ...] | Stacked, p: int | jax.Array) -> Any:
    """Return the state of fragment p."""
    if isinstance(entries, Stacked):
        return jax.tree.map(lambda states: states[p - entries.first], entries.states)
    return entries[p]


def with_entry(entries: tuple[Any, ...] | Stacked, p: int | jax.Array, value: Any) -> Any:
    """Replace the state of fragment p."""
    if isinstance(entries, Stacked):
        put = jax.lax.dynamic_update_index_in_dim
        index = p - entries.first
        states = jax.tree.map(lambda s, new: put(s, new, index, 0), entries.states, value)
        return entries._replace(states=states)
    return (*entries[:p], value, *entries[p + 1 :])


def stack_entries(entries: tuple[Any, ...], first: int, count: int) -> Stacked:
    """Stack the states of some fragments."""
    some = entries[first : first + count]
    return Stacked(jax.tree.map(lambda *leaves: jnp.stack(leaves), *some), first)


def with_stacked(entries: tuple[Any, ...], stacked: Stacked, count: int) -> tuple[Any, ...]:
    """Replace the states of fragments that were stacked."""
    some = [jax.tree.map(lambda s, i=i: s[i], stacked.states) for i in range(count)]
    return (*entries[: stacked.first], *some, *entries[stacked.first + count :])


def are_alike(entries: Sequence[Any]) -> bool:
    """Return whether states have equal structures, shapes and dtypes."""
    kinds = {
        (jax.tree.structure(e), tuple((x.shape, x.dtype) for x in jax.tree.leaves(e)))
        for e in entries
    }
    return len(kinds) == 1
