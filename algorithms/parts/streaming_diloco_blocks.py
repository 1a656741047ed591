"""Blocks of a round of Streaming DiLoCo, and loops over blocks whose fragments are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators.aggregator import Weights
from fedpax.aggregators.sent_values import under_transfers
from fedpax.algorithm import Metrics, Params
from fedpax.algorithms.parts.fragments import (
    Fragment,
    FragmentRun,
    FragmentServer,
    Stacked,
    are_alike,
    fragment_runs,
    stack_entries,
    with_entry,
    with_stacked,
)
from fedpax.algorithms.parts.inner_steps import (
    InnerReport,
    InnerSteps,
    add_reports,
    average_total,
    keep_step_together,
)
from fedpax.algorithms.parts.participation import is_all_or_none, participant_weights
from fedpax.algorithms.parts.server import as_floats, unless_all_absent
from fedpax.algorithms.parts.tree_arithmetic import weighted_sum
from fedpax.clients.cohort import Cohort, NumSteps
from fedpax.primitives import federated_map
from fedpax.primitives.placement import is_for_stages

SHORTEST_LOOP = 6
"""A loop keeps one more copy of its fragments' states: fewer blocks are unrolled."""

State = TypeVar("State", bound=Any)  # a `StreamingDiLoCoState`


class Phases(NamedTuple):
    """The phases of a round. Inside a program."""

    inner_steps: InnerSteps
    server: FragmentServer
    mixing: float

    def train(
        self, state: State, cohort: Cohort, start: int | jax.Array, length: int
    ) -> tuple[State, InnerReport]:
        """Take `length` inner steps of a round, from `start` on, on all islands."""

        def some_inner_steps(
            params: Params,
            inner_state: optax.OptState,
            batches: chex.ArrayTree,
            num_steps: NumSteps,
        ) -> tuple[Params, optax.OptState, InnerReport]:
            batches = jax.tree.map(lambda batch: _steps_of(batch, start, length), batches)
            take = self.inner_steps
            if num_steps is not None:
                rest = num_steps if is_all_or_none(num_steps) else num_steps - start
                return take(params, inner_state, batches, rest)
            if length == 1:
                take = keep_step_together(take)
            return take(params, inner_state, batches, None)

        params, inner_state, report = federated_map(
            some_inner_steps,
            state.local_params,
            state.inner_optimizer_state,
            cohort.batches,
            cohort.num_steps,
        )
        return state._replace(local_params=params, inner_optimizer_state=inner_state), report

    def average_while_training(
        self,
        state: State,
        cohort: Cohort,
        p: int | jax.Array,
        fragment: Fragment,
        start: int | jax.Array,
        length: int,
    ) -> tuple[Params, State, list[InnerReport], Metrics]:
        """Average fragment p of the outer gradients; take `length` steps from `start` on."""
        reports: list[InnerReport] = []
        before, taken = state, 0

        def train(until: int) -> None:
            nonlocal state, taken
            if taken < until:
                state, report = self.train(state, cohort, start + taken, until - taken)
                reports.append(report)
                taken = until

        def train_and_receive(received: chex.ArrayTree, fraction: float) -> chex.ArrayTree:
            nonlocal state
            train(int(fraction * length))
            models, received = jax.lax.optimization_barrier((state.local_params, received))
            state = state._replace(local_params=models)
            return received

        weights = as_floats(participant_weights(cohort))
        with under_transfers(train_and_receive):
            delta, aggregator_state, metrics = self.server.average(before, p, fragment, weights)
        train(length)  # no step needs delta
        if length and not isinstance(p, int):
            # The TPU's compiler would take it from the models before and after in one operation,
            # and so send after the steps.
            models, delta = jax.lax.optimization_barrier((state.local_params, delta))
            state = state._replace(local_params=models)
        states = with_entry(state.aggregator_state, p, aggregator_state)
        return delta, state._replace(aggregator_state=states), reports, metrics

    def complete_transfer(
        self, state: State, p: int | jax.Array, fragment: Fragment, delta: Params, weights: Weights
    ) -> State:
        """Step fragment p of the outer model, and mix it into the islands' models."""
        stepped, before = self.server.step(state, p, fragment, delta)
        x, outer_state = unless_all_absent(weights, stepped, before, self.server.aggregator)

        def receive(y: Params) -> Params:
            if not self.mixing:
                return fragment.put(y, x)
            mixed = weighted_sum(self.mixing, fragment.take(y), 1 - self.mixing, x)
            return fragment.put(y, mixed)

        return state._replace(
            params=fragment.put(state.params, x),
            outer_optimizer_state=with_entry(state.outer_optimizer_state, p, outer_state),
            local_params=federated_map(receive, state.local_params),
        )


