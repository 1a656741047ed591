"""The server optimizers of FedOpt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.algorithms.parts.tree_arithmetic import weighted_sum
from fedpax.checks import DECAY, POSITIVE


class ServerOptimizerState(NamedTuple):
    """The state of a FedOpt server optimizer: m and v, of the parameters' shapes and dtypes."""

    first_moment: optax.Updates
    second_moment: optax.Updates


def server_adagrad(
    learning_rate: Any, *, b1: Any = 0.0, tau: Any = 1e-3
) -> optax.GradientTransformation:
    """Make the server optimizer of FedAdagrad: `v <- v + g^2`.

    With pseudo-gradient g: `m <- b1 m + (1 - b1) g`, then v, then `x <- x - eta m / (sqrt(v) +
    tau)`. m starts at 0, v at tau^2, without correction for bias.

    Args:
        learning_rate: eta. It and the other settings can be traced, to differentiate in them.
        b1: decay of the first moment, 0 to below 1. Default 0, as in the paper's experiments.
        tau: degree of adaptivity, positive.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> server = server_adagrad(0.1, tau=1.0)
        >>> update, state = server.update(jnp.float32(3.0), server.init(jnp.float32(0.0)))
        >>> round(float(update), 4)  # -0.1 * 3 / (sqrt(1 + 9) + 1)
        -0.0721

    Reference:
        Reddi et al., arXiv:2003.00295, algorithm 2.
    """
    _check("server_adagrad", learning_rate, b1, tau)
    return _server_optimizer(learning_rate, b1, tau, lambda v, g: v + g**2)


def server_adam(
    learning_rate: Any, *, b1: Any = 0.9, b2: Any = 0.99, tau: Any = 1e-3
) -> optax.GradientTransformation:
    """Make the server optimizer of FedAdam: `v <- b2 v + (1 - b2) g^2`.

    Like `server_adagrad`, with another rule for v. Unlike `optax.adam`, it does not correct for
    bias.

    Args:
        learning_rate: eta.
        b1: decay of the first moment, 0 to below 1.
        b2: decay of the second moment, 0 to below 1.
        tau: degree of adaptivity, positive.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> server = server_adam(0.1)
        >>> update, state = server.update(jnp.float32(2.0), server.init(jnp.float32(0.0)))
        >>> round(float(state.second_moment), 4)  # 0.99 * 1e-6 + 0.01 * 4
        0.04

    Reference:
        Reddi et al., arXiv:2003.00295, algorithm 2.
    """
    _check("server_adam", learning_rate, b1, tau, b2)
    return _server_optimizer(learning_rate, b1, tau, lambda v, g: b2 * v + (1 - b2) * g**2)


def server_yogi(
    learning_rate: Any, *, b1: Any = 0.9, b2: Any = 0.99, tau: Any = 1e-3
) -> optax.GradientTransformation:
    """Make the server optimizer of FedYogi: `v <- v - (1 - b2) g^2 sign(v - g^2)`.

    Like `server_adagrad`, with another rule for v. Unlike `optax.yogi`, it does not correct for
    bias.

    Args:
        learning_rate: eta.
        b1: decay of the first moment, 0 to below 1.
        b2: decay of the second moment, 0 to below 1.
        tau: degree of adaptivity, positive.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> server = server_yogi(0.1)
        >>> update, state = server.update(jnp.float32(2.0), server.init(jnp.float32(0.0)))
        >>> round(float(state.second_moment), 4)  # 1e-6 + 0.01 * 4
        0.04

    Reference:
        Reddi et al., arXiv:2003.00295, algorithm 2.
    """
    _check("server_yogi", learning_rate, b1, tau, b2)
    return _server_optimizer(
        learning_rate, b1, tau, lambda v, g: v - (1 - b2) * g**2 * jnp.sign(v - g**2)
    )


def _server_optimizer(
    learning_rate: Any,
    b1: Any,
    tau: Any,
    next_second_moment: Callable[[jax.Array, jax.Array], jax.Array],
) -> optax.GradientTransformation:
    def init(params: optax.Params) -> ServerOptimizerState:
        return ServerOptimizerState(
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(lambda p: jnp.full_like(p, tau**2), params),
        )

    def update(
        gradient: optax.Updates, state: ServerOptimizerState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ServerOptimizerState]:
        first = weighted_sum(b1, state.first_moment, 1 - b1, gradient)
        second = jax.tree.map(
            lambda v, g: next_second_moment(v, g).astype(v.dtype), state.second_moment, gradient
        )
        updates = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), first, second)
        return updates, ServerOptimizerState(first, second)

    return optax.GradientTransformation(init, update)


def _check(optimizer: str, learning_rate: Any, b1: Any, tau: Any, b2: Any = 0.0) -> None:
    remedies = {"learning_rate": "Pass for example 0.1.", "tau": "Pass 1e-3, as the paper."}
    for name, value in {"learning_rate": learning_rate, "tau": tau}.items():
        check_setting(optimizer, name, value, POSITIVE, remedy=remedies[name])
    for name, value in {"b1": b1, "b2": b2}.items():
        remedy = "Pass 0.0 for no memory of earlier rounds."
        check_setting(optimizer, name, value, DECAY, remedy=remedy)
