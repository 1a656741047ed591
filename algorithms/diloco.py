"""DiLoCo."""

from __future__ import annotations

from typing import NamedTuple

import chex
import optax

from fedpax.aggregators import Aggregator, mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves, keep_leaves
from fedpax.algorithms.parts.inner_steps import make_outer_gradient, start_islands
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.algorithms.parts.method_checks import check_optimizer
from fedpax.algorithms.parts.participation import mean_metrics, participant_weights, without_absent
from fedpax.algorithms.parts.server import as_floats, given_aggregator, outer_sgd, unless_all_absent
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_map
from fedpax.transforms.program import program


class DiLoCoState(NamedTuple):
    """The state of DiLoCo: each island's state of the inner optimizer is placed."""

    params: Params
    outer_optimizer_state: optax.OptState
    inner_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree


def diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[DiLoCoState]:
    """Train islands that communicate once every H local steps.

    Each island i starts from the shared model x and takes H inner steps, one per batch, ending at
    y_i. Then the islands communicate once:

        delta = mean_i (x - y_i);   v <- beta v + delta;   x <- x - eta (delta + beta v).

    The inner optimizer's state stays on its island.

    Args:
        loss_fn: `(params, batch) -> (scalar loss, dict of scalars)`.
        islands: number of islands.
        inner_optimizer: any optax optimizer; the paper uses AdamW. A schedule in it counts inner
            steps over all rounds.
        outer_optimizer: any optax optimizer. Default None: the paper's SGD with Nesterov momentum,
            eta = 0.7 and beta = 0.9.
        aggregator: combines the islands' outer gradients x - y_i into delta. Default None: their
            mean in float32. `fedpax.aggregators.quantized_mean(num_levels)` sends a few bits.

    Returns:
        `init(params)` and `round(state, cohort)`. The leaves of `cohort.batches` are
        `[islands, H, batch, ...]`. The paper's mean is uniform: leave `cohort.num_examples` None,
        or set it to weigh islands by their examples. Metrics, all float32 scalars: `"loss"` and
        the metrics of `loss_fn`, averaged over inner steps and islands, and the aggregator's.

    Raises:
        TypeError: `islands` is not an int, or an optimizer is not optax's; in a round, no
            `fedpax.Cohort`.
        ValueError: `islands` below 1; in a round, batches without an axis of size `islands`.

    Example:
        >>> import fedpax, jax, jax.numpy as jnp, optax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = diloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(0.5), outer_optimizer=optax.sgd(1.0)
        ... )
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))  # two islands, H = 1, one example
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.params.item(), metrics["loss"].item()
        (3.0, 13.0)

    Reference:
        Douillard et al., DiLoCo, arXiv:2311.08105, algorithm 1.
    """
    check_optimizer("diloco", "inner_optimizer", inner_optimizer)
    outer = outer_sgd("diloco", outer_optimizer, 0.7)
    combine = given_aggregator(aggregator, mean(), inner_optimizer)
    outer_gradient = make_outer_gradient(loss_fn, inner_optimizer)

    @program(islands=islands)
    def init(params: Params) -> DiLoCoState:
        _, inner_state = start_islands(params, inner_optimizer)
        return DiLoCoState(params, outer.init(params), inner_state, combine.init(params))

    @program(islands=islands)
    def diloco_round(state: DiLoCoState, cohort: Cohort) -> tuple[DiLoCoState, Metrics]:
        check_cohort("diloco", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)

        def train(
            inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, optax.OptState, Metrics]:
            gradient, after, metrics = outer_gradient(state.params, inner_state, batches, num_steps)
            return gradient, keep_finite(combine, inner_state, after), metrics

        outer_gradients, inner_state, metrics = federated_map(
            train,
            state.inner_optimizer_state,
            cohort.batches,
            cohort.num_steps,
        )
        weights = as_floats(participant_weights(cohort))
        delta, aggregator_state, reported = combine.aggregate(
            state.aggregator_state, outer_gradients, weights
        )
        metrics = mean_metrics(metrics, weights, combine, reported)
        before = state.params, state.outer_optimizer_state
        x, outer_state = optimizer_step(outer, delta, before[1], before[0])
        x = keep_leaves(frozen_leaves(inner_optimizer, x), x, before[0])
        params, outer_state = unless_all_absent(weights, (x, outer_state), before, combine)
        return DiLoCoState(params, outer_state, inner_state, aggregator_state), metrics

    return FederatedAlgorithm(init, diloco_round)
