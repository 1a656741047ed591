"""Participation: which of a cohort's steps and participants are valid, and their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from fedpax.aggregators import Aggregator
from fedpax.aggregators.aggregator import Weights
from fedpax.algorithm import Metrics
from fedpax.clients.cohort import MASK, Cohort, NumSteps
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_map, federated_mean, federated_sum
from fedpax.primitives.placement import ChunkSize, resolve_placement


def valid_steps(
    batches: chex.ArrayTree, num_steps: Int[Array, ""] | int | None = None
) -> Bool[Array, " steps"] | None:
    """Return a mask of a participant's valid steps.

    Args:
        batches: a pytree of arrays `[steps, batch, ...]`; a field `"mask"` of a dict is nonzero
            where there is an example.
        num_steps: integer scalar, how many of the first steps are valid. Default None: all.

    Returns:
        bool `[steps]`, or None where nothing marks padding: no `num_steps` and no mask.

    Raises:
        TypeError: `num_steps` is not an integer scalar.

    Example:
        >>> import jax.numpy as jnp
        >>> mask = jnp.array([[1, 1], [0, 0], [1, 0]])
        >>> valid_steps({"mask": mask}).tolist(), valid_steps({"mask": mask}, 2).tolist()
        ([True, False, True], [True, False, False])
    """
    valid = None
    if isinstance(batches, Mapping) and MASK in batches:
        mask = batches[MASK]
        valid = jnp.any(mask != 0, axis=tuple(range(1, mask.ndim)))
    if num_steps is None:
        return valid
    given = jnp.asarray(num_steps)
    if is_all_or_none(given):
        given = given * jax.tree.leaves(batches)[0].shape[0]
    if given.shape or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"num_steps is {given.dtype}{list(given.shape)}, expected one integer per participant. "
            "Give the round a cohort whose num_steps is an integer array [participants]."
        )
    before = jnp.arange(jax.tree.leaves(batches)[0].shape[0]) < given
    return before if valid is None else before & valid


def placed_valid_steps(cohort: Cohort) -> Bool[Array, "participants steps"] | None:
    """Return a mask of the valid steps of every participant. Inside a program."""
    batches, client_ids = cohort.batches, cohort.client_ids
    has_mask = isinstance(batches, Mapping) and MASK in batches
    if not has_mask and cohort.num_steps is None and client_ids is None:
        return None

    def valid(
        batches: chex.ArrayTree, num_steps: NumSteps, client: Int[Array, ""] | None
    ) -> Bool[Array, " steps"]:
        steps = valid_steps(batches, num_steps)
        if steps is None:
            steps = jnp.ones(jax.tree.leaves(batches)[0].shape[0], bool)
        return steps if client is None else steps & (client >= 0)

    marked = {MASK: batches[MASK]} if has_mask else jax.tree.leaves(batches)[0]
    return federated_map(valid, marked, cohort.num_steps, client_ids)


def without_absent(cohort: Cohort, index: jax.typing.ArrayLike | None) -> Cohort:
    """Give participants with a negative index or weight 0 no steps. Inside a program."""
    # A weight of 0 alone keeps a participant out of means, but its own state would still change.
    examples = cohort.num_examples
    if index is None and examples is None:
        return cohort
    most = jax.tree.leaves(cohort.batches)[0].shape[1]

    def steps(
        index: Int[Array, ""] | None, examples: Num[Array, ""] | None, given: NumSteps
    ) -> Int[Array, ""] | Bool[Array, ""]:
        is_here = jnp.bool_(True) if examples is None else ~(examples <= 0)
        if index is not None:
            is_here &= index >= 0
        elif given is None:
            return is_here  # all steps or none: weights alone keep reverse derivatives
        return jnp.where(is_here, most if given is None else given * _unit(given, most), 0)

    return cohort._replace(num_steps=federated_map(steps, index, examples, cohort.num_steps))


def is_all_or_none(num_steps: NumSteps | int) -> bool:
    """Return whether a number of steps is a bool, as `without_absent` makes it."""
    return num_steps is not None and jnp.result_type(num_steps) == jnp.bool_


def _unit(num_steps: NumSteps, most: int) -> int:
    """Return how many steps a number of steps of 1 is."""
    return most if is_all_or_none(num_steps) else 1


def takes_part(cohort: Cohort) -> Bool[Array, " participants"]:
    """Return which participants have a valid step. Inside a program."""
    valid = placed_valid_steps(cohort)
    if valid is None:
        return jnp.ones(jax.tree.leaves(cohort.batches)[0].shape[0], bool)
    return federated_map(jnp.any, valid)


def counted_examples(cohort: Cohort) -> Weights:
    """Return `cohort.num_examples` with 0 for negative numbers. Inside a program."""
    if cohort.num_examples is None:
        return None
    # Under `jax.checkpoint`, a derivative recomputes the number and stores none per participant.
    not_negative = jax.checkpoint(lambda n: jnp.maximum(n, jnp.zeros_like(n)))
    return federated_map(not_negative, cohort.num_examples)


def participant_weights(cohort: Cohort) -> Weights:
    """Return the participants' weights in means: 0 without a valid step. Inside a program.

    Args:
        cohort: the cohort of the round.

    Returns:
        `cohort.num_examples`, or 1 each where it is None; 0 where it is negative, without a valid
        step and with a negative client id. None where all weigh the same.

    Raises:
        RuntimeError: it is called outside of a program.

    Example:
        >>> import fedpax
        >>> import jax.numpy as jnp
        >>> mask = jnp.array([[[1, 1]], [[0, 0]], [[1, 0]]])  # participants, steps, batch
        >>> fedpax.program(clients=3)(participant_weights)(Cohort({"mask": mask})).tolist()
        [1.0, 0.0, 1.0]
    """
    resolve_placement("participant_weights", None)
    valid = placed_valid_steps(cohort)
    weights = counted_examples(cohort)
    if valid is None:
        return weights

    def weight(valid: Bool[Array, " steps"], examples: Num[Array, ""] | None) -> Num[Array, ""]:
        examples = jnp.float32(1) if examples is None else examples
        return jnp.where(jnp.any(valid), examples, jnp.zeros_like(examples))

    return federated_map(weight, valid, weights)


NON_FINITE_PARTICIPANTS = "non_finite_participants"


class _Terms(NamedTuple):
    """A participant's terms of the sums over participants."""

    totals: Metrics  # weight times value of each metric; 0 where the value is not finite
    weights: Metrics  # the weight of each metric; 0 where the value is not finite
    # whether the participant takes part and a value of it is not finite.
    is_left_out: Bool[Array, ""]


