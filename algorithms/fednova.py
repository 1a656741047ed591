"""FedNova."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.fedavg import FedAvgState
from fedpax.algorithms.parts.frozen_leaves import UNSUITABLE
from fedpax.algorithms.parts.local_steps import count_steps, local_update
from fedpax.algorithms.parts.method_checks import explain_needs
from fedpax.algorithms.parts.participation import (
    mean_metrics,
    participant_weights,
    rematerialized_map,
)
from fedpax.algorithms.parts.server import as_floats, make_server
from fedpax.algorithms.parts.tree_arithmetic import scale
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError, ArgumentTypeError
from fedpax.primitives import federated_mean
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


def fednova(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    client_optimizer: optax.GradientTransformation,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAvgState]:
    """Average the clients' updates divided by the length of their local training.

    In FedAvg, clients with many steps count more. FedNova normalizes each pseudo-gradient,
    averages, and scales back:

        d_i = (x - y_i) / A_i;   g = (sum_i p_i A_i) (sum_i p_i d_i);   x <- x - g,

    with p_i = n_i / sum_j n_j. With SGD of learning rate eta, A_i = eta tau_i for tau_i local
    steps. In general A_i is the paper's eta |a_i|_1: the distance that tau_i steps move a scalar
    parameter along a gradient of 1. This is exact for optimizers linear in the gradients.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        client_optimizer: an optax optimizer that takes a scalar parameter.
        server_optimizer: steps along g, as in `fedavg`; the paper's momentum is `optax.sgd(1.0,
            momentum)`.
        aggregator: combines the d_i, as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. The tau_i are the numbers of
        valid steps.

    Raises:
        ValueError: `client_optimizer` does not take a scalar parameter; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (-jnp.sum(w * x), {})  # client i pulls along x_i
        >>> algorithm = fednova(loss_fn, cohort_size=2, client_optimizer=optax.sgd(0.5))
        >>> batches = jnp.array([[[1.0, 0.0]] * 3, [[0.0, 1.0]] * 3])
        >>> cohort = fedpax.Cohort(batches, num_steps=jnp.array([1, 3]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.zeros(2)), cohort)
        >>> state.params.tolist()  # FedAvg: [0.25, 0.75]
        [0.5, 0.5]

    Reference:
        Wang et al., arXiv:2007.07481, section 4, equation 9.
    """
    server = make_server(
        "fednova",
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="numbers of local steps",
    )
    _check_scalar_rule(client_optimizer)

    @program(clients=cohort_size)
    def init(params: Params) -> FedAvgState:
        return FedAvgState(params, *server.init(params))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def fednova_round(state: FedAvgState, cohort: Cohort) -> tuple[FedAvgState, Metrics]:
        check_cohort("fednova", cohort, cohort_size)
        lengths = _lengths(client_optimizer, jax.tree.leaves(cohort.batches)[0].shape[1])

        def local_train(
            batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics, Float[Array, ""]]:
            pseudo_gradient, metrics = local_update(
                loss_fn, client_optimizer, state.params, batches, num_steps
            )
            length = lengths[count_steps(batches, num_steps)]
            # A client without a step has length 0, and a pseudo-gradient of 0.
            inverse = 1 / jnp.where(length == 0, 1, length)
            return scale(inverse, pseudo_gradient), metrics, length

        normalized, metrics, lengths_taken = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        weights = as_floats(participant_weights(cohort))
        direction, state, reported = server.aggregate(state, normalized, weights)
        length = federated_mean(lengths_taken, weights)
        metrics = mean_metrics(metrics, weights, server.aggregator, reported)
        return server.descend(state, scale(length, direction), weights), metrics

    return FederatedAlgorithm(init, fednova_round, sent_exactly=server.sent_exactly)


def _check_scalar_rule(optimizer: optax.GradientTransformation) -> None:
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        with explain_needs():
            jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), scalar)
    except UNSUITABLE as error:
        if isinstance(error, ArgumentTypeError):
            raise
        raise ArgumentError(
            "fednova(): client_optimizer does not take a scalar parameter, from which fednova "
            "reads the length of local training. Expected the same rule for all parameters: leave "
            "out optax.multi_transform and masks by name, or use fedavg."
        ) from error


def _lengths(optimizer: optax.GradientTransformation, steps: int) -> Float[Array, " lengths"]:
    """Return A for 0 to `steps` local steps."""
    start = jnp.zeros(())

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        param, state = carry
        updates, state = optimizer.update(jnp.ones_like(param), state, param)
        param = jnp.asarray(optax.apply_updates(param, updates))
        return (param, state), -param

    _, moved = jax.lax.scan(step, (start, optimizer.init(start)), length=steps)
    return jnp.concatenate([start[None], moved])
