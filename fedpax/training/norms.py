"""Norms of updates, and tests for numbers that are not finite, as parts of a compiled round."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fedpax.training.algorithm import Metrics, Params, State


def report_update_norm(
    round: Callable[..., tuple[State, Metrics]],
) -> Callable[..., tuple[State, Metrics]]:
    """Add `"update_norm"` to a round's metrics: the norm of the change of the server's model.

    A state whose `params` is not a field, but computed from its fields, gets no norm: computing it
    can need communication.

    Args:
        round: `(state, cohort, *frozen) -> (state, metrics)`.

    Returns:
        The round with this metric, a float32 scalar.

    Example:
        >>> from typing import NamedTuple
        >>> class State(NamedTuple):
        ...     params: jax.Array
        >>> round = report_update_norm(lambda state, x: (State(state.params - x), {"loss": x[0]}))
        >>> round(State(jnp.ones(2)), jnp.array([3.0, 4.0]))[1]["update_norm"].item()
        5.0
    """

    def reporting(state: State, cohort: Any, *frozen: Any) -> tuple[State, Metrics]:
        after, metrics = round(state, cohort, *frozen)
        if has_params_field(state):
            metrics = metrics | {"update_norm": update_norm(state.params, after.params)}
        return after, metrics

    return reporting


def update_norm(before: Params, after: Params) -> Float[Array, ""]:
    """Return the Euclidean norm of the change of all parameters, in float32.

    Args:
        before: the parameters before the round.
        after: the parameters after it.

    Example:
        >>> before, after = jnp.zeros((2, 3)), jnp.ones((2, 3))
        >>> update_norm({"w": before[:, :2], "b": before}, {"w": before[:, 1:], "b": after})
        Array(2.4494898, dtype=float32)
    """
    squares = [
        jnp.sum(jnp.square(new.astype(jnp.float32) - old.astype(jnp.float32)))
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ]
    return jnp.sqrt(jnp.sum(jnp.array(squares)))


def all_finite(params: Params) -> Bool[Array, ""]:
    """Return whether all parameters are finite.

    Args:
        params: a pytree of arrays. Integers are finite.

    Example:
        >>> bool(all_finite({"w": jnp.array([1.0, jnp.nan]), "n": 3}))
        False
    """
    finite = [
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(params)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    return jnp.all(jnp.array(finite))


def has_params_field(state: State) -> bool:
    """Return whether a state stores its model, and does not compute it from its fields."""
    return "params" in getattr(state, "_fields", ("params",))