def mean_metrics(
    metrics: Metrics, weights: Weights, aggregator: Aggregator, reported: Metrics | None = None
) -> Metrics:
    """Average the metrics by weight, and add what an aggregator reported. Inside a program."""
    # A NaN makes the plain mean of the updates NaN, and the metrics' mean too. Beside a robust
    # aggregator, each metric is the mean of its finite values.
    if not aggregator.tolerates_non_finite:
        return with_reported(federated_mean(metrics, weights), reported or {})
    if NON_FINITE_PARTICIPANTS in metrics:
        raise ArgumentError(
            f"loss_fn returned a metric called {NON_FINITE_PARTICIPANTS!r}, the name under which "
            "a round reports participants whose metrics are not finite. Rename it."
        )

    def terms(values: Metrics, weight: Num[Array, ""] | None) -> _Terms:
        wide = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
        weight = jnp.asarray(1 if weight is None else weight, jnp.float32)
        finite = {name: jnp.isfinite(value) for name, value in wide.items()}
        finite_weights = {
            name: jnp.where(is_finite, weight, 0) for name, is_finite in finite.items()
        }
        totals = {
            name: finite_weights[name] * jnp.where(finite[name], wide[name], 0) for name in wide
        }
        all_finite = jnp.all(jnp.array(list(finite.values())))
        return _Terms(totals, finite_weights, (weight != 0) & ~all_finite)

    sums = federated_sum(federated_map(terms, metrics, weights))
    count = sums.is_left_out

    def divide(total: Float[Array, ""], weight: Float[Array, ""]) -> Float[Array, ""]:
        nothing = jnp.where(count > 0, jnp.nan, 0.0)
        return jnp.where(weight == 0, nothing, total / jnp.where(weight == 0, 1, weight))

    means = jax.tree.map(divide, sums.totals, sums.weights)
    return with_reported(means | {NON_FINITE_PARTICIPANTS: count}, reported or {})


def with_reported(metrics: Metrics, reported: Metrics) -> Metrics:
    """Join the participants' mean metrics and an aggregator's metrics; equal names raise."""
    if both := sorted(metrics.keys() & reported.keys()):
        raise ArgumentError(
            f"loss_fn returned a metric called {both[0]!r}, the name under which the aggregator "
            "reports its own. Rename it."
        )
    return {**metrics, **reported}


def rematerialized_map(
    fn: Callable[..., chex.ArrayTree], *args: chex.ArrayTree, chunk_size: ChunkSize
) -> chex.ArrayTree:
    """Run a function on every client; in chunks, derivatives recompute it. Inside a program."""
    # Under `jax.checkpoint`, memory does not grow with the number of clients: a derivative of
    # `federated_map` stores the residuals of every client if a reduction separates the forward pass
    # from the backward pass. `federated_map` does not do this itself: a gradient that needs no
    # reduction would pay for a second forward pass.
    return federated_map(fn if chunk_size is None else jax.checkpoint(fn), *args)
