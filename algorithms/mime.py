"""Mime and MimeLite."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import weights_of_finite
from fedpax.algorithms.parts.local_steps import (
    added_term,
    full_gradient,
    gradient_and_metrics,
    local_update,
)
from fedpax.algorithms.parts.method_checks import check_setting
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import as_floats, make_server, unless_all_absent
from fedpax.algorithms.parts.tree_arithmetic import subtract, weighted_sum
from fedpax.checks import DECAY, NON_NEGATIVE, POSITIVE
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_mean
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class MimeState(NamedTuple):
    """The state of Mime and MimeLite: the server has s, the state of the clients' optimizer."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    client_optimizer_state: optax.OptState


def mime(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[MimeState]:
    """Mimic centralized training: fixed optimizer state, and local gradients without client bias.

    An optimizer is a pair of functions: U computes the update, V the next state. With
    c = mean_i grad f_i(x) of the cohort, each client i takes one step per batch z, and the server
    updates s once:

        y_i <- y_i + U(grad f_i(y_i; z) - grad f_i(x; z) + c, s)    from x
        x   <- mean_i y_i;   s <- V(c, s)

    A round communicates c, then the y_i, and computes three gradients per batch.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        client_optimizer: the optimizer (U, V). `optax.sgd(momentum=)` is the paper's SGD with
            momentum, up to the factor 1 - beta of g, and `mime_adam` its Adam, unlike `optax.adam`.
        server_optimizer: steps along mean_i (x - y_i), as in `fedavg`.
        aggregator: as in `fedavg`. c is always averaged exactly.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. The paper averages uniformly:
        leave `cohort.num_examples` None. In grad f_i(x), a batch counts by the sum of its `"mask"`;
        without masks, equally.

    Raises:
        TypeError, ValueError: as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = mime(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5, momentum=0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]] * 2, [[5.0]] * 2]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.client_optimizer_state[0].trace.item()  # x and momentum
        (2.25, -3.0)

    Reference:
        Karimireddy et al., Mime, arXiv:2008.03606, algorithm 1.
    """
    return _mime(
        "mime",
        loss_fn,
        cohort_size,
        client_optimizer,
        server_optimizer,
        aggregator,
        chunk_size,
        is_corrected=True,
    )


def mime_lite(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[MimeState]:
    """Take local steps with the server's fixed optimizer state, without correcting client bias.

    As `mime`, with uncorrected local steps y_i <- y_i + U(grad f_i(y_i; z), s). A round computes
    two gradients per batch: one at y_i, and one at x for c = mean_i grad f_i(x), which updates s.

    Arguments, results and errors are those of `mime`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> optimizer = optax.sgd(0.5, momentum=0.5)
        >>> algorithm = mime_lite(loss_fn, cohort_size=2, client_optimizer=optimizer)
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.client_optimizer_state[0].trace.item()
        (1.5, -3.0)

    Reference:
        Karimireddy et al., arXiv:2008.03606, algorithm 1.
    """
    return _mime(
        "mime_lite",
        loss_fn,
        cohort_size,
        client_optimizer,
        server_optimizer,
        aggregator,
        chunk_size,
        is_corrected=False,
    )


class MimeAdamState(NamedTuple):
    """The state of `mime_adam`: m and v, of the parameters' shapes and dtypes."""

    first_moment: optax.Updates
    second_moment: optax.Updates


def mime_adam(
    learning_rate: Any,
    *,
    b1: Any = 0.9,
    b2: Any = 0.99,
    eps: Any = 1e-3,
    initial_second_moment: Any = 1.0,
) -> optax.GradientTransformation:
    """Make the client optimizer of MimeAdam and MimeLiteAdam.

    Its update reads the second moment before the gradient g enters it:

        U(g, (m, v)) = -eta (b1 m + (1 - b1) g) / (sqrt(v) + eps)
        V(g, (m, v)) = (b1 m + (1 - b1) g, b2 v + (1 - b2) g^2)

    A client's own gradients therefore never rescale its steps. m starts at 0, without correction
    for bias. With `b1=0` it is the paper's RMSProp.

    Args:
        learning_rate: eta.
        b1: decay of the first moment, 0 to below 1.
        b2: decay of the second moment, 0 to below 1.
        eps: added to the root of v, positive.
        initial_second_moment: the first v, at least 0. Default 1.0: the first round takes steps of
            SGD with learning rate (1 - b1) eta / (1 + eps).

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> optimizer = mime_adam(0.1, b1=0.0, eps=1.0)
        >>> update, state = optimizer.update(jnp.float32(3.0), optimizer.init(jnp.float32(0.0)))
        >>> round(float(update), 4), round(float(state.second_moment), 4)  # 0.1 * 3 / (1 + 1)
        (-0.15, 1.08)

    Reference:
        Karimireddy et al., arXiv:2008.03606, algorithm 1 with Adam.
    """
    remedies = {"learning_rate": "Pass for example 0.1.", "eps": "Pass 1e-3, the default."}
    for name, value in {"learning_rate": learning_rate, "eps": eps}.items():
        check_setting("mime_adam", name, value, POSITIVE, remedy=remedies[name])
    for name, value in {"b1": b1, "b2": b2}.items():
        remedy = "Pass 0.0 for no memory of earlier rounds."
        check_setting("mime_adam", name, value, DECAY, remedy=remedy)
    name, remedy = "initial_second_moment", "Pass 1.0, the default."
    check_setting("mime_adam", name, initial_second_moment, NON_NEGATIVE, remedy=remedy)

    def init(params: optax.Params) -> MimeAdamState:
        second = jax.tree.map(lambda p: jnp.full_like(p, initial_second_moment), params)
        return MimeAdamState(jax.tree.map(jnp.zeros_like, params), second)

    def update(
        gradient: optax.Updates, state: MimeAdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, MimeAdamState]:
        m, v = state
        first = weighted_sum(b1, m, 1 - b1, gradient)
        updates = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + eps), first, v)
        second = weighted_sum(b2, v, 1 - b2, jax.tree.map(jnp.square, gradient))
        return updates, MimeAdamState(first, second)

    return optax.GradientTransformation(init, update)


