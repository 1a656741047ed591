"""Delayed Nesterov: momentum that is updated once in several arrivals."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.training.algorithm import Params


class DelayedNesterovState(NamedTuple):
    """The state of delayed Nesterov.

    Attributes:
        momentum: m, of the structure of the parameters.
        accumulated: the sum D of the gradients since the last update of the momentum.
        arrivals: float32 scalar, their number, below the period.
    """

    momentum: Params
    accumulated: Params
    arrivals: Float[Array, ""]


class DelayedNesterov(NamedTuple):
    """An optimizer for gradients that arrive one at a time, or some together.

    For a gradient g, with N the period:

        x <- x - eta (g / N + c beta m);  D <- D + g                                      mostly
        m <- beta m + (D + g) / N;  x <- x - eta (g / N + (1 - c N + c) beta m);  D <- 0  every N-th

    Gradients that arrive together count as several arrivals, applied before the momentum. If they
    go beyond the N-th, those beyond it are part of the same update.

    Attributes:
        learning_rate: eta.
        momentum: beta.
        period: N, number of arrivals between updates of the momentum.
        activation: c, the share of the momentum that each arrival applies.

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
