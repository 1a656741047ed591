"""FedAsync."""

from __future__ import annotations

from typing import Literal, NamedTuple

import chex
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.arrivals import (
    History,
    StalenessFn,
    polynomial_staleness,
    start_history,
)
from fedpax.algorithms.parts.local_steps import after, local_update, proximal_term
from fedpax.algorithms.parts.method_checks import check_no_keys, check_optimizer, check_setting
from fedpax.algorithms.parts.participation import participant_weights
from fedpax.algorithms.parts.tree_arithmetic import scale, subtract
from fedpax.checks import COUNT_OR_ZERO, FRACTION, NON_NEGATIVE, check_argument
from fedpax.clients import Arrivals
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_map, federated_mean
from fedpax.transforms.program import program


class FedAsyncState(NamedTuple):
    """The state of FedAsync: `history` has the last `max_staleness + 1` versions of the model."""

    params: Params
    history: History


def fedasync(
    loss_fn: LossFn,
    *,
    max_staleness: int,
    client_optimizer: optax.GradientTransformation,
    mixing: float,
    staleness_fn: StalenessFn | None = None,
    proximal: float = 0.0,
    update: Literal["model", "difference"] = "model",
) -> FederatedAlgorithm[FedAsyncState]:
    """Mix the model of one client at a time into the server's, with less weight if it is stale.

    A client trains from version t - s of the model, x_(t - s), to y. It arrives at a server whose
    model is now x_t:

        x_(t+1) = (1 - a) x_t + a y,    a = mixing (1 + s)^(-1/2)       update="model"
        x_(t+1) = x_t + a (y - x_(t - s))                               update="difference"

    "model" is the paper's update; "difference" is that of `fedbuff`.

    A round is one arrival, scheduled by `fedpax.simulation.buffered_arrivals`.

    Memory: `max_staleness + 1` versions of the model beside the model.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        max_staleness: the largest staleness that is used; a staler client changes nothing.
        client_optimizer: any optax optimizer; it starts anew at each client.
        mixing: alpha, the share of a client's model without staleness, from 0 to 1.
        staleness_fn: the factor of `mixing` by staleness. Default None:
            `polynomial_staleness(0.5)`.
        proximal: rho; `rho / 2 |w - x_(t - s)|^2` is added to the client's loss.
        update: "model", the default, or "difference".

    Returns:
        `init(params)` and `round(state, cohort)`. The leaves of `cohort.batches` are
        `[1, steps, batch, ...]`; `cohort.schedule` is an `Arrivals`, or None for staleness 0.
        Metrics, all float32 scalars: `"loss"` and the metrics of `loss_fn`, averaged over the
        client's steps, and `"staleness"`.

    Raises:
        TypeError: a setting has another type; and as in `fedavg`.
        ValueError: a setting is out of range; in a round, a cohort of more than one client.

    Example:
        >>> import fedpax, jax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = fedasync(
        ...     loss_fn, max_staleness=3, client_optimizer=optax.sgd(0.5), mixing=0.5
        ... )
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> for example, staleness in ((4.0, 0), (8.0, 1)):  # each client ends at its example
        ...     arrivals = fedpax.clients.Arrivals(jnp.array([staleness]))
        ...     cohort = fedpax.Cohort(jnp.full((1, 1, 1), example), schedule=arrivals)
        ...     state, metrics = step(state, cohort)
        >>> round(state.params.item(), 4)  # 2 + 0.5 * 2^(-1/2) * (8 - 2)
        4.1213

    Reference:
        Xie et al., arXiv:1903.03934, algorithm 1.
    """
    check_optimizer("fedasync", "client_optimizer", client_optimizer)
    remedy = "Pass the largest staleness of the schedule, or 0 to use fresh models alone."
    check_argument("fedasync", "max_staleness", max_staleness, COUNT_OR_ZERO, remedy=remedy)
    check_setting("fedasync", "mixing", mixing, FRACTION, remedy="Pass for example 0.6.")
    check_setting(
        "fedasync", "proximal", proximal, NON_NEGATIVE, remedy="Pass 0.0 for no proximal term."
    )
    if update not in ("model", "difference"):
        raise ArgumentError(
            f'fedasync(): update is {update!r}, expected "model" or "difference". Pass "model" for '
            "the paper's update."
        )
    weigh = polynomial_staleness() if staleness_fn is None else staleness_fn

    @program(clients=1)
    def init(params: Params) -> FedAsyncState:
        check_no_keys(params)
        return FedAsyncState(params, start_history(params, max_staleness + 1))

    @program(clients=1)
    def fedasync_round(state: FedAsyncState, cohort: Cohort) -> tuple[FedAsyncState, Metrics]:
        check_cohort("fedasync", cohort, 1, Arrivals, size_argument=None)
        if cohort.schedule is None:
            staleness = jnp.zeros(1, jnp.int32)
        else:
            staleness = cohort.schedule.staleness

        def train(
            staleness: Int[Array, ""], batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics]:
            # Without a schedule, a client receives one model, as `fedpax.cost` counts it.
            has_schedule = cohort.schedule is not None
            start = state.history.read(staleness) if has_schedule else state.params
            optimizer = after(proximal_term(proximal, start), client_optimizer)
            difference, metrics = local_update(loss_fn, optimizer, start, batches, num_steps)
            if update == "model":
                difference = optax.tree.add(subtract(state.params, start), difference)
            stale = staleness.astype(jnp.float32)
            return scale(mixing * weigh(stale), difference), metrics | {"staleness": stale}

        trained = federated_map(train, staleness, cohort.batches, cohort.num_steps)
        weights = participant_weights(cohort)
        weights = federated_map(
            lambda s, weight: jnp.where(s <= max_staleness, weight, 0.0),
            staleness,
            jnp.ones(1) if weights is None else weights,
        )
        pseudo_gradient, metrics = federated_mean(trained, weights)
        params = subtract(state.params, pseudo_gradient)
        return FedAsyncState(params, state.history.append(params)), metrics

    return FederatedAlgorithm(init, fedasync_round)
