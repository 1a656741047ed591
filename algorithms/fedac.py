"""FedAc."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import chex
import jax
import optax

from fedpax.aggregators import Aggregator, mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_no_keys, check_setting
from fedpax.algorithms.parts.participation import (
    mean_metrics,
    participant_weights,
    rematerialized_map,
)
from fedpax.algorithms.parts.server import given_aggregator
from fedpax.algorithms.parts.tree_arithmetic import subtract, weighted_sum
from fedpax.checks import POSITIVE, Range
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.errors import ArgumentError
from fedpax.primitives.placement import ChunkSize
from fedpax.transforms.program import program


class FedAcRates(NamedTuple):
    """The four settings of FedAc, from `fedac_i`, `fedac_ii` or by hand.

    Attributes:
        eta: learning rate of the aggregated sequence w_ag, positive.
        gamma: learning rate of the main sequence w, at least eta.
        alpha: coupling of w to the middle point, at least 1.
        beta: coupling of the middle point to w, at least 1.
    """

    eta: Any
    gamma: Any
    alpha: Any
    beta: Any


class FedAcState(NamedTuple):
    """The state of FedAc: `params` is w_ag, the model that FedAc returns, and `main` is w."""

    params: Params
    main: Params
    aggregator_state: chex.ArrayTree


def fedac(
    loss_fn: LossFn,
    *,
    cohort_size: int,
    rates: FedAcRates,
    aggregator: Aggregator | None = None,
    chunk_size: ChunkSize = None,
) -> FederatedAlgorithm[FedAcState]:
    """Take accelerated local steps on two sequences, and average both once per round.

    Each client takes one step per batch, with the gradient at a middle point:

        w_md <- w / beta + (1 - 1 / beta) w_ag
        w_ag <- w_md - eta g
        w    <- (1 - 1 / alpha) w + w_md / alpha - gamma g,     g = grad f_i(w_md)

    A round ends by averaging w and w_ag over the clients. With gamma = eta and alpha = beta = 1,
    FedAc is local SGD.

    Args:
        loss_fn: f, `(params, batch) -> (loss, metrics)`.
        cohort_size: number of clients in a round.
        rates: eta, gamma, alpha and beta, from `fedac_i` or `fedac_ii`.
        aggregator: combines the clients' pairs of differences, of w_ag and of w, as one pytree.
            Default None: their weighted mean.
        chunk_size: as in `fedavg`.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `fedavg`. `state.params` is w_ag; the loss
        is that at the middle points. A round sends two models in each direction.

    Raises:
        ValueError: `alpha` or `beta` below 1, or a negative rate; and as in `fedavg`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2) / 2, {})
        >>> rates = FedAcRates(eta=0.25, gamma=0.5, alpha=2.0, beta=3.0)
        >>> algorithm = fedac(loss_fn, cohort_size=2, rates=rates)
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))
        >>> state, metrics = jax.jit(algorithm.round)(algorithm.init(jnp.float32(0.0)), cohort)
        >>> state.params.item(), state.main.item()
        (0.75, 1.5)

    Reference:
        Yuan and Ma, arXiv:2006.08950, algorithm 1.
    """
    for name, value in rates._asdict().items():
        least = 1 if name in ("alpha", "beta") else 0
        remedy = "Make the rates with fedac_i or fedac_ii."
        check_setting("fedac", name, value, Range(least=least), remedy=remedy)
    combine = given_aggregator(aggregator, mean())
    optimizer = _accelerated(rates)

    @program(clients=cohort_size)
    def init(params: Params) -> FedAcState:
        check_no_keys(params)
        return FedAcState(params, params, combine.init((params, params)))

    @program(clients=cohort_size, chunk_size=chunk_size)
    def fedac_round(state: FedAcState, cohort: Cohort) -> tuple[FedAcState, Metrics]:
        check_cohort("fedac", cohort, cohort_size)
        start = state.params, state.main
        share = 1 / rates.beta

        def local_train(
            batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[chex.ArrayTree, Metrics]:
            # The first u and w_md depend on the client's batches: otherwise XLA computes them
            # before its loop over clients, and keeps two more models in memory.
            (aggregated, main), batches = jax.lax.optimization_barrier((start, batches))
            u = subtract(main, aggregated)
            middle = weighted_sum(1, aggregated, share, u)
            middle, u, metrics = local_steps(loss_fn, optimizer, middle, u, batches, num_steps)
            end = weighted_sum(1, middle, -share, u), weighted_sum(1, middle, 1 - share, u)
            return subtract(start, end), metrics

        differences, metrics = rematerialized_map(
            local_train, cohort.batches, cohort.num_steps, chunk_size=chunk_size
        )
        weights = participant_weights(cohort)
        difference, aggregator_state, reported = combine.aggregate(
            state.aggregator_state, differences, weights
        )
        metrics = mean_metrics(metrics, weights, combine, reported)
        params, main = subtract(start, difference)
        return FedAcState(params, main, aggregator_state), metrics

    return FederatedAlgorithm(init, fedac_round)


def fedac_i(learning_rate: float, *, strong_convexity: float, local_steps: int) -> FedAcRates:
    """Set the rates of FedAc-I.

        gamma = max(sqrt(eta / (mu K)), eta);   alpha = 1 / (gamma mu);   beta = alpha + 1

    Args:
        learning_rate: eta, positive, at most 1 / L for an L-smooth loss.
        strong_convexity: mu, positive: of the loss, or a guess to tune.
        local_steps: K, number of local steps in a round.

    Raises:
        ValueError: an argument is not positive, or alpha is below 1.

    Example:
        >>> fedac_i(0.25, strong_convexity=0.5, local_steps=2)
        FedAcRates(eta=0.25, gamma=0.5, alpha=4.0, beta=5.0)

    Reference:
        Yuan and Ma, arXiv:2006.08950, section 3.1.
    """
    gamma = _gamma("fedac_i", learning_rate, strong_convexity, local_steps)
    alpha = 1 / (gamma * strong_convexity)
    return FedAcRates(learning_rate, gamma, alpha, alpha + 1)


def fedac_ii(learning_rate: float, *, strong_convexity: float, local_steps: int) -> FedAcRates:
    """Set the rates of FedAc-II, more stable than FedAc-I.

        gamma = max(sqrt(eta / (mu K)), eta);   alpha = 3 / (2 gamma mu) - 1 / 2;
        beta = (2 alpha^2 - 1) / (alpha - 1)

    Args:
        learning_rate: eta, positive, at most 1 / L for an L-smooth loss.
        strong_convexity: mu, positive: of the loss, or a guess to tune.
        local_steps: K, number of local steps in a round.

    Raises:
        ValueError: an argument is not positive, or alpha is not above 1.

    Example:
        >>> fedac_ii(0.25, strong_convexity=0.5, local_steps=2)
        FedAcRates(eta=0.25, gamma=0.5, alpha=5.5, beta=13.222222222222221)

    Reference:
        Yuan and Ma, arXiv:2006.08950, section 3.1.
    """
    gamma = _gamma("fedac_ii", learning_rate, strong_convexity, local_steps)
    alpha = 3 / (2 * gamma * strong_convexity) - 1 / 2
    return FedAcRates(learning_rate, gamma, alpha, (2 * alpha**2 - 1) / (alpha - 1))


def _gamma(method: str, eta: float, mu: float, steps: int) -> float:
    settings = {"learning_rate": eta, "strong_convexity": mu, "local_steps": steps}
    for name, value in settings.items():
        remedy = f"Pass for example {method}(0.1, strong_convexity=0.01, local_steps=10)."
        check_setting(method, name, value, POSITIVE, remedy=remedy)
    gamma = max(math.sqrt(eta / (mu * steps)), eta)
    if gamma * mu >= 1:
        raise ArgumentError(
            f"{method}(): gamma * strong_convexity is {gamma * mu:g}, expected below 1. Lower "
            "learning_rate or strong_convexity."
        )
    return gamma


def _accelerated(rates: FedAcRates) -> optax.GradientTransformation:
    """Step w_md, the parameters, and u = w - w_ag, the state."""
    # By the equations of `fedac`,
    #
    #     u    <- (1 - 1 / alpha) (1 - 1 / beta) u - (gamma - eta) g
    #     w_md <- w_md - eta g + u / beta.
    # A step then reads and writes one model more than SGD; with w and w_ag it would be two.
    kept = (1 - 1 / rates.alpha) * (1 - 1 / rates.beta)

    def update(gradient: Params, u: Params, middle: Any = None) -> tuple[Params, Params]:
        u = weighted_sum(kept, u, rates.eta - rates.gamma, gradient)
        return weighted_sum(1 / rates.beta, u, -rates.eta, gradient), u

    return optax.GradientTransformation(lambda u: u, update)
