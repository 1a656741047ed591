"""APFL: personal models."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.local_steps import count_steps, gradient_and_metrics, local_steps
from fedpax.algorithms.parts.method_checks import (
    check_population,
    check_setting,
    cohort_of_population,
    with_distinct_clients,
)
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import make_server
from fedpax.algorithms.parts.tree_arithmetic import scale, subtract
from fedpax.checks import FRACTION, NON_NEGATIVE
from fedpax.clients import ClientStore, client_store, gather_clients, scatter_clients
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class Personal(NamedTuple):
    """State that a client of APFL keeps."""

    params: Params  # v_i
    mixing: Float[Array, ""]  # alpha_i


class APFLState(NamedTuple):
    """The state of APFL: `personal` has v_i and alpha_i of each client of the population."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    personal: ClientStore[Personal]


def apfl(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clients: int,
    client_optimizer: optax.GradientTransformation,
    mixing: float,
    mixing_learning_rate: float = 0.0,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[APFLState]:
    """Train the shared model as FedAvg does, and each client's mixture of it and a local model.

    Each client i starts from the shared model, w_i = x, and its own v_i. For each batch z, both
    take an optimizer step along

        w_i:  grad f_i(w_i; z)
        v_i:  alpha_i grad f_i(m_i; z),   m_i = alpha_i v_i + (1 - alpha_i) w_i,

    where m_i is its personal model. The w_i are averaged; v_i stays with the client. In the first
    step of a round alpha_i adapts:

        alpha_i <- clip(alpha_i - eta_alpha <v_i - w_i, grad f_i(m_i; z)>, 0, 1)

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        num_clients: number of clients in the population.
        client_optimizer: any optax optimizer, for w_i and for v_i, anew each round.
        mixing: the first alpha_i, from 0 to 1.
        mixing_learning_rate: eta_alpha, at least 0. Default 0: alpha_i stays as it is.
        server_optimizer: as in `fedavg`.
        aggregator: combines the x - w_i, as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. A round needs
        `cohort.client_ids`, and costs two gradients per batch. Metrics: of the shared model, and
        `"personal_loss"`, f_i at m_i. `apfl_models` reads the m_i.

    Raises:
        ValueError: `mixing` not from 0 to 1; `mixing_learning_rate` below 0; `num_clients`
            below `cohort_size`; in a round, `cohort.client_ids` is None; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = apfl(loss_fn, cohort_size=2, num_clients=3, mixing=0.5,
        ...                  client_optimizer=optax.sgd(0.5))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]), client_ids=jnp.array([2, 0]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.personal.to_host().params.tolist()
        (1.5, [1.25, 0.0, 0.25])
        >>> apfl_models(state, cohort.client_ids).tolist()
        [0.875, 1.375]

    Reference:
        Deng et al., arXiv:2003.13461, algorithm 1.
    """
    remedy = "Pass 0.5 for equal shares of the personal and the shared model."
    check_setting("apfl", "mixing", mixing, FRACTION, remedy=remedy)
    remedy = "Pass 0.0 to keep mixing as it is."
    check_setting("apfl", "mixing_learning_rate", mixing_learning_rate, NON_NEGATIVE, remedy=remedy)
    check_population("apfl", cohort_size, num_clients)
    server = make_server("apfl", server_optimizer, aggregator, client_optimizer)

    @program(clients=cohort_size)
    def init(params: Params) -> APFLState:
        server_state = server.init(params)
        personal = client_store(Personal(params, jnp.float32(mixing)), num_clients)
        return APFLState(params, *server_state, personal)

    @program(clients=cohort_size, chunk_size=chunk_size)
    def apfl_round(state: APFLState, cohort: Cohort) -> tuple[APFLState, Metrics]:
        check_cohort("apfl", cohort, cohort_size)
        cohort, client_ids = cohort_of_population("apfl", cohort, num_clients)
        x = state.params

        def local_train(
            personal: Personal, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics, Personal]:
            beside = _personal_steps(loss_fn, client_optimizer, personal, mixing_learning_rate)
            optimizer = optax.chain(beside, client_optimizer)
            w, (end, _), metrics = local_steps(
                loss_fn, optimizer, x, optimizer.init(x), batches, num_steps
            )
            steps = jnp.maximum(count_steps(batches, num_steps), 1)
            kept = keep_finite(server.aggregator, personal, end.personal)
            return subtract(x, w), metrics | {"personal_loss": end.loss / steps}, kept

        personal = gather_clients(state.personal, client_ids)
        pseudo_gradients, metrics, personal = rematerialized_map(
            local_train, personal, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        state, metrics = server.step(state, pseudo_gradients, metrics, participant_weights(cohort))
        return state._replace(
            personal=scatter_clients(state.personal, client_ids, personal)
        ), metrics

    checked_round = with_distinct_clients("apfl", apfl_round)
    return FederatedAlgorithm(init, checked_round, kept_models=apfl_models)


def apfl_models(state: APFLState, client_ids: Int[Array, " clients"]) -> Params:
    """Return the personal models m_i of some clients: alpha_i v_i + (1 - alpha_i) x.

    Args:
        state: a state of `apfl`.
        client_ids: int `[clients]`, indices in the population; -1 gives the shared model.

    Returns:
        A pytree of arrays `[clients, ...]`.
    """
    personal = gather_clients(state.personal, client_ids)
    return jax.vmap(_mix, in_axes=(0, None))(personal, state.params)


class _PersonalSteps(NamedTuple):
    personal: Personal
    optimizer_state: optax.OptState
    is_first: jax.Array
    loss: jax.Array  # summed over steps


def _personal_steps(
    loss_fn: LossFn, optimizer: optax.GradientTransformation, start: Personal, mixing_rate: float
) -> optax.GradientTransformationExtraArgs:
    """Train v and alpha in the state, beside the steps of w, whose gradients pass unchanged."""

    def init(w: Params) -> _PersonalSteps:
        return _PersonalSteps(start, optimizer.init(w), jnp.bool_(True), jnp.float32(0))

    def update(
        gradient: Params, state: _PersonalSteps, w: Any = None, *, batch: Any, **extra: Any
    ) -> tuple[Params, _PersonalSteps]:
        v, alpha = state.personal
        at_mixture, metrics = gradient_and_metrics(loss_fn, _mix(state.personal, w), batch)
        updates, optimizer_state = optimizer.update(
            scale(alpha, at_mixture), state.optimizer_state, v
        )
        if mixing_rate:
            slope = optax.tree.sum(optax.tree.mul(subtract(v, w), at_mixture))
            adapted = jnp.clip(alpha - mixing_rate * slope, 0, 1).astype(alpha.dtype)
            alpha = jnp.where(state.is_first, adapted, alpha)
        personal = Personal(optax.apply_updates(v, updates), alpha)
        loss = state.loss + metrics["loss"].astype(jnp.float32)
        return gradient, _PersonalSteps(personal, optimizer_state, jnp.bool_(False), loss)

    return optax.GradientTransformationExtraArgs(init, update)


def _mix(personal: Personal, w: Params) -> Params:
    """Return the personal model: `alpha v + (1 - alpha) w`."""
    v, alpha = personal
    return jax.tree.map(lambda v, w: (alpha * v + (1 - alpha) * w).astype(w.dtype), v, w)
