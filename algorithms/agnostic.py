"""Agnostic federated learning."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Num

from fedpax.aggregators import Aggregator
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_metrics, local_update
from fedpax.algorithms.parts.method_checks import (
    check_population,
    check_setting,
    cohort_of_population,
    with_distinct_clients,
)
from fedpax.algorithms.parts.participation import rematerialized_map, takes_part
from fedpax.algorithms.parts.server import make_server
from fedpax.checks import NON_NEGATIVE
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives import federated_sum
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class AgnosticState(NamedTuple):
    """The state of agnostic federated learning: `mixture` is lambda, nonnegative with sum 1."""

    params: Params
    server_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree
    mixture: Float[Array, " population"]


def agnostic(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    num_clients: int,
    client_optimizer: optax.GradientTransformation,
    mixture_learning_rate: float,
    initial_mixture: Num[Array, " population"] | None = None,
    server_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[AgnosticState]:
    """Descend on the model and ascend on the clients' weights: min over x, max over lambda.

    Solves min_x max_lambda sum_i lambda_i f_i(x) over the simplex. In a round with a cohort S out
    of N clients, each client starts from x, takes one optimizer step per batch and ends at y_i:

        x      <- x - sum_{i in S} lambda_i (x - y_i) / sum_{i in S} lambda_i
        lambda <- project(lambda + gamma v),   v_i = N / |S| f_i(x) for i in S, else 0

    with the Euclidean projection to the simplex. A client whose f_i(x) is not finite is left out of
    the ascent, and of |S|.

    With all clients in the cohort and one local step this is AFL. Otherwise it is DRFA's round, but
    one cohort, drawn uniformly, trains with weighted y_i and has its losses measured at x. DRFA
    draws it from lambda, and measures another one's losses at a random iterate.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        num_clients: N, number of clients in the population.
        client_optimizer: any optax optimizer.
        mixture_learning_rate: gamma, at least 0. With 0, lambda stays as it is.
        initial_mixture: the first lambda, nonnegative `[num_clients]`, divided by its sum. Default
            None: 1 / N each.
        server_optimizer: as in `fedavg`.
        aggregator: as in `fedavg`, with the weights lambda_i.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. A round needs
        `cohort.client_ids`, and computes one more forward pass per batch, for f_i(x).
        `cohort.num_examples` tells only which clients are absent: with 0. Metrics are weighted by
        lambda.

    Raises:
        ValueError: a negative `mixture_learning_rate`; `num_clients` below `cohort_size`;
            `initial_mixture` of another shape, with a negative entry, or all 0; in a round,
            `cohort.client_ids` is None; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> algorithm = agnostic(loss_fn, cohort_size=2, num_clients=2,
        ...                      client_optimizer=optax.sgd(0.5), mixture_learning_rate=0.05)
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[3.0]]]), client_ids=jnp.array([0, 1]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), [round(share, 3) for share in state.mixture.tolist()]
        (1.0, [0.4, 0.6])

    Reference:
        Mohri et al., arXiv:1902.00146, section 4; Deng et al., arXiv:2102.12660, algorithm 1
        (DRFA).
    """
    remedy = "Pass 0.0 to keep the mixture as it is."
    check_setting(
        "agnostic", "mixture_learning_rate", mixture_learning_rate, NON_NEGATIVE, remedy=remedy
    )
    check_population("agnostic", cohort_size, num_clients)
    mixture = None if initial_mixture is None else _checked_mixture(initial_mixture, num_clients)
    server = make_server(
        "agnostic",
        server_optimizer,
        aggregator,
        client_optimizer,
        sent_exactly="losses and whether they are finite",
    )

    @program(clients=cohort_size)
    def init(params: Params) -> AgnosticState:
        # Made here: a configuration makes the method before JAX has devices.
        even = jnp.full(num_clients, 1 / num_clients, jnp.float32)
        first = even if mixture is None else mixture
        return AgnosticState(params, *server.init(params), first)

    @program(clients=cohort_size, chunk_size=chunk_size)
    def agnostic_round(state: AgnosticState, cohort: Cohort) -> tuple[AgnosticState, Metrics]:
        check_cohort("agnostic", cohort, cohort_size)
        cohort, client_ids = cohort_of_population("agnostic", cohort, num_clients)
        x, mixture = state.params, state.mixture

        def local_train(
            client: Int[Array, ""],
            is_present: Bool[Array, ""],
            batches: chex.ArrayTree,
            num_steps: NumSteps,
        ) -> tuple[Params, Metrics, jax.Array, jax.Array, jax.Array]:
            pseudo_gradient, metrics = local_update(
                loss_fn, client_optimizer, x, batches, num_steps
            )
            loss = local_metrics(loss_fn, x, batches, num_steps)["loss"]
            weight = jnp.where(is_present, mixture[client], 0)
            is_measured = is_present & jnp.isfinite(loss)
            ascent = jnp.zeros_like(mixture).at[client].add(jnp.where(is_measured, loss, 0))
            return pseudo_gradient, metrics, weight, ascent, is_measured.astype(jnp.float32)

        pseudo_gradients, metrics, weights, ascent, is_measured = rematerialized_map(
            local_train,
            client_ids,
            takes_part(cohort),
            cohort.batches,
            cohort.num_steps,
            chunk_size=chunk_size,
        )
        ascent, measured = federated_sum((ascent, is_measured))
        rate = mixture_learning_rate * num_clients / jnp.maximum(measured, 1)
        state, metrics = server.step(state, pseudo_gradients, metrics, weights)
        ascended = project_to_simplex(mixture + rate * ascent)
        return state._replace(mixture=jnp.where(measured > 0, ascended, mixture)), metrics

    checked_round = with_distinct_clients("agnostic", agnostic_round)
    return FederatedAlgorithm(init, checked_round, sent_exactly=server.sent_exactly)


def project_to_simplex(v: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return the nearest point, in Euclidean distance, with nonnegative entries of sum 1."""
    # The point is `max(v - t, 0)` for the threshold t that gives the sum 1.
    descending = jnp.sort(v, descending=True)
    counts = jnp.arange(1, len(v) + 1)
    thresholds = (jnp.cumsum(descending) - 1) / counts  # if the `count` largest are positive
    return jnp.maximum(v - thresholds[jnp.sum(descending > thresholds) - 1], 0)


def _checked_mixture(mixture: Num[Array, " population"], size: int) -> jax.Array:
    mixture = jnp.asarray(mixture, jnp.float32)
    if mixture.shape != (size,) or not (jnp.all(mixture >= 0) and jnp.any(mixture > 0)):
        raise ArgumentError(
            f"agnostic(): initial_mixture has shape {list(mixture.shape)} and a sum of "
            f"{jnp.sum(mixture):g}, expected nonnegative numbers [{size}], one per client of the "
            "population, not all 0. Pass the clients' numbers of examples, for example."
        )
    return mixture / jnp.sum(mixture)
