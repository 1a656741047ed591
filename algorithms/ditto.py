"""Ditto: personal models."""

from __future__ import annotations

from typing import NamedTuple

import chex
import optax
from jaxtyping import Array, Int

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params, Scalar
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.local_steps import after, local_steps, local_update, proximal_term
from fedpax.algorithms.parts.method_checks import (
    check_optimizer,
    check_population,
    check_setting,
    cohort_of_population,
    with_distinct_clients,
)
from fedpax.algorithms.parts.participation import participant_weights, rematerialized_map
from fedpax.algorithms.parts.server import make_server
from fedpax.checks import NON_NEGATIVE
from fedpax.clients import ClientStore, client_store, gather_clients, scatter_clients
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class DittoState(NamedTuple):
    """The state of Ditto: `personal_params` is v_i of each client of the population."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    personal_params: ClientStore[Params]


def ditto(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clients: int,
    client_optimizer: optax.GradientTransformation,
    lam: Scalar,
    personal_optimizer: optax.GradientTransformation | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[DittoState]:
    """Train a shared model as FedAvg does, and beside it each client's personal model.

    Each client i of the cohort takes one optimizer step per batch from the shared model x, for
    FedAvg, and one per batch from its personal model v_i on

        f_i(v) + lambda / 2 |v - x|^2

    with x as it was when the round began. The v_i stay with the clients, and do not influence x.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        num_clients: number of clients in the population.
        client_optimizer: any optax optimizer, for the shared model.
        lam: lambda, at least 0. With 0 the v_i are trained alone; the personal learning rate must
            stay below 2 / lambda.
        personal_optimizer: any optax optimizer, for the personal models, anew each round. Default
            None: `client_optimizer`.
        server_optimizer: as in `fedavg`.
        aggregator: of the shared model, as in `fedavg`.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. All v_i start at `params`. A
        round needs `cohort.client_ids`, and costs two gradients per batch. Metrics: of the
        shared model, and `"personal_loss"`, f_i at the personal models over their steps.
        `gather_clients(state.personal_params, client_ids)` reads the personal models of clients.

    Raises:
        ValueError: `lam` below 0; `num_clients` below `cohort_size`; in a round,
            `cohort.client_ids` is None; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = ditto(loss_fn, cohort_size=2, num_clients=3, lam=1.0,
        ...                   client_optimizer=optax.sgd(0.25))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]), client_ids=jnp.array([2, 0]))
        >>> state, step = algorithm.init(jnp.float32(0.0)), jax.jit(algorithm.round)
        >>> for _ in range(50):
        ...     state, metrics = step(state, cohort)
        >>> round(state.params.item(), 3)
        3.0
        >>> state.personal_params.to_host().round(3).tolist()  # half way to each client's optimum
        [4.0, 0.0, 2.0]

    Reference:
        Li et al., Ditto, arXiv:2012.04221, algorithm 1.
    """
    check_optimizer("ditto", "personal_optimizer", personal_optimizer, optional=True)
    check_setting(
        "ditto", "lam", lam, NON_NEGATIVE, remedy="Pass 0.0 for personal models without a tie."
    )
    check_population("ditto", cohort_size, num_clients)
    personal = client_optimizer if personal_optimizer is None else personal_optimizer
    server = make_server("ditto", server_optimizer, aggregator, client_optimizer)

    @program(clients=cohort_size)
    def init(params: Params) -> DittoState:
        return DittoState(params, *server.init(params), client_store(params, num_clients))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def ditto_round(state: DittoState, cohort: Cohort) -> tuple[DittoState, Metrics]:
        check_cohort("ditto", cohort, cohort_size)
        cohort, client_ids = cohort_of_population("ditto", cohort, num_clients)
        x = state.params
        toward_shared = after(proximal_term(lam, x), personal)

        def local_train(
            v: Params, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, Metrics, Params]:
            pseudo_gradient, metrics = local_update(
                loss_fn, client_optimizer, x, batches, num_steps
            )
            trained, _, reported = local_steps(
                loss_fn, toward_shared, v, toward_shared.init(v), batches, num_steps
            )
            v = keep_finite(server.aggregator, v, trained)
            return pseudo_gradient, metrics | {"personal_loss": reported["loss"]}, v

        v = gather_clients(state.personal_params, client_ids)
        pseudo_gradients, metrics, v = rematerialized_map(
            local_train, v, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        state, metrics = server.step(state, pseudo_gradients, metrics, participant_weights(cohort))
        personal_params = scatter_clients(state.personal_params, client_ids, v)
        return state._replace(personal_params=personal_params), metrics

    checked_round = with_distinct_clients("ditto", ditto_round)

    def kept_models(state: DittoState, client_ids: Int[Array, " clients"]) -> Params:
        return gather_clients(state.personal_params, client_ids)

    return FederatedAlgorithm(init, checked_round, kept_models=kept_models)
