"""EASGD."""

from __future__ import annotations

from typing import Any, NamedTuple

import chex
import optax

from fedpax.aggregators import Aggregator, mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.inner_steps import start_islands
from fedpax.algorithms.parts.local_steps import local_steps
from fedpax.algorithms.parts.method_checks import check_optimizer, check_setting
from fedpax.algorithms.parts.participation import mean_metrics, participant_weights, without_absent
from fedpax.algorithms.parts.server import given_aggregator
from fedpax.algorithms.parts.tree_arithmetic import subtract, weighted_sum
from fedpax.checks import PROBABILITY
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_map
from fedpax.transforms.program import program


class EASGDState(NamedTuple):
    """The state of EASGD: the center variable, and each island's model x_i, placed."""

    params: Params
    local_params: Params
    optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree


def easgd(
    loss_fn: LossFn,
    *,
    islands: int,
    optimizer: optax.GradientTransformation,
    beta: Any = 0.9,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[EASGDState]:
    """Train islands whose models and a center pull at each other: elastic averaging SGD.

    Each island i takes tau local steps from its own x_i, one per batch. Then, with n islands and
    alpha = beta / n,

        d_i = x_i - c;   x_i <- x_i - alpha d_i;   c <- c + beta mean_i d_i.

    Both updates use the old values; the elastic step follows the local ones. Momentum in the
    optimizer gives EAMSGD.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands, n.
        optimizer: any optax optimizer.
        beta: n alpha, above 0 and at most 1. Default 0.9, as in the paper.
        aggregator: combines the islands' differences d_i. Default None: their mean.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`, with H = tau. An island without a
        valid step has weight 0 in the mean, and its model is pulled nevertheless.

    Raises:
        TypeError: as in `diloco`.
        ValueError: `beta` out of range; and as in `diloco`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = easgd(loss_fn, islands=2, optimizer=optax.sgd(0.5), beta=0.5)
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))  # x = 1 and 5
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params.item(), state.local_params.tolist()
        (1.5, [0.75, 3.75])

    Reference:
        Zhang, Choromanska, LeCun, arXiv:1412.6651, section 3, and algorithm 1 (the period).
    """
    check_optimizer("easgd", "optimizer", optimizer)
    check_setting("easgd", "beta", beta, PROBABILITY, remedy="Pass 0.9, as the paper.")
    combine = given_aggregator(aggregator, mean(), optimizer)

    @program(islands=islands)
    def init(params: Params) -> EASGDState:
        return EASGDState(params, *start_islands(params, optimizer), combine.init(params))

    @program(islands=islands)
    def easgd_round(state: EASGDState, cohort: Cohort) -> tuple[EASGDState, Metrics]:
        check_cohort("easgd", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)
        center, alpha = state.params, beta / islands

        def explore(
            x: Params, optimizer_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Any, Any, optax.OptState, Metrics]:
            *after, metrics = local_steps(
                loss_fn, optimizer, x, optimizer_state, batches, num_steps
            )
            difference = subtract(after[0], center)
            x, optimizer_state = keep_finite(combine, (x, optimizer_state), tuple(after))
            x = weighted_sum(1, x, -alpha, subtract(x, center))
            return difference, x, optimizer_state, metrics

        differences, models, optimizer_state, metrics = federated_map(
            explore, state.local_params, state.optimizer_state, cohort.batches, cohort.num_steps
        )
        weights = participant_weights(cohort)
        difference, aggregator_state, reported = combine.aggregate(
            state.aggregator_state, differences, weights
        )
        center = weighted_sum(1, center, beta, difference)
        after = EASGDState(center, models, optimizer_state, aggregator_state)
        return after, mean_metrics(metrics, weights, combine, reported)

    return FederatedAlgorithm(init, easgd_round)