class Block(NamedTuple):
    """A block of a round: inner steps, and at their end the synchronization of fragments."""

    phases: Phases
    cohort: Cohort
    weights: Weights
    length: int
    delay: int

    def run(
        self,
        state: State,
        number: int | jax.Array,
        fragments: Sequence[tuple[int | jax.Array, Fragment]],
    ) -> tuple[State, list[InnerReport], list[Metrics]]:
        """Run block `number`, with several fragments only without delay."""
        start, until = number * self.length, self.length - self.delay
        state, report = self.phases.train(state, self.cohort, start, until)
        reports, deltas, metrics = [report], [], []
        for p, fragment in fragments:
            delta, state, during, of_aggregator = self.phases.average_while_training(
                state, self.cohort, p, fragment, start + until, self.delay
            )
            reports += during
            deltas.append(delta)
            metrics.append(of_aggregator)
        for (p, fragment), delta in zip(fragments, deltas, strict=True):
            state = self.phases.complete_transfer(state, p, fragment, delta, self.weights)
        return state, reports, metrics

    def run_in_loop(
        self, state: State, first: int, run: FragmentRun
    ) -> tuple[State, list[InnerReport], list[Metrics]]:
        """Run consecutive blocks in a loop, whose body is traced and compiled once."""
        stacked = [stack_entries(s, first, run.length).states for s in _states(state)]

        def body(carry: tuple[State, list[Any], InnerReport], index: jax.Array) -> tuple[Any, Any]:
            state, stacked, total = carry
            number = first + index
            state = _with_states(state, [Stacked(s, first) for s in stacked])
            state, reports, metrics = self.run(state, number, [(number, run.at(index))])
            total = federated_map(lambda total, *some: add_reports(total, some), total, *reports)
            stacked = [s.states for s in _states(state)]
            return (_with_states(state, [(), ()]), stacked, total), metrics

        # Totals, because the compiler would gather stacked reports from all islands.
        shapes = jax.eval_shape(lambda: self.phases.train(state, self.cohort, 0, 1)[1])
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        carry = _with_states(state, [(), ()]), stacked, total
        (after, stacked, total), metrics = jax.lax.scan(body, carry, jnp.arange(run.length))
        entries = [
            with_stacked(before, Stacked(s, first), run.length)
            for before, s in zip(_states(state), stacked, strict=True)
        ]
        metrics = jax.tree.map(lambda values: jnp.sum(values, 0), metrics)
        return _with_states(after, entries), [federated_map(average_total, total)], metrics


def loop_at(state: State, parts: Sequence[Fragment], p: int) -> FragmentRun | None:
    """Return the fragments from p on that a loop can synchronize, or None if they are few."""
    if is_for_stages():
        return None  # no loop of the server can wait for the participants
    run = fragment_runs(parts[p:])[0]
    alike = [are_alike(s[p : p + run.length]) for s in _states(state)]
    return run if run.length >= SHORTEST_LOOP and all(alike) else None


def _states(state: State) -> tuple[Any, Any]:
    return state.outer_optimizer_state, state.aggregator_state


def _with_states(state: State, entries: Sequence[Any]) -> State:
    outer, aggregator = entries
    return state._replace(outer_optimizer_state=outer, aggregator_state=aggregator)


def _steps_of(batch: jax.Array, start: int | jax.Array, length: int) -> jax.Array:
    if isinstance(start, int):
        return batch[start : start + length]
    return jax.lax.dynamic_slice_in_dim(batch, start, length)
