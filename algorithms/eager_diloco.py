"""Eager DiLoCo."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from fedpax.aggregators import Aggregator, mean
from fedpax.algorithm import FederatedAlgorithm, LossFn, Metrics, Params
from fedpax.algorithms.parts.finite_states import keep_finite
from fedpax.algorithms.parts.frozen_leaves import frozen_leaves, keep_leaves
from fedpax.algorithms.parts.inner_steps import make_outer_gradient, start_islands
from fedpax.algorithms.parts.local_steps import optimizer_step
from fedpax.algorithms.parts.method_checks import check_optimizer
from fedpax.algorithms.parts.model_averaging import population_mean
from fedpax.algorithms.parts.participation import mean_metrics, participant_weights, without_absent
from fedpax.algorithms.parts.server import given_aggregator, outer_sgd
from fedpax.clients.cohort import Cohort, NumSteps, check_cohort
from fedpax.primitives import federated_map
from fedpax.transforms.program import program


class EagerDiLoCoState(NamedTuple):
    """The state of eager DiLoCo: each island's outer model x_i and its optimizers' states, placed.

    `outer_gradient` was computed in the last round, and is sent in the next.
    """

    local_params: Params
    outer_gradient: Params
    outer_optimizer_state: optax.OptState
    inner_optimizer_state: optax.OptState
    aggregator_state: chex.ArrayTree

    @property
    def params(self) -> Params:
        """The mean of the islands' outer models."""
        return population_mean(self.local_params)


def eager_diloco(
    loss_fn: LossFn,
    *,
    islands: int,
    inner_optimizer: optax.GradientTransformation,
    outer_optimizer: optax.GradientTransformation | None = None,
    aggregator: Aggregator | None = None,
) -> FederatedAlgorithm[EagerDiLoCoState]:
    """Train as DiLoCo does, and hide the average of a round behind the inner steps of the next one.

    In round t, the islands average the outer gradients of round t - 1 while island i takes its H
    inner steps from x_i to y_i. Its outer step uses its own outer gradient of round t and all
    others of round t - 1:

        Delta_i^t = x_i - y_i;
        x_i <- Outer_i(x_i, mean_j Delta_j^(t-1) + (Delta_i^t - Delta_i^(t-1)) / M).

    In the first round the Delta_j of the previous one are 0. With one island this is `diloco`.

    A round in which every island is absent moves the models too, and has the `"loss"` 0.

    `state.params` is the mean of the islands' models.

    Args:
        loss_fn: `(params, batch) -> (loss, metrics)`.
        islands: number of islands, M.
        inner_optimizer: any optax optimizer; the paper uses AdamW.
        outer_optimizer: any optax optimizer; each island has a state of it. Default None: SGD with
            Nesterov momentum, learning rate 0.4 and momentum 0.9.
        aggregator: combines the islands' outer gradients of the last round. Default None: their
            mean in float32.

    Returns:
        `init(params)` and `round(state, cohort)`, as in `diloco`. Islands count equally.

    Raises:
        TypeError, ValueError: as in `diloco`.

    Example:
        >>> import fedpax
        >>> loss_fn = lambda w, x: (jnp.mean((w - x) ** 2), {})
        >>> algorithm = eager_diloco(
        ...     loss_fn, islands=2, inner_optimizer=optax.sgd(0.5), outer_optimizer=optax.sgd(1.0)
        ... )
        >>> state = algorithm.init(jnp.float32(0.0))
        >>> cohort = fedpax.Cohort(jnp.array([[[1.0]], [[5.0]]]))  # y_i is 1 and 5
        >>> state, metrics = jax.jit(algorithm.round)(state, cohort)
        >>> state.local_params.tolist()  # half of its own progress, nothing of the other's yet
        [0.5, 2.5]

    Reference:
        Kale et al., Eager Updates, arXiv:2502.12996, algorithm of eager updates.
    """
    check_optimizer("eager_diloco", "inner_optimizer", inner_optimizer)
    outer = outer_sgd("eager_diloco", outer_optimizer, 0.4)
    combine = given_aggregator(aggregator, mean(), inner_optimizer)
    outer_gradient = make_outer_gradient(loss_fn, inner_optimizer)

    @program(islands=islands)
    def init(params: Params) -> EagerDiLoCoState:
        models, inner_state = start_islands(params, inner_optimizer)
        return EagerDiLoCoState(
            models,
            federated_map(lambda x: jax.tree.map(jnp.zeros_like, x), models),
            federated_map(outer.init, models),
            inner_state,
            combine.init(params),
        )

    @program(islands=islands)
    def eager_diloco_round(
        state: EagerDiLoCoState, cohort: Cohort
    ) -> tuple[EagerDiLoCoState, Metrics]:
        check_cohort("eager_diloco", cohort, islands, size_argument="islands")
        cohort = without_absent(cohort, cohort.client_ids)
        # The transfer starts here ...
        average, aggregator_state, reported = combine.aggregate(
            state.aggregator_state, state.outer_gradient, None
        )

        def train(
            x: Params, inner_state: optax.OptState, batches: chex.ArrayTree, num_steps: NumSteps
        ) -> tuple[Params, optax.OptState, Metrics]:
            *after, metrics = outer_gradient(x, inner_state, batches, num_steps)
            before = optax.tree.zeros_like(x), inner_state
            return *keep_finite(combine, before, tuple(after)), metrics

        fresh, inner_state, metrics = federated_map(
            train,
            state.local_params,
            state.inner_optimizer_state,
            cohort.batches,
            cohort.num_steps,
        )

        # ... and is used here.
        def outer_step(
            x: Params, fresh: Params, stale: Params, outer_state: optax.OptState
        ) -> tuple[Params, optax.OptState]:
            gradient = jax.tree.map(
                lambda a, new, old: a + (new - old) / islands, average, fresh, stale
            )
            stepped, outer_state = optimizer_step(outer, gradient, outer_state, x)
            return keep_leaves(frozen_leaves(inner_optimizer, x), stepped, x), outer_state

        models, outer_state = federated_map(
            outer_step,
            state.local_params,
            fresh,
            state.outer_gradient,
            state.outer_optimizer_state,
        )
        after = EagerDiLoCoState(models, fresh, outer_state, inner_state, aggregator_state)
        # Last: the compiler would combine a reduction beside the transfer with it.
        after, metrics = jax.lax.optimization_barrier((after, metrics))
        return after, mean_metrics(metrics, participant_weights(cohort), combine, reported)

    return FederatedAlgorithm(init, eager_diloco_round)