def _mime(
    name: str,
    loss_fn: LossFn,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None,
    aggregator: Aggregator | None,
    chunk_size: ChunkSize,
    *,
    is_corrected: bool,
) -> FederatedAlgorithm[MimeState]:
    server = make_server(
        name,
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="gradients at the shared model",
    )

    @program(clients=cohort_size)
    def init(params: Params) -> MimeState:
        return MimeState(params, *server.init(params), client_optimizer.init(params))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def mime_round(state: MimeState, cohort: Cohort) -> tuple[MimeState, Metrics]:
        check_cohort(name, cohort, cohort_size)
        x, s = state.params, state.client_optimizer_state
        weights = as_floats(participant_weights(cohort))

        def gradient_at_x(batches: chex.ArrayTree, num_steps: NumSteps) -> Params:
            return full_gradient(loss_fn, x, batches, num_steps)

        gradients = rematerialized_map(
            gradient_at_x, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        c = federated_mean(gradients, weights_of_finite(server.aggregator, gradients, weights))
        optimizer = _fixed(client_optimizer, s)
        if is_corrected:
            optimizer = optax.chain(_minus_gradient_at(loss_fn, x), added_term(c), optimizer)

        def local_train(batches: chex.ArrayTree, num_steps: NumSteps) -> tuple[Params, Metrics]:
            return local_update(loss_fn, optimizer, x, batches, num_steps)

        pseudo_gradients, metrics = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        state, metrics = server.step(state, pseudo_gradients, metrics, weights)
        _, updated = client_optimizer.update(c, s, x)
        s = unless_all_absent(weights, updated, s, server.aggregator)
        return state._replace(client_optimizer_state=s), metrics

    return FederatedAlgorithm(init, mime_round, sent_exactly=server.sent_exactly)


def _fixed(optimizer: optax.GradientTransformation, state: Any) -> optax.GradientTransformation:
    """Compute an optimizer's updates from one state, never the next state."""
    return optax.stateless(lambda gradient, params: optimizer.update(gradient, state, params)[0])


def _minus_gradient_at(loss_fn: LossFn, x: Params) -> optax.GradientTransformationExtraArgs:
    """Subtract the gradient at x of the step's batch."""

    def update(
        gradient: Params, state: Any, params: Any = None, *, batch: chex.ArrayTree, **extra: Any
    ) -> tuple[Params, Any]:
        return subtract(gradient, gradient_and_metrics(loss_fn, x, batch)[0]), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
