"""Delayed Nesterov: momentum that is updated once in several arrivals."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.algorithm import Params
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.checks import COUNT, FRACTION, NON_NEGATIVE, Range, check_argument
from fedpax.errors import ArgumentTypeError


class DelayedNesterovState(NamedTuple):
    """The state of delayed Nesterov."""

    momentum: Params  # m, of the structure of the parameters
    accumulated: Params  # the sum D of the gradients since the last update of the momentum
    arrivals: Float[Array, ""]  # float32 scalar, their number, below the period


class DelayedNesterov(NamedTuple):
    """A server's optimizer for gradients that arrive one at a time, or some together.

    For a gradient g, with N the period. The second line is for every N-th gradient, the first line
    for all other gradients:

        x <- x - eta (g / N + c beta m);  D <- D + g
        m <- beta m + (D + g) / N;  x <- x - eta (g / N + (1 - c N + c) beta m);  D <- 0

    Each of the gradients that arrive together counts as an arrival, and all are applied before the
    momentum. If the N-th arrival is one of them, the later ones are part of the same update.

    Attributes:
        learning_rate: eta. An arrival moves x by eta / N times its gradient.
        momentum: beta, from 0 to 1.
        period: N, number of arrivals between updates of the momentum, at least 1.
        activation: c, from 0 to 1 / N: the share of the momentum that each arrival applies.

    Example:
        >>> outer = DelayedNesterov(learning_rate=0.5, momentum=0.9, period=1)  # plain Nesterov
        >>> outer.update(jnp.float32(2.0), jnp.float32(1.0), outer.init(0.0), jnp.float32(0.0))[0]
        Array(-1.9, dtype=float32)

    Reference:
        Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv:2401.09135.
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

        Example:
            >>> outer = DelayedNesterov(learning_rate=1.0, momentum=0.5, period=2)
            >>> x, state = jnp.float32(0.0), outer.init(jnp.float32(0.0))
            >>> for gradient in (-4.0, -2.0):
            ...     x, state = outer.update(jnp.float32(gradient), jnp.float32(1.0), state, x)
            >>> x.item(), state.momentum.item()
            (4.5, -3.0)
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
